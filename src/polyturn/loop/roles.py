"""What each process of a run does: the driver and the other ranks of the trainer, an engine server, an environment process."""

from __future__ import annotations

import asyncio
from functools import partial

from polyturn.config.schema import Recipe, filled
from polyturn.errors import ConfigError
from polyturn.loop.build import build_trainer, policy_to_train, quiet_libraries
from polyturn.loop.check import Checked, check
from polyturn.loop.place import Place, taken
from polyturn.loop.sync import Outcome, train_recipe
from polyturn.metrics.logs import set_up_logging
from polyturn.metrics.run_folder import RunFolder
from polyturn.metrics.sinks import ConsoleSink, JsonlSink, MetricsLog, ProgressSink, Sink
from polyturn.processes.role import Role

_say = partial(print, flush=True)


def run_role(role: Role, recipe: Recipe) -> int:
    """Be `role` until the run ends. Returns the exit code; raises what ends the run."""
    set_up_logging(recipe.run.log_level)
    quiet_libraries()
    with taken(role) as place:
        if role.kind == "trainer":
            return _train_rank(place, recipe)
        raise ConfigError(f"{role.name} can't be started by this version")


def train_here(checked: Checked, folder: RunFolder, place: Place) -> int:
    """Drive the run in this process, with its metrics on the console. Returns the exit code."""
    set_up_logging(checked.recipe.run.log_level)
    quiet_libraries()

    async def whole() -> Outcome:
        sinks: list[Sink] = [JsonlSink(folder.metrics), ConsoleSink(), ProgressSink(filled(checked.recipe.run.steps))]
        with MetricsLog(sinks) as log:
            return await train_recipe(checked, folder, log, _say, place)

    _report(asyncio.run(whole()), filled(checked.recipe.run.steps))
    return 0


def _train_rank(place: Place, recipe: Recipe) -> int:
    """Rank 0 drives, the others train on what it gives them."""
    checked = check(recipe)
    if place.role.number == 0:
        return train_here(checked, RunFolder(place.role.folder), place)
    policy = asyncio.run(policy_to_train(checked.recipe, checked.environment, _say))
    build_trainer(checked.recipe, policy.model, place.join_ranks(checked.recipe)).serve()
    return 0


def _report(outcome: Outcome, steps: int) -> None:
    for mode, after in outcome.after.items():
        before = outcome.before[mode]
        print(f"held-out success, {mode}: before {before.success}, after {after.success}")
    if outcome.stopped_by is not None:
        print(f"stopped by {outcome.stopped_by} after {outcome.steps_done} of {steps} steps; there was no last evaluation")
    print(f"run: {outcome.folder}")
    print(f"exported model: {outcome.export}")
