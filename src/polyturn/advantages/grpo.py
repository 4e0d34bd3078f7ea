"""Score relative to the group, one number for the whole trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from polyturn.advantages.base import (
    STD_EPSILON,
    GroupAdvantages,
    PerSibling,
    Rewards,
    centred,
    comparable,
    normalised,
    on_every_turn,
    place,
    require_choice,
    require_weight,
    scores,
)
from polyturn.advantages.components import normalised_apart, std
from polyturn.errors import ConfigError
from polyturn.types import Trajectory, TrajectoryGroup

Scale: TypeAlias = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """A_i = (S_i - mean S) / (std S + 1e-4) on every turn; the std is the sample std (n - 1).

    With `normalise_then_sum`, every reward component is normalised within its group, the weighted sum of those is normalised
    over all trajectories of the step, and that is A: a component with a small range counts as much as one with a large range.
    Options that contradict each other raise ConfigError.
    Paper: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300.
    """

    scale: Scale = "group"
    """What divides: the std of the `group`, of all trajectories of the step (`batch`), or nothing (`none`)."""
    rewards: Rewards = "total"
    """`total`: turn rewards plus outcome; `outcome`: the outcome alone."""
    normalise_then_sum: bool = False
    """Normalise every outcome component apart; with `rewards: total` the turn rewards are the component `turn_rewards`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of every component under `normalise_then_sum`; all 1 when left out."""

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, get_args(Scale))
        require_choice("rewards", self.rewards, get_args(Rewards))
        for name, weight in self.weights.items():
            require_weight(f"weights.{name}", weight)
        if self.weights and not self.normalise_then_sum:
            raise ConfigError(
                "algorithm.advantage_options.weights has no effect without normalise_then_sum: the outcome is summed already; "
                "set normalise_then_sum: true, or weigh the components by environment.reward_weights"
            )
        if self.normalise_then_sum and self.scale != "group":
            raise ConfigError(
                f"algorithm.advantage_options.scale={self.scale!r} has no effect with normalise_then_sum, which divides by the "
                "std of each group and then by that of the step; leave scale at 'group'"
            )

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        siblings = [comparable(group) for group in groups]
        if self.normalise_then_sum:
            credit = normalised_apart(siblings, rewards=self.rewards, weights=self.weights)
        else:
            credit = self._summed(siblings)
        return [place(group, on_every_turn(c, s)) for group, c, s in zip(groups, credit, siblings, strict=True)]

    def _summed(self, siblings: Sequence[Sequence[Trajectory]]) -> list[PerSibling]:
        scores_per_group = [scores(group, self.rewards) for group in siblings]
        if self.scale == "group":
            return [normalised(scores_G) if len(scores_G) else scores_G for scores_G in scores_per_group]
        everyone = np.concatenate([np.empty(0), *scores_per_group])
        divisor = 1.0 if self.scale == "none" else std(everyone) + STD_EPSILON
        return [centred(scores_G) / divisor if len(scores_G) else scores_G for scores_G in scores_per_group]
