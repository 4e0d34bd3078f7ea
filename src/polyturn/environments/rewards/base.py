"""One reward: a function of the user's or ours, and what is made of its answer.

A function is `(trajectory, task) -> number | {name: number} | None`, plain or async. A number is the component of the
reward's name, a mapping gives the components `name/key`, None is a component that can't be computed. An exception, a passed
deadline or any other answer is a fault of ours and not of the model: the trajectory is masked and counted, never scored 0.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyturn.environments.calls import call
from polyturn.environments.rewards.view import Scope, TrajectoryView
from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.types import Task

Score: TypeAlias = "float | Mapping[str, float | None] | None"
RewardFunction: TypeAlias = "Callable[[TrajectoryView, Task], Score | Awaitable[Score]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward of the recipe, built."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    scope: Scope = "trajectory"
    success_at: float | None = None
    """Sum of its components from which a trajectory counts as a success; None when it has no say."""
    deadline_s: float | None = None
    """Its own deadline; None leaves it to the environment's."""

    async def __call__(self, view: TrajectoryView) -> dict[str, float | None]:
        """Components by name.

        Raises:
            EnvironmentSetupError: the function raised, or returned what is no score.
            DeadlineError: it took longer than its deadline.
        """
        try:
            if self.deadline_s is None:
                score = await call(self.function, view, view.task)
            else:
                async with deadline(self.deadline_s, f"the reward {self.name} of {view.task.id}"):
                    score = await call(self.function, view, view.task)
        except (ResourceError, EnvironmentSetupError):
            raise
        except Exception as error:
            raise EnvironmentSetupError(f"the reward {self.name} raised {type(error).__name__}: {error}") from error
        if isinstance(score, Mapping):
            return {f"{self.name}/{key}": self._number(value) for key, value in score.items()}
        return {self.name: self._number(score)}

    def owns(self, component: str) -> bool:
        """Whether a component is one of this reward's."""
        return component == self.name or component.startswith(f"{self.name}/")

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvironmentSetupError(
                f"the reward {self.name} returned {value!r:.80}, where it must return a finite number, numbers by name, or None"
            )
        return number
