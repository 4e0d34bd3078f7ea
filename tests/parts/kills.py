"""A run that is cut at a chosen phase of a chosen step: by an exception, or in a process of its own by SIGKILL.

python -m parts.kills PHASE STEP -- train recipe.yaml ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP = "train_step"
PHASES = {
    "rollout": ("polyturn.loop.sync", "make_groups"),
    "batches": ("polyturn.loop.sync", "build_batches"),
    "trajectories": ("polyturn.loop.sync", "save_trajectories"),
    "backward": ("polyturn.trainer.passes", "policy_loss"),
    "optimizer": ("polyturn.trainer.parallel", "clip"),
    "push": ("polyturn.weight_sync.in_process", "check_coverage"),
    "metrics": ("polyturn.loop.sync", "rollout_metrics"),
    "note": ("polyturn.loop.saving", "random_state"),
    "copy": ("polyturn.checkpoint.checkpointer", "split"),
}
"""Functions that a step calls, in order, by the name of the phase."""


class Cut(Exception):
    """Not one of Polyturn's."""


def arm(phase: str, at_step: int, cut: Callable[[], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Call `cut` where `at_step` comes to `phase`. Needs the modules of a run, so it imports them."""
    import importlib

    from polyturn.loop import sync

    now = {"step": 0}
    whole_step = sync.train_step

    async def train_step(run: Any, step: int) -> None:
        now["step"] = step
        await whole_step(run, step)

    patch(sync, STEP, train_step)
    where, name = PHASES[phase]
    module = importlib.import_module(where)
    whole = getattr(module, name)

    def cutting(*given: Any, **named: Any) -> Any:
        if now["step"] == at_step:
            cut()
        return whole(*given, **named)

    patch(module, name, cutting)


def durable_first(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let every save get everywhere before the next step begins, so that a cut loses nothing but its own step."""
    from polyturn.loop import sync

    whole = sync.train_step

    async def train_step(run: Any, step: int) -> None:
        if step > 1:
            await run.saving.settle()
            assert run.saving._checkpointer.wait(step - 1, 60.0) == []
        await whole(run, step)

    patch(sync, STEP, train_step)


def comparable(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a metrics file without what a clock has measured."""
    timed = ("time/", "push/", "tokens_per_s", "checkpoint/", "peak_memory")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in metrics]


def files_of(folder: Path) -> dict[str, bytes]:
    """What must be the same in two runs that are one: weights and trajectories."""
    found = {"model": (folder / "export" / "model.safetensors").read_bytes()}
    for path in sorted((folder / "trajectories").iterdir()):
        found[path.name] = path.read_bytes()
    return found


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Its metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    from polyturn.cli.main import main

    phase, step = sys.argv[1], int(sys.argv[2])
    durable_first()
    arm(phase, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(main(sys.argv[4:]))
