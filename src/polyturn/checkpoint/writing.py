"""Writes one checkpoint: files, seal, tiers. Runs in the writer's process, or in the driver's when there is no other work."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from polyturn.checkpoint.arena import Slot
from polyturn.checkpoint.files import write_files
from polyturn.checkpoint.lanes import Lane
from polyturn.checkpoint.places import local_tiers, scratch_root, tiers_of
from polyturn.checkpoint.sagemaker import TIERS, LibraryTiers
from polyturn.config.checkpoint_section import CheckpointSection
from polyturn.storage.manifest import Manifest, seal, step_name

Event: TypeAlias = "dict[str, Any]"
"""What a writer tells: `{"event": "written" | "tier" | "failed" | "said" | "done", "step": N, ...}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a writer knows of its run."""

    run_id: str
    checkpoints: Path
    """Folder of the disk tier."""
    section: CheckpointSection

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"run_id": self.run_id, "checkpoints": str(self.checkpoints), "section": self.section.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """What `to_json` gave."""
        section = CheckpointSection.model_validate(values["section"])
        return cls(run_id=values["run_id"], checkpoints=Path(values["checkpoints"]), section=section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A state to be written: its tensors lie in `slots`, all else is in `rest`."""

    step: int
    policy_version: int
    tiers: tuple[str, ...]
    slots: tuple[Slot, ...]
    rest: Any
    meta: Mapping[str, Any]
    """For the manifest."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        """What `to_json` gave."""
        slots = tuple(Slot(one["path"], one["dtype"], tuple(one["shape"]), one["offset"]) for one in values["slots"])
        return cls(**{**values, "slots": slots, "tiers": tuple(values["tiers"])})


class CheckpointWriter:
    """Writes jobs, one after the other, and tells what became of them. Uploads go on beside the next job, by tier.

    Raises what `tiers_of` and `LibraryTiers` raise.
    """

    def __init__(self, settings: Settings, tell: Callable[[Event], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._tiers = tiers_of(settings.section, settings.run_id, settings.checkpoints, self._say)
        self._local = local_tiers(settings.section)
        by_library = settings.section.backend == "sagemaker_tiered"
        self._library = LibraryTiers(settings.section, self._tiers, self._say) if by_library else None
        self._lanes: dict[str, Lane[_Sealed]] = {}
        self._leaving = threading.Lock()

    def write(self, job: Job, memory: torch.Tensor) -> None:
        """Write one. Tells `written` when `memory` is free again, and `done` at last; raises nothing."""
        start, scratch = time.monotonic(), None
        local = [name for name in job.tiers if name in self._local]
        try:
            scratch = scratch_root(self._settings.checkpoints, local) / f"{step_name(job.step)}-{uuid.uuid4().hex[:8]}"
            scratch.mkdir(parents=True)
            write_files(scratch, {slot.path: slot.alone(memory) for slot in job.slots}, job.rest)
            manifest = seal(
                scratch, run_id=self._settings.run_id, step=job.step, policy_version=job.policy_version, meta=job.meta
            )
        except Exception as error:
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._failed(job, f"the checkpoint of step {job.step} was not saved: {words}")
            _remove(scratch)
            self._tell({"event": "done", "step": job.step})
            return
        self._tell({"event": "written", "step": job.step})
        sealed = _Sealed(job, manifest, scratch, start, set(job.tiers))
        for name in job.tiers:
            if name not in self._local:
                self._upload(sealed, name)
        for name in local:
            self._publish(sealed, name)
        if not job.tiers:
            self._leave(sealed, "")

    def close(self) -> None:
        """Wait for the uploads."""
        for lane in self._lanes.values():
            lane.close()

    def _upload(self, sealed: _Sealed, name: str) -> None:
        if name not in self._lanes:
            self._lanes[name] = Lane(f"uploads to {name}", partial(self._publish, name=name))
        for older in self._lanes[name].add(sealed):
            self._failed(older.job, f"{step_name(older.job.step)} is not in tier {name}: uploads are slower than saves")
            self._leave(older, name)

    def _publish(self, sealed: _Sealed, name: str) -> None:
        step = sealed.job.step
        try:
            if self._library is not None and name in TIERS:
                outcome = self._library.publish(sealed.folder, sealed.manifest, name)
            else:
                (outcome,) = self._tiers.publish(sealed.folder, sealed.manifest, only=[name])
            if outcome.ok:
                self._tell({"event": "tier", "step": step, "tier": name, "seconds": time.monotonic() - sealed.start})
                for sentence in self._tiers.prune(only=[name]):
                    if "deleted" not in sentence:
                        self._say(sentence)
            else:
                self._failed(sealed.job, outcome.sentence, said=True)
        except Exception as error:  # whatever a store's library raises
            self._failed(sealed.job, f"{step_name(step)} is not in tier {name}: {type(error).__name__}: {error}")
        finally:
            self._leave(sealed, name)

    def _leave(self, sealed: _Sealed, name: str) -> None:
        """One tier needs the folder no more; with the last one it goes."""
        with self._leaving:
            sealed.needed_by.discard(name)
            last = not sealed.needed_by
        if last:
            _remove(sealed.folder)
            self._tell({"event": "done", "step": sealed.job.step})

    def _failed(self, job: Job, sentence: str, *, said: bool = False) -> None:
        self._tell({"event": "failed", "step": job.step, "sentence": sentence, "said": said})

    def _say(self, sentence: str) -> None:
        self._tell({"event": "said", "sentence": sentence})


@dataclass(slots=True)
class _Sealed:
    """A sealed checkpoint on its way to its tiers."""

    job: Job
    manifest: Manifest
    folder: Path
    start: float
    needed_by: set[str]


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
