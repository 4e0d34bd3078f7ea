"""When the state of a run is saved, and how: between two steps, while the next trajectories are already being played.

    step ends ─> `after_step` notes where everything stands, and starts to copy what is due
    rollout of the next step
    `settle` waits for the copy ─> weights change

A copy that is due while the last one is still being written is made after the next step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.checkpoint.places import free_memory_tiers
from polyturn.checkpoint.state import LoopState, full_state, package_versions
from polyturn.checkpoint.writing import Settings
from polyturn.config.checkpoint_section import DISK, REMOTE
from polyturn.config.schema import Recipe, filled
from polyturn.data.stream import Stream
from polyturn.engine.base import Engine
from polyturn.loop.evaluate import Estimate, Evaluation
from polyturn.loop.place import Place
from polyturn.loop.restore import POLICY
from polyturn.loop.resume import Resume
from polyturn.loop.step import DropGuard
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.threads import in_thread, in_thread_within
from polyturn.trainer.random_state import RandomState, random_state
from polyturn.trainer.trainer import Trainer

_CLOSE_S = 60.0


class Saving:
    """Saves one run. `start` is where it goes on; `lock` is a descriptor that the writer holds, too.

    `export` writes the model of the moment into a folder, as that of a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        trainer: Trainer,
        stream: Stream,
        guard: DropGuard,
        estimator: Any,
        engine: Engine,
        place: Place,
        start: LoopState,
        resume: Resume | None,
        export: Callable[[Path, int], None],
        say: Callable[[str], None],
        lock: int | None = None,
    ) -> None:
        self._recipe, self._section = recipe, recipe.checkpoint
        self._folder, self._place, self._say = folder, place, say
        self._trainer, self._stream, self._guard, self._engine = trainer, stream, guard, engine
        self._estimator, self._export, self._resume = estimator, export, resume
        self._every = recipe.checkpoint.cadence()
        self._saved = dict.fromkeys(self._every, start.step)
        self._reserved = False
        self._steps = filled(recipe.run.steps)
        self._state, self._random = start, random_state()
        self._task: asyncio.Task[None] | None = None
        # A run without a save before its end has nothing to do beside that one. But Amazon's library has threads that hang.
        self._separate = self._section.backend == "sagemaker_tiered" or any(
            start.step // every < (self._steps - 1) // every for every in self._every.values()
        )
        self._checkpointer = Checkpointer(
            Settings(run_id=folder.root.name, checkpoints=folder.checkpoints, section=self._section),
            say=say,
            separate=self._separate,
            log=folder.logs / "checkpoints.log",
            inherited=() if lock is None else (lock,),
        )

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._state.step

    @property
    def before(self) -> dict[str, Evaluation]:
        """The evaluations before training."""
        return {mode: _evaluation(values) for mode, values in self._state.before.items()}

    def begin(self) -> None:
        """Start the writer ahead of its first job."""
        if self._separate:
            self._checkpointer.start()

    def evaluated(self, before: Mapping[str, Evaluation]) -> None:
        """Keep the evaluations before training."""
        self._state = replace(self._state, before={mode: asdict(found) for mode, found in before.items()})

    def after_step(self, step: int) -> None:
        """Note where everything stands after `step`, and start to copy what is due. Nothing is waited for."""
        remember = getattr(self._estimator, "state_dict", None)
        self._state = replace(
            self._state,
            step=step,
            cursor=self._stream.cursor,
            policy_version=self._engine.policy_version,
            guard=self._guard.state(),
            estimator=None if remember is None else remember(),
        )
        self._random = random_state()
        due = self._due(step)
        every = self._section.export_every
        export = every is not None and step % every == 0
        reserve = self._separate and not self._reserved
        if due or export or reserve:
            self._reserved = True
            self._task = asyncio.create_task(self._work(due, export, reserve), name=f"the checkpoint of step {step}")

    async def settle(self) -> None:
        """Wait for the copy that is under way: from here on, weights may change. Raises RankError, DeadlineError."""
        task, self._task = self._task, None
        if task is not None:
            with self._place.waiting("the copy of a checkpoint", self._recipe.trainer.step_deadline_s):
                await task

    async def last(self) -> list[str]:
        """Save where the run ends, everywhere. Sentences on what did not come there within `checkpoint.deadline_s`."""
        await self.settle()
        missing = [tier for tier, step in self._saved.items() if step != self.step]
        limit_s, what = self._section.deadline_s, f"the checkpoint of step {self.step} (checkpoint.deadline_s)"
        with self._place.waiting(what, limit_s):
            late = await in_thread(self._checkpointer.wait, self.step, limit_s)
            if missing and self.step and not self._checkpointer.busy:
                await self._work(missing, export=False, reserve=False)
                late = await in_thread(self._checkpointer.wait, self.step, limit_s)
            if not late and not self._every.keys().isdisjoint((DISK, REMOTE)):
                await in_thread(self._free_memory)
            return late

    async def close(self) -> None:
        """Let what is under way end. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)  # the run ends of something else already
        await in_thread(self._checkpointer.close, _CLOSE_S)

    def metrics(self) -> dict[str, float]:
        """What came of earlier saves."""
        return self._checkpointer.metrics()

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self, step: int) -> list[str]:
        """Tiers whose turn has come since they were last saved to."""
        if step < self._steps and step % self._recipe.weight_sync.every_steps:
            return []  # the engine lags behind the weights, and could not go on from these
        due = [tier for tier, every in self._every.items() if step // every > self._saved[tier] // every or step == self._steps]
        return [] if self._checkpointer.busy else due

    async def _work(self, tiers: list[str], export: bool, reserve: bool) -> None:
        if tiers:
            await in_thread(self._copy, tiers, self._state, self._random)
            self._saved |= dict.fromkeys(tiers, self._state.step)
            self._forget_source()
        elif reserve:
            await in_thread(self._checkpointer.reserve, self._trainer.state(self._section.contents))
        if export:
            limit_s, what = self._recipe.trainer.step_deadline_s, f"the export of step {self.step}"
            await in_thread_within(limit_s, what, self._write_export, self.step)

    def _copy(self, tiers: list[str], loop: LoopState, own_random: RandomState) -> None:
        recipe = self._recipe.model_dump(mode="json")

        def copy(module: dict[str, Any], randomness: list[RandomState]) -> None:
            # Rank 0 plays trajectories again by now, with whatever random numbers an environment draws.
            whole = full_state({POLICY: module}, loop, randomness=[own_random, *randomness[1:]], recipe=recipe)
            self._checkpointer.save(
                whole,
                step=loop.step,
                policy_version=loop.policy_version,
                tiers=tiers,
                meta={"modules": [POLICY], "contents": self._section.contents, "versions": package_versions()},
            )

        self._trainer.save(copy, self._section.contents)

    def _free_memory(self) -> None:
        """What lasts longer has the last checkpoint, so memory is for others again.

        That of other machines is so when nothing is left to do: a run that was stopped may lose its disk with its machine.
        """
        safe = self.step == self._steps or REMOTE in self._every
        free_memory_tiers(self._section, self._folder.root.name, self._folder.checkpoints, elsewhere=safe)

    def _forget_source(self) -> None:
        """The checkpoint that this run has started from is not needed any more: it has one of its own."""
        if self._resume is not None:
            self._resume.remove()
            self._resume = None

    def _write_export(self, step: int) -> None:
        adapters = "adapter_" if self._recipe.model.lora is not None else ""
        target = self._folder.exports / f"{adapters}step_{step}"
        draft = self._folder.exports / f".{target.name}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            self._export(draft, step)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
        except Exception as error:  # a full disk, whichever library finds it; the run is worth more than this folder
            self._say(f"the model of step {step} was not exported: {type(error).__name__}: {error}")
            shutil.rmtree(draft, ignore_errors=True)


def _evaluation(values: Mapping[str, Any]) -> Evaluation:
    """From what `asdict` made of one."""

    def built(value: Any) -> Any:
        if isinstance(value, Mapping):
            return Estimate(**value) if value.keys() == {"mean", "low", "high"} else {k: built(v) for k, v in value.items()}
        return value

    return Evaluation(**built(dict(values)))
