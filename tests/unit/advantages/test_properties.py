from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.builders import make_group, make_trajectory
from polyturn.advantages.dr_grpo import DrGrpo
from polyturn.advantages.gigpo import GiGpo
from polyturn.advantages.grpo import Grpo
from polyturn.advantages.mt_grpo import MtGrpo
from polyturn.advantages.rloo import Rloo
from polyturn.advantages.turn_rtg import TurnRtg
from polyturn.types import TrajectoryGroup

ESTIMATORS = [
    Grpo(),
    Grpo(scale="batch"),
    Grpo(scale="none"),
    Grpo(normalise_then_sum=True),
    DrGrpo(),
    Rloo(),
    MtGrpo(),
    TurnRtg(),
    TurnRtg(gamma=0.9, baseline="zero_padded"),
    GiGpo(),
]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random_group(rng: np.random.Generator) -> TrajectoryGroup:
    trajectories = []
    for sibling in range(int(rng.integers(1, 6))):
        num_turns = int(rng.integers(1, 5))
        outcome = None if rng.random() < 0.15 else float(rng.choice([0.0, 0.5, 1.0]))
        trajectories.append(
            make_trajectory(
                rng.choice([0.0, 0.1, -0.3], num_turns).tolist(),
                outcome,
                components={"answer": outcome, "format": None if rng.random() < 0.3 else float(rng.random())},
                keys=rng.choice(["a", "b", "c"], num_turns).tolist(),
                replies=rng.choice([None, "tool", "user"], num_turns).tolist(),
                fault="broken" if rng.random() < 0.15 else None,
                sibling=sibling,
            )
        )
    return make_group(*trajectories)


@QUICK
@given(seed=seeds)
def test_credit_follows_the_siblings_when_they_change_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_group(rng) for _ in range(3)]
    orders = [rng.permutation(len(group.trajectories)) for group in groups]
    shuffled = [make_group(*(group.trajectories[i] for i in order)) for group, order in zip(groups, orders, strict=True)]
    for estimator in ESTIMATORS:
        for before, after, order in zip(estimator(groups), estimator(shuffled), orders, strict=True):
            for place, i in enumerate(order):
                if before.per_turn[i] is None:
                    assert after.per_turn[place] is None
                else:
                    np.testing.assert_allclose(after.per_turn[place], before.per_turn[i], atol=1e-9)


@QUICK
@given(seed=seeds)
def test_credit_is_finite_has_one_number_a_turn_and_goes_to_valid_siblings_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_group(rng) for _ in range(3)]
    for estimator in ESTIMATORS:
        for group, result in zip(groups, estimator(groups), strict=True):
            assert result.is_empty == (len(group.valid) < 2)
            for trajectory, turns in zip(group.trajectories, result.per_turn, strict=True):
                assert (turns is None) == (result.is_empty or not trajectory.valid)
                if turns is not None:
                    assert turns.shape == (len(trajectory.turns),)
                    assert np.isfinite(turns).all()


@QUICK
@given(seed=seeds, shift=st.floats(-5, 5))
def test_a_constant_added_to_every_outcome_changes_nothing_but_the_rounding(seed: int, shift: float) -> None:
    """True of every baseline that compares like with like; `zero_padded` counts absent siblings as 0 and is not among them."""
    rng = np.random.default_rng(seed)
    outcomes, lengths = rng.random(4), rng.integers(1, 5, 4)
    for estimator in (Grpo(), DrGrpo(), Rloo(), TurnRtg()):
        plain, moved = (
            estimator([make_group(*(make_trajectory([0.0] * k, x + by) for x, k in zip(outcomes, lengths, strict=True)))])[0]
            for by in (0.0, shift)
        )
        for a, b in zip(plain.per_turn, moved.per_turn, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)
