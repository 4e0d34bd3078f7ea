"""What an estimator takes and gives back, and the arithmetic that several of them share.

    groups of siblings ──estimator──> GroupAdvantages: one number per turn of every valid sibling

Shape letters: `G` valid siblings of a group, `K` turns of a trajectory. Everything is float64 numpy; the samples round it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from polyturn.errors import ConfigError, nearest
from polyturn.types import Trajectory, TrajectoryGroup

PerTurn: TypeAlias = npt.NDArray[np.float64]
"""One number per turn, `[K]`."""
PerSibling: TypeAlias = npt.NDArray[np.float64]
"""One number per valid sibling, `[G]`."""
Rewards: TypeAlias = Literal["total", "outcome"]
"""What a trajectory is worth: turn rewards plus outcome, or the outcome alone."""

MIN_SIBLINGS = 2
STD_EPSILON = 1e-4
ZERO_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupAdvantages:
    """The credit of one group, in sibling order: `[K]` numbers per trajectory, or None for one that is not valid.

    Example, three siblings of which the second had a fault:

        GroupAdvantages(per_turn=(array([0.5, 0.5]), None, array([-0.5])))
    """

    per_turn: tuple[PerTurn | None, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no sibling got credit: fewer than two were valid, so that there was nothing to compare."""
        return all(credit is None for credit in self.per_turn)

    @property
    def is_zero(self) -> bool:
        """Whether training on this group would change nothing: every advantage is 0, or there is none."""
        return all(credit is None or bool((np.abs(credit) <= ZERO_TOLERANCE).all()) for credit in self.per_turn)


@runtime_checkable
class Estimator(Protocol):
    """Gives every turn its credit. Options are the fields of the class; it sees all groups of a step at once."""

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """One result per group, in order; a group with fewer than two valid siblings gives None for every sibling."""


def comparable(group: TrajectoryGroup) -> tuple[Trajectory, ...]:
    """The siblings that get credit: the valid ones, or none when fewer than two are left."""
    return group.valid if len(group.valid) >= MIN_SIBLINGS else ()


def place(group: TrajectoryGroup, credit: Sequence[PerTurn]) -> GroupAdvantages:
    """Lay the credit of the comparable siblings back into sibling order."""
    remaining = iter(credit)
    enough = bool(comparable(group))
    return GroupAdvantages(per_turn=tuple(next(remaining) if enough and t.valid else None for t in group.trajectories))


def credit_groups(
    groups: Sequence[TrajectoryGroup], credit: Callable[[Sequence[Trajectory]], Sequence[PerTurn]]
) -> list[GroupAdvantages]:
    """Apply `credit`, which sees the comparable siblings of one group, to every group."""
    return [place(group, credit(comparable(group)) if comparable(group) else ()) for group in groups]


def outcome(trajectory: Trajectory) -> float:
    """R_i of a valid trajectory."""
    assert trajectory.outcome_reward is not None, f"{trajectory.id} has no outcome and is not comparable"
    return trajectory.outcome_reward


def scores(siblings: Sequence[Trajectory], rewards: Rewards) -> PerSibling:
    """S_i of every sibling, `[G]`."""
    return np.array([outcome(t) if rewards == "outcome" else sum(t.turn_rewards) + outcome(t) for t in siblings])


def credited_rewards(trajectory: Trajectory) -> PerTurn:
    """rho_k, `[K]`: the reward of every turn, with the outcome added to the last."""
    rewards = np.array(trajectory.turn_rewards, dtype=np.float64)
    rewards[-1] += outcome(trajectory)
    return rewards


def returns_to_go(rewards: PerTurn, gamma: float) -> PerTurn:
    """G_k = sum over l >= k of gamma^(l-k) rho_l, `[K]`."""
    returns = np.empty_like(rewards)
    following = 0.0
    for k in range(len(rewards) - 1, -1, -1):
        following = rewards[k] + gamma * following
        returns[k] = following
    return returns


def centred(values: PerSibling) -> PerSibling:
    """Values minus their mean. Measured from the first value, so that equal values give exactly 0."""
    gaps: PerSibling = values - values[0]
    return np.asarray(gaps - gaps.mean())


def normalised(values: PerSibling) -> PerSibling:
    """(X - mean) / (std + 1e-4), with the sample std (n - 1)."""
    gaps = centred(values)
    return np.asarray(gaps / (gaps.std(ddof=1) + STD_EPSILON))


def on_every_turn(credit: PerSibling, siblings: Sequence[Trajectory]) -> list[PerTurn]:
    """The same number on every turn of a sibling."""
    return [np.full(len(trajectory.turns), value) for value, trajectory in zip(credit, siblings, strict=True)]


def require_choice(option: str, value: object, valid: Sequence[str]) -> None:
    """Refuse a value that is not one of `valid`."""
    if value not in valid:
        raise ConfigError(f"algorithm.advantage_options.{option}={value!r} is unknown; {nearest(str(value), valid)}")


def require_discount(option: str, value: float) -> None:
    """Refuse a discount outside (0, 1]."""
    if not 0 < value <= 1:
        raise ConfigError(f"algorithm.advantage_options.{option}={value!r} is no discount; give a number above 0, at most 1")


def require_weight(option: str, value: float) -> None:
    """Refuse a weight that is negative, nan or inf."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"algorithm.advantage_options.{option}={value!r} is no weight; give a finite number of at least 0")
