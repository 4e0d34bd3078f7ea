"""Every estimator against numbers worked out by hand.

The group used throughout: three siblings with turn rewards r, outcome R, score S, and rho (the outcome added to the last turn)

    0   r .5 0       R 1     S 1.5   rho .5 1
    1   r 0          R 0     S 0     rho 0
    2   r .5 .25 0   R .25   S 1.0   rho .5 .25 .25
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from numerics.builders import make_group, make_trajectory, outcomes_group
from polyturn.advantages import Estimator, GroupAdvantages
from polyturn.advantages.dr_grpo import DrGrpo
from polyturn.advantages.gigpo import GiGpo
from polyturn.advantages.grpo import Grpo
from polyturn.advantages.mt_grpo import MtGrpo
from polyturn.advantages.rloo import Rloo
from polyturn.advantages.turn_rtg import TurnRtg
from polyturn.errors import ConfigError

GROUP = make_group(
    make_trajectory((0.5, 0.0), 1.0, keys=("a", "b"), replies=("tool", None)),
    make_trajectory((0.0,), 0.0, keys=("a",), replies=(None,)),
    make_trajectory((0.5, 0.25, 0.0), 0.25, keys=("a", "b", "c"), replies=("user", "tool", None)),
)
ALL = [Grpo(), DrGrpo(), Rloo(), MtGrpo(), TurnRtg(), TurnRtg(baseline="zero_padded"), GiGpo()]


def credit(estimator: Estimator, group=GROUP) -> list[list[float] | None]:
    (result,) = estimator([group])
    return [None if turns is None else turns.tolist() for turns in result.per_turn]


def check(estimator: Estimator, *expected: list[float] | None, group=GROUP) -> None:
    for got, wanted in zip(credit(estimator, group), expected, strict=True):
        assert got == (None if wanted is None else pytest.approx(wanted, abs=1e-12))


def test_grpo_divides_by_the_sample_std() -> None:
    # S = 1.5 0 1, mean 5/6, gaps 2/3 -5/6 1/6; squares 16/36 25/36 1/36 add to 42/36, over n - 1 = 2: std sqrt(7/12)
    d = sqrt(7 / 12) + 1e-4
    check(Grpo(), [2 / 3 / d] * 2, [-5 / 6 / d], [1 / 6 / d] * 3)


def test_grpo_can_leave_turn_rewards_out() -> None:
    # R = 1 0 .25, mean 5/12, gaps 7/12 -5/12 -2/12; squares 49 25 4 (/144) add to 78/144, over 2: std sqrt(39/144)
    d = sqrt(39 / 144) + 1e-4
    check(Grpo(rewards="outcome"), [7 / 12 / d] * 2, [-5 / 12 / d], [-2 / 12 / d] * 3)


def test_grpo_can_divide_by_nothing() -> None:
    check(Grpo(scale="none"), [2 / 3] * 2, [-5 / 6], [1 / 6] * 3)


def test_grpo_can_divide_by_the_std_of_the_step() -> None:
    # Scores of both groups: 1.5 0 1 | 3.5 0.5. Mean 1.3, gaps .2 -1.3 -.3 2.2 -.8; squares .04 1.69 .09 4.84 .64 add to 7.3.
    d = sqrt(7.3 / 4) + 1e-4
    first, second = Grpo(scale="batch")([GROUP, outcomes_group(3.5, 0.5)])
    assert [turns[0] for turns in first.per_turn if turns is not None] == pytest.approx([2 / 3 / d, -5 / 6 / d, 1 / 6 / d])
    assert [turns[0] for turns in second.per_turn if turns is not None] == pytest.approx([1.5 / d, -1.5 / d])


def test_a_dropped_group_is_not_in_the_std_of_the_step() -> None:
    alone = outcomes_group(100.0, None)
    (_, with_it), (without,) = (
        Grpo(scale="batch")([alone, outcomes_group(1.0, 0.0)]),
        Grpo(scale="batch")([outcomes_group(1.0, 0.0)]),
    )
    for a, b in zip(with_it.per_turn, without.per_turn, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dr_grpo_subtracts_the_mean() -> None:
    check(DrGrpo(), [2 / 3] * 2, [-5 / 6], [1 / 6] * 3)
    check(DrGrpo(rewards="outcome"), [7 / 12] * 2, [-5 / 12], [-2 / 12] * 3)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 1.5 - (0 + 1)/2, 0 - (1.5 + 1)/2, 1 - (1.5 + 0)/2
    check(Rloo(), [1.0] * 2, [-1.25], [0.25] * 3)


def test_mt_grpo_has_two_segments() -> None:
    # R^T = .5 0 .75: gaps 1 -5 4 (/12), squares 1 25 16 add to 42 (/144), over 2: std sqrt(21/144). R^O and S as above.
    t, o, s = sqrt(21 / 144) + 1e-4, sqrt(39 / 144) + 1e-4, sqrt(7 / 12) + 1e-4
    first = 7 / 12 / o + 2.0 * (1 / 12 / t)
    third = -2 / 12 / o + 2.0 * (4 / 12 / t)
    # 0: a tool answered turn 1. 1: no tool result, so S. 2: turn 1 was answered by a user, turn 2 by a tool.
    check(MtGrpo(turn_advantage_coef=2.0), [first, 7 / 12 / o], [-5 / 6 / s], [third, third, -2 / 12 / o])


def test_turn_rtg_compares_with_the_others_that_got_there() -> None:
    # G: 1.5 1 | 0 | 1 .5 .25
    # 0: 1.5 - (0 + 1)/2, 1 - .5.  1: 0 - (1.5 + 1)/2.  2: 1 - (1.5 + 0)/2, .5 - 1, and alone at turn 3:
    #    .25 - ((1.5 + 0)/2 - (.5 + .25)) = .25 - 0
    check(TurnRtg(), [1.0, 0.5], [-1.25], [0.25, -0.5, 0.25])


def test_turn_rtg_alone_at_a_turn_is_credited_with_what_it_adds_to_the_others_mean() -> None:
    # i alone at turn 2: 4 - (mean of the others' G_1 = 2, minus .5 earned before) = 2.5
    group = make_group(make_trajectory((0.5, 0.0), 4.0), make_trajectory((0.0,), 1.0), make_trajectory((0.0,), 3.0))
    assert credit(TurnRtg(), group)[0] == pytest.approx([4.5 - 2.0, 2.5])


def test_turn_rtg_zero_padded() -> None:
    # Turn 2: 1 - (0 + .5)/2 and .5 - (1 + 0)/2.  Turn 3: .25 - 0.
    check(TurnRtg(baseline="zero_padded"), [1.0, 0.75], [-1.25], [0.25, 0.0, 0.25])


def test_turn_rtg_discounts() -> None:
    # gamma .5, G: .5 + .5 = 1, 1 | 0 | .5 + .5 x .375 = .6875, .25 + .125 = .375, .25
    # 2 alone at turn 3: .25 - ((1 + 0)/2 - .75) = .5
    check(TurnRtg(gamma=0.5), [1 - 0.34375, 1 - 0.375], [-0.84375], [0.6875 - 0.5, 0.375 - 1, 0.5])


@pytest.mark.parametrize("reward", [1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("lengths", [(1, 2), (1, 3, 5), (2, 2, 4, 7, 1)])
def test_turn_rtg_is_exactly_zero_when_all_succeed_alike_at_different_lengths(reward: float, lengths: tuple[int, ...]) -> None:
    group = make_group(*(make_trajectory((0.0,) * k, reward) for k in lengths))
    (result,) = TurnRtg()([group])
    assert all((turns == 0.0).all() for turns in result.per_turn if turns is not None)
    assert result.is_zero
    assert not TurnRtg(baseline="zero_padded")([group])[0].is_zero


def test_gigpo_adds_credit_among_equal_states() -> None:
    # gamma .5, G: 1 1 | 0 | .6875 .375 .25. State a: mean of 1, 0, .6875 = .5625. State b: of 1, .375 = .6875. c: alone.
    state = ([1 - 0.5625, 1 - 0.6875], [-0.5625], [0.6875 - 0.5625, 0.375 - 0.6875, 0.0])
    check(GiGpo(gamma=0.5), *([base + x for x in xs] for base, xs in zip((2 / 3, -5 / 6, 1 / 6), state, strict=True)))
    check(GiGpo(gamma=0.5, state_weight=0.0), [2 / 3] * 2, [-5 / 6], [1 / 6] * 3)


def test_gigpo_counts_every_visit_of_a_trajectory() -> None:
    # One sibling sees state a twice, gamma 1: G 3 2; the other once: G 1. Mean of the three visits 2. S = 3 1, mean 2.
    group = make_group(make_trajectory((1.0, 0.0), 2.0, keys=("a", "a")), make_trajectory((0.0,), 1.0, keys=("a",)))
    check(GiGpo(gamma=1.0), [1 + 1, 1 + 0], [-1 - 1], group=group)


def test_gigpo_refuses_turns_without_a_state_key() -> None:
    group = make_group(make_trajectory((0.0, 0.0), 1.0, keys=("a", None)), make_trajectory((0.0,), 0.0, keys=("a",)))
    with pytest.raises(ConfigError, match=r"environment bandit gave turn 2 of train/0/0 no state_key; choose turn_rtg"):
        GiGpo()([group])


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_what_is_not_valid_is_left_out_of_the_baseline(estimator: Estimator) -> None:
    a, b, c = GROUP.trajectories
    broken = make_trajectory((9.0,), 9.0, keys=("a",), fault="sandbox died")
    unscored = make_trajectory((9.0,), None, keys=("a",))
    clean, mixed = credit(estimator), credit(estimator, make_group(a, broken, b, unscored, c))
    assert mixed == [clean[0], None, clean[1], None, clean[2]]


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_one_valid_sibling_gets_no_credit(estimator: Estimator) -> None:
    (result,) = estimator([make_group(make_trajectory((1.0,), 1.0, keys=("a",)), make_trajectory((1.0,), None))])
    assert result.per_turn == (None, None)
    assert result.is_empty
    assert result.is_zero
    assert estimator([]) == []


def test_is_zero_tolerates_rounding_and_nothing_else() -> None:
    assert GroupAdvantages(per_turn=(np.array([1e-9, 0.0]), None)).is_zero
    assert not GroupAdvantages(per_turn=(np.array([0.0, 1e-6]), None)).is_zero
    assert not GroupAdvantages(per_turn=(np.array([0.0]),)).is_empty


def test_components_normalised_apart() -> None:
    # a = 1 0, mean .5, std sqrt(.5): z = +-.5/(sqrt(.5) + 1e-4). b = 10 30, gaps -+10, std sqrt(200): z = -+10/(...).
    # q = 2 z_a + z_b; its mean is 0 and its std |q0 - q1| / sqrt(2) = sqrt(2) |q0|; A = q / (std + 1e-4).
    group = make_group(
        make_trajectory((5.0,), 11.0, components={"a": 1.0, "b": 10.0}),
        make_trajectory((7.0,), 30.0, components={"a": 0.0, "b": 30.0}),
    )
    q = 2 * 0.5 / (sqrt(0.5) + 1e-4) - 10 / (sqrt(200) + 1e-4)
    a = q / (sqrt(2) * q + 1e-4)
    options = {"normalise_then_sum": True, "rewards": "outcome", "weights": {"a": 2.0, "b": 1.0}}
    check(Grpo(**options), [a], [-a], group=group)
    # With total rewards, turn rewards 5 7 are one more component: z = -+1/(sqrt(2) + 1e-4), which turns the sum round.
    total = Grpo(normalise_then_sum=True, weights={"a": 2.0, "b": 1.0, "turn_rewards": 3.0})
    q = q - 3 / (sqrt(2) + 1e-4)
    a = q / (sqrt(2) * abs(q) + 1e-4)
    check(total, [a], [-a], group=group)
    with pytest.raises(ConfigError, match=r"no weight for the component 'b'"):
        Grpo(**(options | {"weights": {"a": 1.0}}))([group])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TurnRtg(gamma=0.0), "gamma=0.0 is no discount"),
        (lambda: TurnRtg(gamma=1.5), "at most 1"),
        (lambda: TurnRtg(gamma=float("nan")), "no discount"),
        (lambda: TurnRtg(baseline="survivor"), "did you mean survivors"),
        (lambda: GiGpo(state_weight=-1.0), "at least 0"),
        (lambda: MtGrpo(turn_advantage_coef=float("inf")), "finite"),
        (lambda: Grpo(scale="groups"), "did you mean group"),
        (lambda: DrGrpo(rewards="totals"), "did you mean total"),
        (lambda: Grpo(weights={"a": 1.0}), "no effect without normalise_then_sum"),
        (lambda: Grpo(normalise_then_sum=True, scale="none"), "leave scale at 'group'"),
        (lambda: Grpo(normalise_then_sum=True, weights={"a": -1.0}), "weights.a=-1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
