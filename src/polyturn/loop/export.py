"""A model out of a checkpoint: an ordinary transformers folder, or one of adapters, without the run it is from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from polyturn.checkpoint.places import tiers_of
from polyturn.config.load import load_recipe
from polyturn.errors import ConfigError, ResourceError, StorageError
from polyturn.loop.build import policy_to_train
from polyturn.loop.card import write_card
from polyturn.loop.check import chat_template, check
from polyturn.loop.restore import fill_model
from polyturn.loop.resume import Resume, checkpoint_or_nothing
from polyturn.metrics.run_folder import RunFolder
from polyturn.models.load import export_model
from polyturn.processes.threads import in_thread_within
from polyturn.storage.manifest import read_manifest
from polyturn.storage.tiers import Checkpoint, Tiers


async def export_checkpoint(folder: RunFolder, step: int | None, out: Path, say: Callable[[str], None]) -> int:
    """Write the model of a run's checkpoint of `step` (its newest when None) to `out`; the step that it is.

    Raises:
        ConfigError: no such run, or no checkpoint of that step.
        ResourceError: there is one, and it can't be used.
    """
    if not folder.recipe.is_file():
        raise ConfigError(
            f"{folder.root}: no run folder; give the one that `polyturn train` has printed, such as runs/quickstart"
        )
    checked = check(load_recipe(folder.recipe))
    recipe = checked.recipe
    tiers = tiers_of(recipe.checkpoint, folder.root.name, folder.checkpoints, say)
    limit_s = recipe.trainer.step_deadline_s
    with tempfile.TemporaryDirectory(prefix="polyturn-export-", dir=out.parent) as scratch:
        target = Path(scratch) / "checkpoint"
        found = await in_thread_within(limit_s, "the checkpoint to be fetched", _fetch, tiers, step, target)
        async with checked.opened():  # builtin:tiny may have to be made
            policy = await policy_to_train(recipe, checked.environment, say)
        fill_model(policy.model, Resume(folder=target, load="model", step=found.manifest.step))
        draft = Path(scratch) / "export"
        export = partial(export_model, chat_template=chat_template(recipe))
        await in_thread_within(limit_s, f"the export to {out}", export, policy.model, policy.folder, draft)
        write_card(draft, recipe, folder.metrics, step=found.manifest.step)
        draft.rename(out)
    return found.manifest.step


def _fetch(tiers: Tiers, step: int | None, target: Path) -> Checkpoint:
    if step is None:
        newest = checkpoint_or_nothing(tiers, tiers.fetch_newest(target))
        if newest is None:
            raise ConfigError(f"run {tiers.run_id} has no checkpoint yet; its model as it was trained is in export/")
        return newest
    stored = {(found.step, tier.name): found.place for tier, found in tiers.checkpoints()}
    lost = []
    for (_, tier), place in ((key, place) for key, place in stored.items() if key[0] == step):
        try:
            checkpoint = Checkpoint(tier, place, read_manifest(place))
            fault = tiers.fetch(checkpoint, target)
        except StorageError as error:
            fault = str(error)
        if fault is None:
            return checkpoint
        lost.append(f"in tier {tier} {fault}")
    if lost:
        raise ResourceError(f"the checkpoint of step {step} can't be used: {'; '.join(lost)}")
    there = sorted({found for found, _ in stored})
    raise ConfigError(f"run {tiers.run_id} has no checkpoint of step {step}; it has {', '.join(map(str, there)) or 'none'}")
