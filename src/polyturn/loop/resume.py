"""What a run goes on from: found on its tiers, compared with the recipe, laid into the run folder for all of its processes.

Needs no torch. A run is known by the name of its folder, which is the same after every restart.

    --resume                     the newest run of the recipe's name goes on, in its folder, from its newest verified checkpoint
    --resume RUN                 so does the run in this folder
    --resume CHECKPOINT          a new run starts from this one, wherever it is; with --load, from a part of it
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from polyturn.checkpoint.places import WRITING, access_of, memory_root, shared_tiers, tiers_of
from polyturn.config.changes import changes, refuse_changes
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError, PolyturnError, ResourceError
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.lock import FileLock
from polyturn.processes.whole_file import write_whole
from polyturn.storage.finding import fetch_selected, find
from polyturn.storage.manifest import read_manifest, verify
from polyturn.storage.retention import stored_steps
from polyturn.storage.tiers import Checkpoint, Search, Tiers

Load: TypeAlias = Literal["all", "model+optimizer", "model"]
Say: TypeAlias = Callable[[str], None]

STATE = "state.json"
LOCK_WAIT_S = 60.0
"""For a run that was killed a moment ago to let go of its folder: its last checkpoint may still be on its way there."""
_FETCHED = ".resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A checkpoint that lies in `folder`, whole, and how much of it is taken."""

    folder: Path
    load: Load
    step: int
    """The last step of the run that goes on; 0 for a new run."""

    def rest(self) -> dict[str, Any]:
        """All of the state that is no tensor. Raises ResourceError."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATE).read_text(encoding="utf-8"))["state"]
        except (OSError, ValueError, KeyError) as error:
            raise ResourceError(f"{self.folder / STATE} can't be read ({error}); resume again") from error
        return state

    def remove(self) -> None:
        """Remove the local copy."""
        shutil.rmtree(self.folder, ignore_errors=True)


def resume_of(folder: RunFolder) -> Resume | None:
    """What the run in `folder` goes on from, as whoever started it has laid down; None for a run from the beginning."""
    try:
        values = json.loads(folder.resume.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Resume(folder=folder.root / values["folder"], load=values["load"], step=values["step"])


def open_run(recipe: Recipe, resume: str | None, load: Load, say: Say) -> RunFolder:
    """The folder of a run that starts or goes on. `resume` is what the option was given: "" for nothing, None for no option.

    Raises:
        ConfigError: a recipe that would make the run another one, a checkpoint that is none.
        ResourceError: there are checkpoints, and none is whole or can be reached; the folder is in use.
    """
    if resume is None:
        return _new_folder(recipe, say)
    if resume == "" and load != "all":
        raise ConfigError(
            f"--load={load} starts a new run; name the checkpoint it starts from, as in --resume PATH --load {load}"
        )
    if resume == "" or (load == "all" and _is_run(Path(resume))):
        return _go_on(recipe, Path(resume) if resume else None, say)
    return _start_from(recipe, resume, load, say)


# ── a run that goes on ─────────────────────────────────────────────────────────────────────────────────────────────────


def _go_on(recipe: Recipe, given: Path | None, say: Say) -> RunFolder:
    root = given or newest_folder(Path(recipe.run.output_dir), recipe.run.name)
    folder = RunFolder.create(recipe.run.output_dir, recipe.run.name) if root is None else RunFolder(root)
    with FileLock(folder.lock, f"the run folder {folder.root}", wait_s=LOCK_WAIT_S):
        folder.complete()
        for scratch in (folder.checkpoints, memory_root(folder.checkpoints)):
            shutil.rmtree(scratch / WRITING, ignore_errors=True)  # of a writer that was killed
        source, target = resume_of(folder), folder.checkpoints / _FETCHED
        fetched = target.with_name(f"{_FETCHED}-new")
        shutil.rmtree(fetched, ignore_errors=True)
        tiers = tiers_of(recipe.checkpoint, folder.root.name, folder.checkpoints, say)
        found = checkpoint_or_nothing(tiers, tiers.fetch_newest(fetched))
        if found is None and source is not None and verify(source.folder) is None:
            say(f"run {folder.root.name} has no checkpoint of its own yet, so it starts as it did")
            trim(folder, step=source.step)
            return folder
        folder.resume.unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        if found is None:
            say(f"run {folder.root.name} has no checkpoint yet, so it starts from the beginning")
            trim(folder, step=0)
            return folder
        fetched.rename(target)
        resume = Resume(folder=target, load="all", step=found.manifest.step)
        _compare(recipe, resume, say)
        trim(folder, step=resume.step)
        _lay_down(folder, resume)
        say(f"run {folder.root.name} goes on after step {resume.step}, from {found}")
    return folder


def checkpoint_or_nothing(tiers: Tiers, search: Search) -> Checkpoint | None:
    """What was found. None where none was ever completed; raises ResourceError when one was and can't be used."""
    if search.checkpoint is not None:
        return search.checkpoint
    lost = list(search.unreachable)
    if any(stored.has_manifest for _, stored in tiers.checkpoints()):
        lost += search.rejected
    if lost:
        raise ResourceError(
            f"run {tiers.run_id} has no checkpoint that is whole and can be read, and nothing starts anew unasked: "
            f"{'; '.join(lost)}; mend that, or start a new run without --resume"
        )
    return None


def newest_folder(output_dir: Path, name: str) -> Path | None:
    """The folder of the newest run of this name: `lookup-3` rather than `lookup`."""
    found: dict[int, Path] = {}
    for path in output_dir.glob(f"{_escaped(name)}*"):
        number = re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name)
        if number and path.is_dir():
            found[int(number[1] or 1)] = path
    return found[max(found)] if found else None


def trim(folder: RunFolder, *, step: int) -> None:
    """Take away what will be made again: metrics and trajectories after `step`, and the evaluation of that step itself."""
    if folder.metrics.exists():
        kept = []
        for line in folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote this one
            last = step - 1 if any(name.startswith(("eval/", "eval_greedy/")) for name in values) else step
            if values.get("step", step) <= last:
                kept.append(f"{line}\n")
        write_whole(folder.metrics, "".join(kept))
    for path in folder.trajectories.glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink(missing_ok=True)


def _compare(recipe: Recipe, resume: Resume, say: Say) -> None:
    """Say what differs between the recipe and the checkpoint's. Raises ConfigError when the run would be another one."""
    found = changes(resume.rest()["recipe"], recipe.model_dump(mode="json"))
    refuse_changes(found)
    for change in found:
        say(f"since the checkpoint was saved, {change}")


# ── a new run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _new_folder(recipe: Recipe, say: Say) -> RunFolder:
    """A folder for a run from the beginning. Raises ConfigError when another machine has checkpoints of a run of that name."""
    folder = RunFolder.create(recipe.run.output_dir, recipe.run.name)
    shutil.rmtree(memory_root(folder.checkpoints), ignore_errors=True)  # of a run whose folder was removed
    try:
        tiers = tiers_of(recipe.checkpoint, folder.root.name, folder.checkpoints, say)
        for tier in shared_tiers(tiers, recipe.checkpoint):
            if stored_steps(tier.store, folder.root.name):
                raise ConfigError(
                    f"{tier.store.url} has checkpoints of a run {folder.root.name} already; go on from them with --resume, or "
                    "give this run another run.name"
                )
    except PolyturnError:
        shutil.rmtree(folder.root)
        raise
    return folder


def _start_from(recipe: Recipe, given: str, load: Load, say: Say) -> RunFolder:
    source = find(given, access_of(recipe.checkpoint))
    folder = _new_folder(recipe, say)
    try:
        target = folder.checkpoints / _FETCHED
        if isinstance(source, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target)
            fault = verify(target)
            if fault is not None:
                raise ResourceError(f"{given} can't be used: {fault}; choose another checkpoint")
        else:
            fetch_selected([source], target, say)
        whole = load == "all"
        resume = Resume(folder=target, load=load, step=read_manifest(target).step if whole else 0)
        if whole:
            _compare(recipe, resume, say)
        _lay_down(folder, resume)
    except BaseException:
        shutil.rmtree(folder.root, ignore_errors=True)
        raise
    words = f"goes on after step {resume.step} of" if whole else f"starts with the {load.replace('+', ' and the ')} of"
    say(f"run {folder.root.name} {words} {given}")
    return folder


def _lay_down(folder: RunFolder, resume: Resume) -> None:
    values = {**asdict(resume), "folder": str(resume.folder.relative_to(folder.root))}
    write_whole(folder.resume, json.dumps(values))


def _is_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()


def _escaped(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)
