"""The trainer's ranks: the first drives the run, alone or with peers, and the others train on what it gives them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from polyturn.config.schema import Recipe, filled
from polyturn.environments.resources import Resources
from polyturn.loop.build import build_trainer, policy_to_train, quiet_libraries
from polyturn.loop.check import Checked, check
from polyturn.loop.place import Place
from polyturn.loop.restore import restore_randomness, restore_trainer, with_weights
from polyturn.loop.resume import resume_of
from polyturn.loop.sync import Outcome, train_recipe
from polyturn.metrics.logs import set_up_logging
from polyturn.metrics.run_folder import RunFolder
from polyturn.metrics.sinks import ConsoleSink, JsonlSink, MetricsLog, ProgressSink, Sink

say = partial(print, flush=True)


def train_here(checked: Checked, folder: RunFolder, place: Place) -> int:
    """Drive the run in this process, with its metrics on the console. Returns the exit code."""
    set_up_logging(checked.recipe.run.log_level)
    quiet_libraries()

    async def whole() -> Outcome:
        sinks: list[Sink] = [JsonlSink(folder.metrics), ConsoleSink(), ProgressSink(filled(checked.recipe.run.steps))]
        with MetricsLog(sinks) as log:
            return await train_recipe(checked, folder, log, say, place)

    _report(asyncio.run(whole()), filled(checked.recipe.run.steps))
    return 0


def train_rank(place: Place, recipe: Recipe) -> int:
    """Rank 0 drives, the others train on what it gives them. Returns the exit code."""
    checked = check(recipe)
    if place.role.number == 0:
        return train_here(_at_peers(checked, place), RunFolder(place.role.folder), place)
    quiet_libraries()
    resume = resume_of(RunFolder(place.role.folder))
    policy = with_weights(asyncio.run(policy_to_train(checked.recipe, checked.environment, say)), resume)
    ranks = place.join_ranks(checked.recipe)
    trainer = build_trainer(checked.recipe, policy.model, ranks, exact=policy.exact)
    restore_trainer(trainer, resume)
    restore_randomness(resume, place.role.number)
    trainer.serve()
    return 0


def _at_peers(checked: Checked, place: Place) -> Checked:
    """`checked` with its episodes played by the environment processes, where there are any; they hold the sandbox then."""
    urls = place.role.peers.get("environment", ())
    if not urls:
        return checked
    from polyturn.environments.remote import RemoteEnvironment

    silence_s = checked.recipe.launch.silence_s
    remote = RemoteEnvironment(checked.environment, urls, token=place.role.token or "", silence_s=silence_s)
    return replace(checked, environment=remote, resources=Resources())


def _report(outcome: Outcome, steps: int) -> None:
    for mode, after in outcome.after.items():
        before = outcome.before.get(mode)
        known = "" if before is None else f"before {before.success}, "
        print(f"held-out success, {mode}: {known}after {after.success}")
    if outcome.stopped_by is not None:
        print(f"stopped by {outcome.stopped_by} after {outcome.steps_done} of {steps} steps; there was no last evaluation")
        print("go on with the same command and --resume")
    print(f"run: {outcome.folder}")
    print(f"exported model: {outcome.export}")
