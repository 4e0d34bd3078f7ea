"""What the command line runs besides training: measure a model, record its trajectories, warm-start one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from polyturn.errors import ConfigError
from polyturn.loop.build import build_engine, load_policy
from polyturn.loop.check import Checked, chat_template
from polyturn.loop.evaluate import Evaluation, choose_tasks, evaluate, summarise
from polyturn.loop.openings import refuse_hidden_tools
from polyturn.loop.step import make_groups, player_for
from polyturn.loop.tasks import open_stream
from polyturn.loop.warmstart import Accuracy, WarmstartResult, WarmstartSettings, warmstart
from polyturn.models.folder import is_adapter
from polyturn.models.load import export_model
from polyturn.processes.threads import in_thread_within
from polyturn.rollouts.record import to_json, write_trajectories
from polyturn.types import Trajectory, TrajectoryGroup

FIRST_STEP = "train/1"
"""Seed key of the first training step: the same tasks, the same noise."""


async def evaluate_model(
    checked: Checked,
    *,
    model: str | None,
    episodes: int | None,
    samples: int | None,
    say: Callable[[str], None],
    split: str | None = None,
    data: str | None = None,
    out: Path | None = None,
) -> dict[str, Evaluation]:
    """Evaluate `model` (the recipe's when None) in the recipe's modes, on the tasks that `choose_tasks` takes.

    With `out` every trajectory is recorded there, those of the first mode first. Raises ConfigError without tasks.
    """
    recipe, environment = checked.recipe, checked.environment
    tasks = choose_tasks(recipe, environment, split=split, data=data, episodes=episodes)
    if not tasks:
        raise ConfigError(
            "there are no held-out tasks; give --episodes 1 or more, and data.eval_path when tasks come from a file"
        )
    async with checked.opened():
        policy = await load_policy(recipe, environment, say, path=model)
        refuse_hidden_tools(environment, tasks, policy.renderer)
        engine = build_engine(recipe, policy.model)
        played: list[TrajectoryGroup] = []
        await engine.start()
        try:
            return {
                mode: await evaluate(
                    recipe,
                    environment,
                    policy.renderer,
                    engine,
                    tasks,
                    mode=mode,
                    samples_per_task=samples or recipe.evaluation.samples_per_task,
                    record=played.extend,
                )
                for mode in recipe.evaluation.modes
            }
        finally:
            await engine.stop()
            if out is not None and played:
                rows = [to_json(trajectory) for group in played for trajectory in group.trajectories]
                await in_thread_within(recipe.trainer.step_deadline_s, f"writing {out}", write_trajectories, out, rows)


async def rollout_model(
    checked: Checked, *, model: str | None, num_tasks: int | None, out: Path, say: Callable[[str], None]
) -> Evaluation:
    """Play the first `num_tasks` training tasks (a step's when None) as the first training step would, and record them.

    Returns what the trajectories came to.

    Raises:
        ConfigError: more tasks than there are.
        TooManyDroppedError: more than `rollout.max_dropped_share` were lost to faults; the file is written all the same.
    """
    recipe, size = checked.recipe, checked.train_tasks.size
    count = recipe.rollout.groups_per_step if num_tasks is None else num_tasks
    if size is not None and count > size:
        raise ConfigError(f"--tasks={count} but there are only {size} training tasks; give {size} or less")
    async with checked.opened():
        policy = await load_policy(recipe, checked.environment, say, path=model)
        engine = build_engine(recipe, policy.model)
        tasks = open_stream(recipe, checked.train_tasks).take(count)
        refuse_hidden_tools(checked.environment, tasks, policy.renderer)
        player = player_for(recipe, checked.environment, policy.renderer, engine, FIRST_STEP)
        progress = _Progress(count * recipe.rollout.group_size, say)
        await engine.start()
        try:
            groups = await make_groups(recipe, player, tasks, progress.count)
        finally:
            await engine.stop()
    rows = (to_json(trajectory) for group in groups for trajectory in group.trajectories)
    await in_thread_within(recipe.trainer.step_deadline_s, f"writing {out}", write_trajectories, out, list(rows))
    return summarise(groups, mode="sampled", max_dropped_share=recipe.rollout.max_dropped_share)


class _Progress:
    """Says how many trajectories have ended, at every tenth of them."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total = total
        self._say = say
        self._done = self._faults = 0

    def count(self, trajectory: Trajectory) -> None:
        self._done += 1
        self._faults += trajectory.fault is not None
        if self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            self._say(f"rollout: {self._done} of {self._total} trajectories, {self._faults} faults")


async def warmstart_model(
    checked: Checked, settings: WarmstartSettings, out: Path, *, say: Callable[[str], None]
) -> WarmstartResult:
    """Warm-start the recipe's model and write it to `out`. Raises UserError for a model that can't be loaded, or adapters."""
    recipe, environment = checked.recipe, checked.environment
    if recipe.model.lora is not None or is_adapter(Path(recipe.model.path).expanduser()):
        raise ConfigError(
            "a warm start trains all weights of a whole model, and exports one; set model.lora=null and model.quantize=null, "
            "and name a whole model as model.path"
        )

    def report(step: int, nll: float, accuracy: Accuracy | None) -> None:
        if accuracy is not None:
            say(f"warmstart step={step} nll={nll:.4g} token_accuracy={accuracy.mean:.3f}")

    async with checked.opened():
        policy = await load_policy(recipe, environment, say)
        refuse_hidden_tools(environment, checked.train_tasks, policy.renderer)
        result = await warmstart(
            recipe, environment, policy.renderer, policy.model, settings, source=checked.train_tasks, on_step=report
        )
    export = partial(export_model, chat_template=chat_template(recipe))
    what = f"the export of the model to {out}"
    await in_thread_within(recipe.trainer.step_deadline_s, what, export, policy.model, policy.folder, out)
    return result
