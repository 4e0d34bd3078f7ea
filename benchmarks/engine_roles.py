"""The engine servers of a recipe, started as a run starts them, and the place of a driver beside them.

Nothing here imports torch: what decides on GPUs must be set before.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polyturn.config.resolve import write_resolved
from polyturn.errors import EngineError
from polyturn.launch.gpus import place
from polyturn.launch.roles import needs_processes, role_specs
from polyturn.launch.starter import LocalRole, LocalStarter
from polyturn.loop.check import Checked
from polyturn.loop.place import Place, taken
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.deadlines import deadline
from polyturn.processes.gpus import visible_gpus
from polyturn.processes.role import AGENT, DRIVER, Role, read_address, role_environment
from polyturn.processes.tasks import TaskSet

GRACE_S = 20.0
_LOOK_S = 0.1
_TAIL_LINES = 15


def take_trainers_variables(checked: Checked) -> None:
    """Set in this process what the trainer's would have in a run, its GPUs among it. Before anything imports torch.

    Raises ConfigError for GPUs that can't be given out.
    """
    gpus = visible_gpus()
    if needs_processes(checked.recipe):
        place(checked.recipe, gpus)
        (trainer,) = (spec for spec in role_specs(checked.recipe, gpus, Path("recipe.yaml")) if spec.name == AGENT)
        os.environ.update(trainer.environment)


@asynccontextmanager
async def engine_roles(checked: Checked, gpus: list[str], folder: RunFolder) -> AsyncIterator[Place]:
    """A driver's place with the recipe's engine servers as its peers; they are ended with the block.

    `gpus` are those that were visible before `take_trainers_variables`. Raises EngineError when a server does not come up.
    """
    write_resolved(checked.resolved, folder.recipe)
    token = secrets.token_urlsafe(32)
    specs = [spec for spec in _specs(checked, gpus, folder) if spec.name.startswith("engine-")]
    starter, started = LocalStarter(folder.logs), list[LocalRole]()
    try:
        for spec in specs:
            started.append(starter.start(spec, role_environment(folder.root, {}, token)))
        urls = [
            await _address(folder, spec.name, role, spec.start_deadline_s) for spec, role in zip(specs, started, strict=True)
        ]
        with taken(Role(name=DRIVER, folder=folder.root, peers={"engine": tuple(urls)}, token=token)) as driver:
            yield driver
    finally:
        for role in started:
            role.terminate()
        async with TaskSet("the ends of the engine servers") as tasks:
            for number, role in enumerate(started):
                tasks.start(_ended(role), f"engine-{number}")


def _specs(checked: Checked, gpus: list[str], folder: RunFolder) -> list:  # type: ignore[type-arg]
    return role_specs(checked.recipe, gpus, folder.recipe) if needs_processes(checked.recipe) else []


async def _address(folder: RunFolder, name: str, role: LocalRole, limit_s: float) -> str:
    ended = asyncio.ensure_future(role.wait())
    try:
        async with deadline(limit_s, f"{name} to serve"):
            while (url := read_address(folder.root, name)) is None:
                if ended.done():
                    raise EngineError(f"{name} ended with {ended.result()} before it served; its log: {folder.logs / name}.log")
                await asyncio.sleep(_LOOK_S)
    finally:
        ended.cancel()
    return url


async def _ended(role: LocalRole) -> None:
    try:
        async with deadline(GRACE_S, "an engine server to end"):
            await role.wait()
    finally:
        role.kill()


def last_words(folder: RunFolder) -> str:
    """What the roles and their servers wrote last, and every line before that names an error."""
    found = []
    for log in sorted(folder.logs.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines[:-_TAIL_LINES] if re.search(r"\b\w*Error\b", line)]
        found += [f"── {log.name}", *errors[-_TAIL_LINES:], *lines[-_TAIL_LINES:]]
    return "\n".join(found)
