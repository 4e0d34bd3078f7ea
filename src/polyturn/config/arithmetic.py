"""What a recipe's numbers multiply out to: trajectories, optimizer steps, epochs and tokens, as numbers and as sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.config.schema import Recipe, filled


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """The numbers of a run. Those that hang on its length are None while `run.steps` is.

    `max_` are ceilings: a trajectory may end early. `max_rows_per_step` supposes that no two trajectories share a row.
    """

    groups_per_step: int
    trajectories_per_step: int
    optimizer_steps_per_step: int
    groups_per_optimizer_step: float
    max_sampled_tokens_per_trajectory: int
    max_sampled_tokens_per_step: int
    max_tokens_per_step: int
    max_rows_per_step: int
    steps: int | None
    optimizer_steps: int | None
    trajectories: int | None
    max_tokens: int | None
    epochs: float | None
    weight_pushes: int | None


def batch_arithmetic(recipe: Recipe, num_train_tasks: int | None) -> BatchArithmetic:
    """Multiply out `recipe`. `num_train_tasks` is None for a source without end."""
    rollout, trainer, steps = recipe.rollout, recipe.trainer, recipe.run.steps
    trajectories = rollout.groups_per_step * rollout.group_size
    sampled = min(rollout.max_turns * rollout.max_turn_tokens, rollout.max_trajectory_tokens)
    tokens = trajectories * rollout.max_trajectory_tokens
    optimizer_steps = trainer.num_iterations * trainer.optimizer_steps_per_batch
    return BatchArithmetic(
        groups_per_step=rollout.groups_per_step,
        trajectories_per_step=trajectories,
        optimizer_steps_per_step=optimizer_steps,
        groups_per_optimizer_step=rollout.groups_per_step / trainer.optimizer_steps_per_batch,
        max_sampled_tokens_per_trajectory=sampled,
        max_sampled_tokens_per_step=trajectories * sampled,
        max_tokens_per_step=tokens,
        max_rows_per_step=trajectories,
        steps=steps,
        optimizer_steps=None if steps is None else steps * optimizer_steps,
        trajectories=None if steps is None else steps * trajectories,
        max_tokens=None if steps is None else steps * tokens,
        epochs=None if steps is None or not num_train_tasks else steps * rollout.groups_per_step / num_train_tasks,
        weight_pushes=None if steps is None else math.ceil(steps / recipe.weight_sync.every_steps),
    )


def sentences(recipe: Recipe, num_train_tasks: int | None) -> tuple[str, ...]:
    """The arithmetic of a resolved recipe as `--dry-run` prints it, a sentence a line."""
    numbers = batch_arithmetic(recipe, num_train_tasks)
    lines = [
        f"A step plays {_count(numbers.groups_per_step, 'task')} x {recipe.rollout.group_size} siblings "
        f"= {_count(numbers.trajectories_per_step, 'trajectory', 'trajectories')}.",
        _optimizer_sentence(recipe, numbers),
        f"A trajectory holds at most {_count(recipe.rollout.max_trajectory_tokens, 'token')}, "
        f"{numbers.max_sampled_tokens_per_trajectory:,} of them sampled "
        f"({_count(recipe.rollout.max_turns, 'turn')} of {recipe.rollout.max_turn_tokens:,}).",
        f"A step holds at most {_count(numbers.max_tokens_per_step, 'token')}, "
        f"in at most {_count(numbers.max_rows_per_step, 'row')} of {filled(recipe.trainer.row_tokens):,}.",
    ]
    if numbers.steps is not None:
        lines.append(_length_sentence(numbers, num_train_tasks))
        lines.append(
            f"The engine gets new weights {_count(numbers.weight_pushes or 0, 'time')}, "
            f"{_every(recipe.weight_sync.every_steps)} and at the end."
        )
    lines.append(_evaluation_sentence(recipe, numbers.steps))
    return tuple(lines)


def _optimizer_sentence(recipe: Recipe, numbers: BatchArithmetic) -> str:
    trainer = recipe.trainer
    cuts, total = trainer.optimizer_steps_per_batch, numbers.optimizer_steps
    how = f"{_count(trainer.num_iterations, 'pass', 'passes')} over the batch"
    if cuts > 1:
        how += f", each cut into {cuts} of about {numbers.groups_per_optimizer_step:.3g} groups"
    each = f"A step makes {_count(numbers.optimizer_steps_per_step, 'optimizer step')} ({how})"
    if total is None:
        return f"{each}."
    return f"{each}, the run {total:,}, of which the first {filled(trainer.warmup_steps):,} warm up."


def _length_sentence(numbers: BatchArithmetic, num_train_tasks: int | None) -> str:
    steps = numbers.steps or 0
    tasks = _count(steps * numbers.groups_per_step, "task")
    trajectories = _count(numbers.trajectories or 0, "trajectory", "trajectories")
    run = f"The run is {_count(steps, 'step')}: {tasks}, {trajectories}, at most {_count(numbers.max_tokens or 0, 'token')}"
    if num_train_tasks is None:
        return f"{run}, from a source without end."
    return f"{run}, {numbers.epochs:.3g} x {_count(num_train_tasks, 'training task')}."


def _evaluation_sentence(recipe: Recipe, steps: int | None) -> str:
    evaluation = recipe.evaluation
    episodes = evaluation.episodes * evaluation.samples_per_task * len(evaluation.modes)
    if episodes == 0:
        return "There is no evaluation."
    times = 2
    when = "at the start and at the end"
    if evaluation.every_steps is not None:
        when += f" and {_every(evaluation.every_steps)}"
        times += 0 if steps is None else math.ceil(steps / evaluation.every_steps) - 1
    return (
        f"Evaluation plays {_count(episodes, 'episode')} {when}, {_count(times, 'time')}{' or more' if steps is None else ''}."
    )


def _count(number: int, singular: str, plural: str | None = None) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"
