"""A short supervised start on an environment's own demonstrations.

Demonstrations are played through the same episode, rendering and assembly as rollouts, with a script in the engine's place,
so that the tokens learned are the tokens met later. The gradient of the policy loss with advantage 1 and ratio 1 is that of
the supervised loss, so the trainer needs nothing new.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from polyturn.config.schema import LossOptions, Recipe, filled
from polyturn.engine.scripted import ScriptedEngine
from polyturn.environments.base import Environment
from polyturn.errors import EnvironmentSetupError
from polyturn.loop.step import player_for
from polyturn.loop.tasks import authors_code
from polyturn.processes.threads import in_thread_within
from polyturn.rendering.renderer import Renderer
from polyturn.rollouts.episode import play
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.assemble import assemble
from polyturn.trajectories.pack import pack
from polyturn.types import Task, TaskSource, TrainBatch, Trajectory

SUPERVISED = LossOptions(
    ratio_level="token",
    clip_rule="two_sided",
    clip_low=0.2,
    clip_high=0.2,
    aggregation="token",
    fixed_length=1,
    sampler_correction="none",
    sampler_level="token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmstartSettings:
    """How long, how fast, and when it is enough.

    `target_accuracy`, and `target_worst` for the worst of the counted tokens, are checked every `check_every` steps; once
    both are reached, `cooldown_steps` more at a third of the learning rate, falling to 0, take the noise of the high rate out
    of the weights.
    """

    max_steps: int = 200
    cooldown_steps: int = 0
    demonstrations_per_step: int = 64
    learning_rate: float = 3e-4
    target_accuracy: float | None = None
    target_worst: float = 0.0
    check_every: int = 10
    held_out: int = 256


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Chance that a token comes out right when sampled at temperature 1: mean over the distinct tokens, and the worst one's.

    Every distinct token weighs the same, so that a rare word that was not learned shows as much as a common one.
    """

    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps at one peak learning rate."""

    steps: int
    learning_rate: float

    def trainer_settings(self, schedule: Literal["constant", "linear"], dtype: torch.dtype) -> TrainerSettings:
        """The supervised loss with this rate, for weights of this type."""
        return TrainerSettings(
            master_weights="float32" if dtype == torch.bfloat16 else "none",
            learning_rate=self.learning_rate,
            loss=SUPERVISED,
            total_optimizer_steps=self.steps,
            warmup_steps=min(10, self.steps),
            schedule=schedule,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmstartResult:
    """Where a warm start ended. See Accuracy."""

    steps: int
    accuracy: Accuracy
    negative_log_likelihood: float


async def warmstart(
    recipe: Recipe,
    environment: Environment,
    renderer: Renderer,
    model: torch.nn.Module,
    settings: WarmstartSettings,
    *,
    source: TaskSource | None = None,
    counted_ids: frozenset[int] | None = None,
    on_step: Callable[[int, float, Accuracy | None], None] | None = None,
) -> WarmstartResult:
    """Train `model` on demonstrations until `target_accuracy` or `max_steps`.

    Args:
        recipe: limits and row budget.
        environment: gives demonstrations.
        renderer: of the model.
        model: trained in place.
        settings: see WarmstartSettings.
        source: tasks to demonstrate; the environment's own when None.
        counted_ids: tokens that `accuracy` looks at; all of them when None.
        on_step: called with step, negative log-likelihood per token, and accuracy where it was checked.

    Raises:
        EnvironmentSetupError: there are no tasks, or a demonstration is too long or did not play to its end.
    """
    if source is None:
        with authors_code(f"{environment.name}.tasks"):
            source = environment.tasks("train", recipe.run.seed)
    if source.size == 0:
        raise EnvironmentSetupError(f"environment {environment.name} has no training tasks of its own to demonstrate")
    # Of few tasks a quarter is held out; of fewer than four, none, and accuracy is that on what was trained.
    aside = settings.held_out if source.size is None else min(settings.held_out, source.size // 4)
    held_out = await _batch(recipe, environment, renderer, _tasks(source, 0, aside or 1))
    first, last = Phase(settings.max_steps, settings.learning_rate), Phase(settings.cooldown_steps, settings.learning_rate / 3)
    accuracy, nll, done = Accuracy(0.0, 0.0), float("nan"), 0
    limit_s, dtype = recipe.trainer.step_deadline_s, next(model.parameters()).dtype
    for phase, target in ((first, settings.target_accuracy), (last, None)):
        trainer = Trainer(model, phase.trainer_settings("constant" if phase is first else "linear", dtype))
        for step in range(1, phase.steps + 1):
            start = done * settings.demonstrations_per_step
            tasks = _tasks(source, start, settings.demonstrations_per_step, aside=aside)
            batch = await _batch(recipe, environment, renderer, tasks)
            metrics = await in_thread_within(limit_s, "a step of the warm start", trainer.train, [batch])
            done, nll = done + 1, -metrics["logprob"]
            checked = None
            if step % settings.check_every == 0 or step == phase.steps:
                accuracy = checked = await in_thread_within(
                    limit_s, "the accuracy of the warm start", token_accuracy, model, held_out, counted_ids
                )
            if on_step is not None:
                on_step(done, nll, checked)
            if target is not None and checked is not None and checked.mean >= target and checked.worst >= settings.target_worst:
                break
    return WarmstartResult(steps=done, accuracy=accuracy, negative_log_likelihood=nll)


@torch.inference_mode()
def token_accuracy(model: torch.nn.Module, batch: TrainBatch, counted_ids: frozenset[int] | None) -> Accuracy:
    """Accuracy of the trained tokens of `batch`, or of those among `counted_ids`; 0 when there are none."""
    device = next(model.parameters()).device
    rows = [to_tensors(row, device) for row in batch.rows]
    targets = torch.cat([row.targets_N for row in rows])
    score = Scorer(model)
    probs = torch.cat([score(row)[0].exp() for row in rows])
    if counted_ids is not None:
        counted = torch.isin(targets, torch.tensor(sorted(counted_ids), device=device))
        targets, probs = targets[counted], probs[counted]
    _, kind, count = torch.unique(targets, return_inverse=True, return_counts=True)
    right = torch.zeros(len(count), device=device).index_add(0, kind, probs) / count
    return Accuracy(float(right.mean()), float(right.min())) if len(count) else Accuracy(0.0, 0.0)


async def demonstrate(
    recipe: Recipe, environment: Environment, renderer: Renderer, task: Task, replies: Sequence[str]
) -> Trajectory:
    """Play `replies` on `task` through the ordinary episode."""
    script = iter(replies)

    def reply(context_ids: tuple[int, ...]) -> tuple[int, ...] | Exception:
        text = next(script, None)
        if text is None:
            return EnvironmentSetupError(f"the replies for task {task.id} end before its environment is done: {list(replies)}")
        return renderer.tokenizer.encode(renderer.reply_text(text), after=context_ids[-1])

    player = player_for(recipe, environment, renderer, ScriptedEngine(reply), "demonstration")
    return await play(player, task, 0)


async def _batch(recipe: Recipe, environment: Environment, renderer: Renderer, tasks: Sequence[Task]) -> TrainBatch:
    samples = []
    for task in tasks:
        rng = random.Random(f"demonstration/{recipe.run.seed}/{task.id}")
        with authors_code(f"{environment.name}.demonstrations of task {task.id}"):
            replies = environment.demonstrations(task, rng)
        trajectory = await demonstrate(recipe, environment, renderer, task, replies)
        cut = next((index for index, turn in enumerate(trajectory.turns) if turn.stop_reason == "length"), None)
        if cut is not None:
            length = len(renderer.tokenizer.encode(renderer.reply_text(replies[cut])))
            raise EnvironmentSetupError(
                f"a demonstration of {environment.name} for task {task.id} has a reply of {length} tokens, and there is room "
                f"for {len(trajectory.turns[cut].completion_ids)}; set rollout.max_turn_tokens={length} or more, and "
                "rollout.max_trajectory_tokens to hold it"
            )
        if not trajectory.valid or trajectory.end_reason != "done":
            raise EnvironmentSetupError(
                f"a demonstration of {environment.name} for task {task.id} did not play to its end "
                f"({trajectory.fault or trajectory.end_reason}); see `polyturn env check {environment.name}`"
            )
        samples.extend(assemble(trajectory, np.ones(len(trajectory.turns)).tolist(), temperature=1.0))
    return pack(samples, row_tokens=filled(recipe.trainer.row_tokens), planned_trajectories=len(tasks))


def _tasks(source: TaskSource, first: int, count: int, *, aside: int = 0) -> list[Task]:
    """`count` tasks from number `first` on, beginning anew at the end, and never one of those set aside at the start."""
    size = source.size
    numbers = range(first, first + count)
    return [source[aside + (number if size is None else number % (size - aside))] for number in numbers]
