"""A run on this machine: its log view, its supervisor, and what is said when it ends."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyturn.launch.logs import LogView
from polyturn.launch.losses import report
from polyturn.launch.specs import RoleSpec
from polyturn.launch.starter import LocalStarter
from polyturn.launch.supervisor import Outcome, Patience, Supervisor
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.keeper import remove_scratch
from polyturn.processes.role import DRIVER

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe

_VIEW_S = 10.0


def run_roles(specs: Sequence[RoleSpec], folder: RunFolder, patience: Patience) -> int:
    """Start the roles as processes of this machine, watch them, and return the run's exit code when none is left.

    Lines of the driver go to stdout, those of the others to stderr. To be called in the main thread of a process that has
    children of this run only, as after `processes.keeper.keep`: whatever descends from it is ended.
    """
    names = [name for spec in specs for name in (spec.name, *spec.members)]
    view = LogView(folder.logs, names, main=DRIVER)

    async def supervised() -> Outcome:
        supervisor = Supervisor(
            specs,
            folder.root,
            LocalStarter(folder.logs),
            patience=patience,
            token=secrets.token_urlsafe(32),
            say=lambda text: view.note(f"polyturn: {text}"),
        )
        return await supervisor.run()

    view.start()
    try:
        outcome = asyncio.run(supervised())
    finally:
        view.stop(_VIEW_S)
        remove_scratch()
    if outcome.loss is not None:
        for line in report(outcome.loss, folder.logs):
            print(line, file=sys.stderr, flush=True)
    return outcome.exit_code


def patience_of(recipe: Recipe) -> Patience:
    """How long the supervisor of a recipe's run waits for what."""
    launch = recipe.launch
    return Patience(
        silence_s=launch.silence_s,
        stop_grace_s=launch.stop_grace_s,
        save_s=recipe.trainer.step_deadline_s + recipe.checkpoint.deadline_s + launch.stop_grace_s,
    )
