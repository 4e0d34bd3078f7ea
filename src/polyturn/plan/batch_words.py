"""The batch in the words of trainers that count sequences: `num_generations`, `per_device_train_batch_size` and so on.

Such a trainer fills its step with sequences, so that numbers have to divide. Ours plays whole groups, whatever the number of
GPUs; nothing has to divide. Who comes from there finds the own numbers here, and what they would have to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.config.schema import Recipe, filled


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWords:
    """A step as such trainers call it."""

    num_generations: int
    """Siblings of a task: `rollout.group_size`."""
    per_device_train_batch_size: int
    """Trajectories of full length that share a row: `trainer.row_tokens` / `rollout.max_trajectory_tokens`."""
    gradient_accumulation_steps: int
    """Rows that a rank computes before the optimizer steps, at most."""
    num_processes: int
    """Ranks of the trainer; those that share rows count as one."""

    @property
    def sequences(self) -> int:
        """What all ranks compute at a time."""
        return self.num_processes * self.per_device_train_batch_size


def batch_words(recipe: Recipe) -> BatchWords:
    """The words of a resolved recipe."""
    rollout, trainer = recipe.rollout, recipe.trainer
    each = max(1, filled(trainer.row_tokens) // rollout.max_trajectory_tokens)
    trajectories = math.ceil(rollout.groups_per_step / trainer.optimizer_steps_per_batch) * rollout.group_size
    ranks = trainer.num_ranks // (trainer.context_ranks * trainer.tensor_ranks)
    return BatchWords(
        num_generations=rollout.group_size,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=math.ceil(trajectories / ranks / each),
        num_processes=ranks,
    )


def indivisible(words: BatchWords) -> str | None:
    """Why a trainer that counts sequences would refuse these numbers, with the nearest that it takes; None when it would not.

    >>> numbers = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_processes": 7}
    >>> indivisible(BatchWords(num_generations=16, **numbers))
    '7 training GPUs x 2 = 14 sequences do not divide by num_generations=16; use 14, 7 or 2, or per_device_train_batch_size=16'
    >>> indivisible(BatchWords(num_generations=14, **numbers))
    """
    sequences, siblings = words.sequences, words.num_generations
    if sequences % siblings == 0:
        return None
    divisors = [number for number in range(sequences, 1, -1) if sequences % number == 0]
    near = sorted(sorted(divisors, key=lambda number: abs(number - siblings))[:3], reverse=True)
    step = siblings // math.gcd(siblings, words.num_processes)
    least = max(1, round(words.per_device_train_batch_size / step)) * step
    options = ([_either(near)] if near else []) + [f"per_device_train_batch_size={least}"]
    return (
        f"{words.num_processes} training GPU{'s' if words.num_processes > 1 else ''} x {words.per_device_train_batch_size} = "
        f"{sequences} sequences do not divide by num_generations={siblings}; use {', or '.join(options)}"
    )


def word_lines(recipe: Recipe) -> list[str]:
    """A resolved recipe's batch in those words."""
    words, rollout = batch_words(recipe), recipe.rollout
    trajectories, ranks = rollout.groups_per_step * rollout.group_size, words.num_processes
    found = [
        f"In other words: num_generations={words.num_generations} (rollout.group_size), per_device_train_batch_size="
        f"{words.per_device_train_batch_size} (trajectories of full length in a row), gradient_accumulation_steps="
        f"{words.gradient_accumulation_steps} (rows of a rank before the optimizer steps, at most).",
    ]
    refused = indivisible(words) if ranks > 1 else None
    if refused is not None:
        most = math.ceil(trajectories / ranks)
        share = f"{most}" if trajectories % ranks == 0 else f"{most - 1} or {most}"
        found.append(
            f"Trainers whose sequences of one pass must divide would refuse that: {refused}. Here whole groups are played, and "
            f"a rank gets {share} of the {trajectories} trajectories."
        )
    return found


def _either(numbers: list[int]) -> str:
    """`14, 7 or 2`."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
