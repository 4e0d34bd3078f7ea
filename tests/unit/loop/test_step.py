"""What becomes of a step's trajectories: batches with exact counts, and a run that has lost too many."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from polyturn.config.schema import MixEntry, Recipe
from polyturn.errors import ConfigError, TooManyDroppedError
from polyturn.loop.step import BatchReport, DropGuard, build_batches, refuse_unknown_weights
from polyturn.loop.sync import rollout_metrics
from polyturn.types import TrajectoryGroup
from unit.loop.makers import make_credit, make_group, make_recipe, make_task, make_trajectory, make_turn


def healthy(name: str = "0", *, size: int = 4, turns: int = 2) -> TrajectoryGroup:
    task = make_task(name)
    return make_group(*(make_trajectory(i, task=task, turns=turns) for i in range(size)))


def batches_of(groups, credit, recipe: Recipe | None = None):
    return build_batches(recipe or make_recipe(), groups, credit)


# ── weights of components ──────────────────────────────────────────────────────────────────────────────────────────────


def scored(*outcomes) -> list[TrajectoryGroup]:
    return [make_group(*(replace(make_trajectory(i), outcome=outcome) for i, outcome in enumerate(outcomes)))]


def weighing(**sections) -> Recipe:
    return make_recipe(environment={"reward_weights": {"judge": 2.0, "judge/tone": 0.5, "style": 0.0}}, **sections)


def test_a_weight_is_known_by_its_component_or_by_the_name_before_the_slash():
    refuse_unknown_weights(weighing(), scored({"answer": 1.0, "style": None}, {"judge/tone": 0.3}))


def test_a_weight_that_nothing_bears_ends_the_run():
    with pytest.raises(ConfigError, match=r"reward_weights has judge, judge/tone, .*; did you mean judges\?"):
        refuse_unknown_weights(weighing(), scored({"judges": 1.0, "style": None}))


def test_in_a_mix_it_is_a_warning(caplog):
    recipe = weighing()
    mix = (MixEntry(environment="parts.environments:Colours"),)
    mixed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"mix": mix})})
    refuse_unknown_weights(mixed, scored({"style": 1.0}))
    assert "reward_weights has judge, judge/tone" in caplog.text


def test_where_everything_was_lost_nothing_is_known_of_weights():
    refuse_unknown_weights(weighing(), [make_group(make_trajectory(0, fault="gone"), make_trajectory(1, fault="gone"))])


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_healthy_groups_become_one_batch():
    groups = [healthy("a"), healthy("b")]
    (batch,), report = batches_of(groups, [make_credit(group, 1.0, -1.0, 2.0, -2.0) for group in groups])
    assert batch.planned_trajectories == 8
    assert batch.trajectory_ids == tuple(f"task/{name}/{i}" for name, i in product("ab", range(4)))
    # Two turns of 3 read and 2 sampled tokens each, rows of 32 tokens: three samples a row.
    assert (batch.num_tokens, batch.num_trained_tokens, len(batch.rows)) == (80, 32, 3)
    assert report == BatchReport(planned=8)
    assert report.dropped == 0


def test_advantages_reach_their_own_tokens():
    group = make_group(*(make_trajectory(i, turns=2) for i in range(2)))
    credit = replace(make_credit(group, 0, 0), per_turn=(np.array([0.5, -0.25]), np.array([1.5, 2.0])))
    (batch,), _ = batches_of([group], [credit])
    (row,) = batch.rows
    assert row.advantages[row.loss_mask].tolist() == [0.5, 0.5, -0.25, -0.25, 1.5, 1.5, 2.0, 2.0]
    assert row.turn_index[row.loss_mask].tolist() == [0, 0, 1, 1] * 2
    assert row.temperature.tolist() == [1.0] * 20


def test_the_samples_carry_the_temperature_of_the_rollout():
    group = healthy(size=2)
    recipe = make_recipe(rollout={"temperature": 0.7})
    (batch,), _ = batches_of([group], [make_credit(group, 1.0, -1.0)], recipe)
    assert set(batch.rows[0].temperature.tolist()) == {np.float32(0.7)}


def test_faults_are_left_out_and_counted_and_still_planned():
    group = make_group(make_trajectory(0), make_trajectory(1, fault="the sandbox is gone"), make_trajectory(2))
    (batch,), report = batches_of([group], [make_credit(group, 1.0, None, -1.0)])
    assert batch.trajectory_ids == ("task/0/0", "task/0/2")
    assert batch.planned_trajectories == 3
    assert report == BatchReport(planned=3, faults=["task/0/1: the sandbox is gone"])
    assert report.dropped == 1


def test_a_trajectory_without_a_reward_is_lost_too():
    group = make_group(make_trajectory(0), make_trajectory(1, outcome=None), make_trajectory(2))
    _, report = batches_of([group], [make_credit(group, 1.0, None, -1.0)])
    assert report.faults == ["task/0/1: no reward"]


def test_a_group_with_one_sibling_left_is_dropped():
    small = make_group(make_trajectory(0), *(make_trajectory(i, fault="lost") for i in (1, 2)))
    other = healthy("b")
    (batch,), report = batches_of([small, other], [make_credit(small, 1.0, None, None), make_credit(other, 1, -1, 1, -1)])
    assert batch.trajectory_ids == tuple(f"task/b/{i}" for i in range(4))
    assert batch.planned_trajectories == 7
    assert (report.small_groups, len(report.faults), report.zero_advantage_groups) == (1, 2, 0)


def test_a_group_that_teaches_nothing_is_skipped():
    groups = [healthy("a"), healthy("b")]
    (batch,), report = batches_of(groups, [make_credit(groups[0], 0, 0, 0, 0), make_credit(groups[1], 1, 0, 0, 0)])
    assert batch.trajectory_ids == tuple(f"task/b/{i}" for i in range(4)), "all siblings of a group that does teach"
    assert batch.planned_trajectories == 8
    assert report == BatchReport(planned=8, zero_advantage_groups=1)


def test_nothing_left_is_no_batch():
    group = healthy()
    batches, report = batches_of([group], [make_credit(group, 0, 0, 0, 0)])
    assert batches == []
    assert report.zero_advantage_groups == 1
    assert report.dropped == 0, "there was nothing to learn, which is not a loss"


@pytest.mark.parametrize("end", ["max_turns", "max_tokens"])
@pytest.mark.parametrize("mask", [True, False])
def test_mask_truncated(end, mask):
    group = make_group(make_trajectory(0), make_trajectory(1, end=end), make_trajectory(2))
    recipe = make_recipe(rollout={"mask_truncated": mask})
    (batch,), report = batches_of([group], [make_credit(group, 1.0, -2.0, 1.0)], recipe)
    assert len(batch.trajectory_ids) == (2 if mask else 3)
    assert report == BatchReport(planned=3, masked_truncated=int(mask))
    assert batch.planned_trajectories == 3
    assert report.dropped == 0, "masked on purpose"


@pytest.mark.parametrize("broken", ["nan logprob", "nan advantage", "lengths"])
def test_a_broken_sample_is_dropped_and_counted_and_the_others_kept(broken):
    turn = make_turn()
    values = [1.0, -1.0, 2.0]
    if broken == "nan logprob":
        turn = replace(turn, engine_logprobs=(float("nan"), -0.5))
    elif broken == "lengths":
        turn = replace(turn, engine_logprobs=(-0.5,))
    else:
        values[1] = float("nan")
    group = make_group(make_trajectory(0), make_trajectory(1, turns=[turn]), make_trajectory(2))
    (batch,), report = batches_of([group], [make_credit(group, *values)])
    assert batch.trajectory_ids == ("task/0/0", "task/0/2")
    assert len(report.broken_samples) == report.dropped == 1
    assert report.broken_samples[0].startswith("task/0/1: ")


def test_a_sample_longer_than_a_row_is_dropped():
    long = make_trajectory(1, turns=[make_turn(prompt=31, sampled=2)])
    group = make_group(make_trajectory(0), long, make_trajectory(2))
    (batch,), report = batches_of([group], [make_credit(group, 1.0, -1.0, 2.0)])
    assert batch.trajectory_ids == ("task/0/0", "task/0/2")
    assert report.broken_samples == ["task/0/1: 33 tokens do not fit trainer.row_tokens=32"]


def test_of_a_trajectory_with_one_broken_sample_nothing_is_kept():
    turns = [make_turn(0), replace(make_turn(prompt=31), continues=False)]
    group = make_group(make_trajectory(0, turns=turns), make_trajectory(1), make_trajectory(2))
    (batch,), report = batches_of([group], [make_credit(group, 1.0, -1.0, 2.0)])
    assert batch.trajectory_ids == ("task/0/1", "task/0/2")
    assert report.dropped == 1


def test_batches_are_cut_by_whole_groups():
    groups = [healthy(name) for name in "abcde"]
    recipe = make_recipe(trainer={"optimizer_steps_per_batch": 2})
    batches, report = batches_of(groups, [make_credit(group, 1, -1, 1, -1) for group in groups], recipe)
    assert [batch.planned_trajectories for batch in batches] == [12, 8]
    assert [{name.split("/")[1] for name in batch.trajectory_ids} for batch in batches] == [set("abc"), set("de")]
    assert report.planned == 20


def test_an_optimizer_step_without_samples_is_left_out():
    groups = [healthy("a"), healthy("b")]
    recipe = make_recipe(trainer={"optimizer_steps_per_batch": 2})
    batches, _ = batches_of(groups, [make_credit(groups[0], 0, 0, 0, 0), make_credit(groups[1], 1, -1, 1, -1)], recipe)
    assert [batch.planned_trajectories for batch in batches] == [4]


# ── losing too many ────────────────────────────────────────────────────────────────────────────────────────────────────


def lost(count: int, planned: int = 10) -> BatchReport:
    return BatchReport(planned=planned, faults=[f"fault {i}" for i in range(count)])


def test_one_bad_step_at_the_start_does_not_end_a_run():
    guard = DropGuard(0.1, 20)
    guard.check(lost(9))  # of 200 in the window, 20 may be lost
    guard.check(lost(9))
    with pytest.raises(TooManyDroppedError, match=r"27 of 30 trajectories of the last 3 steps were lost.*: fault 8"):
        guard.check(lost(9))


def test_a_whole_step_lost_ends_the_run_at_once():
    with pytest.raises(TooManyDroppedError, match=r"10 of 10 trajectories of the last 1 steps"):
        DropGuard(1.0, 20).check(lost(10))


def test_old_steps_leave_the_window():
    guard = DropGuard(0.2, 2)
    for count in (4, 0, 4, 0, 4):
        guard.check(lost(count))
    with pytest.raises(TooManyDroppedError):
        guard.check(lost(1))


def test_exactly_the_share_is_allowed_and_one_more_is_not():
    guard = DropGuard(0.1, 1)
    guard.check(lost(1))
    with pytest.raises(TooManyDroppedError):
        guard.check(lost(2))


def test_nothing_may_be_lost_with_a_share_of_0():
    guard = DropGuard(0.0, 20)
    guard.check(lost(0))
    with pytest.raises(TooManyDroppedError):
        guard.check(lost(1))


def test_broken_samples_count_as_faults_do():
    report = BatchReport(planned=10, faults=["fault"], broken_samples=["broken"])
    with pytest.raises(TooManyDroppedError, match="the last reason: broken"):
        DropGuard(0.1, 1).check(report)


@pytest.mark.parametrize(
    ("share", "planned", "window", "count"), [(0.15, 128, 20, 384), (0.15, 4, 10, 6), (0.29, 100, 1, 29), (0.6, 8, 10, 48)]
)
def test_a_share_that_no_float_holds(share, planned, window, count):
    """0.15 x 128 x 20 is 384 and a little, or 384 and a little less, by the order of the product."""
    guard = DropGuard(share, window)
    for _ in range(window):
        now = min(count, planned - 1)
        count -= now
        guard.check(lost(now, planned))
    assert count == 0


# ── numbers of a step ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_rollout_metrics_by_hand():
    task = make_task()
    counted = [make_turn(0, reward=0.5, counts={"cut": 1}), make_turn(1, reward=0.25, counts={"cut": 1})]
    group = make_group(
        make_trajectory(0, task=task, turns=counted, outcome=1.0, success=True),
        make_trajectory(1, task=task, turns=1, outcome=0.0, end="max_turns"),
        make_trajectory(2, task=task, fault="lost"),
    )
    batches, report = batches_of([group], [make_credit(group, 1.0, -1.0, None)])
    numbers = rollout_metrics([group], report, batches)
    assert numbers["reward"] == pytest.approx((1.75 + 0.0) / 2)
    assert numbers["reward_std"] == pytest.approx(1.75 / 2**0.5)
    assert numbers["success"] == 0.5
    assert numbers["outcome/answer"] == 0.5
    assert numbers["environment/cut"] == 1.0
    assert numbers["turns_per_trajectory"] == 1.5
    assert numbers["completion_tokens_per_trajectory"] == 3.0
    assert numbers["truncated_share"] == 0.5
    assert numbers["dropped_share"] == pytest.approx(1 / 3)
    assert (numbers["num_faults"], numbers["num_dropped_samples"], numbers["num_dropped_groups"]) == (1, 0, 0)
    assert (numbers["num_rows"], numbers["num_tokens"], numbers["num_trained_tokens"]) == (1, 15, 6)


def test_a_component_that_could_not_be_computed_is_no_zero():
    group = make_group(
        replace(make_trajectory(0, outcome=1.0), outcome={"answer": 1.0, "style": None}),
        replace(make_trajectory(1, outcome=0.0), outcome={"answer": 0.0, "style": 0.8}),
    )
    numbers = rollout_metrics([group], BatchReport(planned=2), [])
    assert numbers["outcome/style"] == pytest.approx(0.8)


def test_a_step_that_lost_everything_has_numbers():
    group = make_group(*(make_trajectory(i, fault="lost") for i in range(2)))
    numbers = rollout_metrics([group], lost(2, 2), [])
    assert (numbers["reward"], numbers["dropped_share"], numbers["num_tokens"]) == (0, 1.0, 0)
