"""Everything that can be refused before a model loads: environment, data, estimator, arithmetic. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.advantages.base import Estimator
from polyturn.advantages.registry import build_estimator
from polyturn.config.resolve import Resolved, resolve
from polyturn.config.schema import Recipe
from polyturn.environments import build_environment
from polyturn.environments.base import Environment
from polyturn.loop.tasks import held_out_tasks, load_tasks
from polyturn.types import Task, TaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A recipe that can be built, and the light parts that were built to find out."""

    resolved: Resolved
    environment: Environment
    train_tasks: TaskSource
    eval_tasks: list[Task]
    estimator: Estimator

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.resolved.recipe


def check(recipe: Recipe) -> Checked:
    """Build everything light and resolve the rest.

    Raises:
        UserError: the first thing that is wrong, as one sentence (several bad rows: a line each).
    """
    environment = build_environment(recipe.environment.id, recipe.environment.args)
    train_tasks = load_tasks(recipe, environment, "train")
    resolved = resolve(recipe, num_train_tasks=train_tasks.size)
    estimator = build_estimator(recipe.algorithm.advantage, recipe.algorithm.advantage_options)
    eval_tasks = held_out_tasks(resolved.recipe, environment)
    return Checked(
        resolved=resolved, environment=environment, train_tasks=train_tasks, eval_tasks=eval_tasks, estimator=estimator
    )
