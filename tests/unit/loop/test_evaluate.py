"""Held-out numbers by hand: intervals, pass@k, faults left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from polyturn.errors import TooManyDroppedError
from polyturn.loop.evaluate import Estimate, pass_at_k, summarise
from unit.loop.makers import make_group, make_task, make_trajectory, make_turn, successes


def sampled(*groups, **given):
    return summarise(groups, mode="sampled", **given)


def close(estimate: Estimate, mean: float, low: float, high: float) -> None:
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((mean, low, high), abs=5e-4)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_by_published_numbers(right, of, low, high):
    """81 of 263: Newcombe 1998, Table I; the others from the formula at z = 1.96."""
    groups = [successes(index < right, name=str(index)) for index in range(of)]
    close(sampled(*groups).success, right / of, low, high)


@pytest.mark.parametrize("attempts", range(1, 7))
def test_pass_at_k_against_every_choice_of_k_attempts(attempts):
    for right in range(attempts + 1):
        flags = [True] * right + [False] * (attempts - right)
        for k in range(1, attempts + 1):
            choices = list(combinations(flags, k))
            assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_a_group_by_hand():
    found = sampled(successes(True, False, False, False, name="a"), successes(False, False, False, False, name="b"))
    assert found.pass_at.keys() == {1, 2, 4}
    # Task a: 1/4 of one attempt, 3 of 6 pairs, all four. Task b: never. A normal interval over two tasks.
    assert [found.pass_at[k].mean for k in (1, 2, 4)] == pytest.approx([0.125, 0.25, 0.5])
    half = 1.959964 * (0.5 / 2**0.5) / 2**0.5
    close(found.pass_at[2], 0.25, 0.25 - half, 0.25 + half)


def test_pass_at_includes_an_odd_number_of_attempts():
    assert sampled(successes(True, False, True)).pass_at.keys() == {1, 2, 3}


def test_faults_are_in_no_mean_but_counted():
    found = sampled(successes(True, name="a"), successes(None, name="b"), successes(False, name="c"), successes(True, name="d"))
    assert (found.episodes, found.faults) == (4, 1)
    assert found.success.mean == found.reward.mean == pytest.approx(2 / 3)
    assert found.components["answer"].mean == pytest.approx(2 / 3)
    assert found.end_reasons == {"done": 1.0}


def test_a_task_short_of_attempts_is_left_out_of_that_k_only():
    found = sampled(successes(True, None, name="a"), successes(False, True, name="b"))
    assert found.pass_at[1].mean == pytest.approx((1.0 + 0.5) / 2)
    assert found.pass_at[2].mean == 1.0
    lonely = sampled(successes(True, None, name="a"))
    assert lonely.pass_at.keys() == {1}, "there is no pair to look at"


def test_attempts_at_one_task_are_no_independent_draws():
    """Two tasks, eight attempts each, one always solved and one never: what is known is two draws, not sixteen."""
    found = sampled(successes(*[True] * 8, name="a"), successes(*[False] * 8, name="b"))
    assert found.success.mean == 0.5
    half = 1.959964 * (0.5**0.5) / 2**0.5
    close(found.success, 0.5, 0.5 - half, 0.5 + half)


def test_tasks_weigh_alike_whatever_was_lost_of_them():
    found = sampled(successes(True, None, None, name="a"), successes(False, False, False, name="b"))
    assert found.success.mean == 0.5


@pytest.mark.parametrize(("share", "dies"), [(0.5, False), (0.49, True), (0.0, True)])
def test_too_many_lost(share, dies):
    groups = [successes(True, name="a"), successes(None, name="b")]
    if not dies:
        assert sampled(*groups, max_dropped_share=share).faults == 1
        return
    with pytest.raises(TooManyDroppedError, match=r"1 of 2 evaluation episodes were lost.*the first reason: lost"):
        sampled(*groups, max_dropped_share=share)


def test_a_share_that_no_float_holds():
    groups = [successes(None if index < 29 else True, name=str(index)) for index in range(100)]
    assert sampled(*groups, max_dropped_share=0.29).faults == 29


def test_everything_lost_is_never_a_result():
    with pytest.raises(TooManyDroppedError):
        sampled(successes(None), max_dropped_share=1.0)


def test_means_and_counts_by_hand():
    task = make_task()
    turns = [make_turn(0, reward=0.5, sampled=3, counts={"cut": 1}), make_turn(1, counts={"cut": 2})]
    first = make_group(make_trajectory(0, task=task, turns=turns, outcome=1.0, success=True))
    second = make_group(make_trajectory(0, task=make_task("1"), end="max_turns"))
    found = sampled(first, second)
    half = 1.959964 * (1.5 / 2**0.5) / 2**0.5
    close(found.reward, 0.75, 0.75 - half, 0.75 + half)
    assert (found.turns.mean, found.tokens.mean) == (1.5, 3.5)
    assert found.end_reasons == {"done": 0.5, "max_turns": 0.5}
    assert found.counts == {"cut": 1.5}


def test_a_component_that_was_never_computed_is_left_out():
    found = sampled(make_group(replace(make_trajectory(), outcome={"answer": 1.0, "style": None})))
    assert found.components.keys() == {"answer"}


def test_metrics_are_named_by_mode():
    group = successes(True, False)
    for mode, prefix in (("sampled", "eval/"), ("greedy", "eval_greedy/")):
        numbers = summarise([group], mode=mode).metrics()
        assert all(name.startswith(prefix) for name in numbers)
        assert numbers[f"{prefix}success"] == 0.5
        assert numbers[f"{prefix}pass@2"] == 1.0
        assert numbers[f"{prefix}num_faults"] == 0.0
        assert {f"{prefix}success_low", f"{prefix}success_high", f"{prefix}end/done", f"{prefix}outcome/answer"} <= set(numbers)
