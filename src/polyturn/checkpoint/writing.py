"""Writes one checkpoint: files, seal, tiers. Runs in the writer's process, or in the driver's when there is no other work."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from polyturn.checkpoint.arena import Slot
from polyturn.checkpoint.files import write_files
from polyturn.checkpoint.places import REMOTE, scratch_root, tiers_of
from polyturn.config.schema import CheckpointSection
from polyturn.storage.manifest import Manifest, seal, step_name

Event: TypeAlias = "dict[str, Any]"
"""What a writer tells: `{"event": "written" | "tier" | "failed" | "said" | "done", "step": N, ...}`."""

_MOST_WAITING = 1
"""Uploads that wait for the one under way. Another one takes the place of the one that waits."""


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
    """Writes jobs, one after the other, and tells what became of them. Uploads go on beside the next job.

    Raises what `tiers_of` raises.
    """

    def __init__(self, settings: Settings, tell: Callable[[Event], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._tiers = tiers_of(settings.section, settings.run_id, settings.checkpoints, self._say)
        self._uploads: queue.Queue[_Upload | None] = queue.Queue()
        self._uploader: threading.Thread | None = None

    def write(self, job: Job, memory: torch.Tensor) -> None:
        """Write one. Tells `written` when `memory` is free again, and `done` at last; raises nothing."""
        start, scratch = time.monotonic(), None
        local = [name for name in job.tiers if name != REMOTE]
        try:
            scratch = scratch_root(self._settings.checkpoints, local) / f"{step_name(job.step)}-{uuid.uuid4().hex[:8]}"
            scratch.mkdir(parents=True)
            write_files(scratch, {slot.path: slot.view(memory) for slot in job.slots}, job.rest)
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
        upload = _Upload(job, manifest, scratch, start)
        for name in local:
            self._publish(upload, name)
        if REMOTE in job.tiers:
            self._upload(upload)
        else:
            self._finish(upload)

    def close(self) -> None:
        """Wait for the uploads."""
        if self._uploader is not None:
            self._uploads.put(None)
            self._uploader.join()

    def _publish(self, upload: _Upload, name: str) -> None:
        try:
            (outcome,) = self._tiers.publish(upload.folder, upload.manifest, only=[name])
            if not outcome.ok:
                self._failed(upload.job, outcome.sentence, said=True)
                return
            self._tell({"event": "tier", "step": upload.job.step, "tier": name, "seconds": time.monotonic() - upload.start})
            for sentence in self._tiers.prune(only=[name]):
                if "deleted" not in sentence:
                    self._say(sentence)
        except Exception as error:  # whatever a store's library raises
            self._failed(upload.job, f"{step_name(upload.job.step)} is not in tier {name}: {type(error).__name__}: {error}")

    def _upload(self, upload: _Upload) -> None:
        if self._uploader is None:
            self._uploader = threading.Thread(target=self._run_uploads, name="uploads checkpoints", daemon=True)
            self._uploader.start()
        while self._uploads.qsize() >= _MOST_WAITING:
            with contextlib.suppress(queue.Empty):
                older = self._uploads.get_nowait()
                assert older is not None, "nothing comes after the end"
                self._failed(older.job, f"{step_name(older.job.step)} is not in tier {REMOTE}: uploads are slower than saves")
                self._finish(older)
        self._uploads.put(upload)

    def _run_uploads(self) -> None:
        while (upload := self._uploads.get()) is not None:
            self._publish(upload, REMOTE)
            self._finish(upload)

    def _finish(self, upload: _Upload) -> None:
        _remove(upload.folder)
        self._tell({"event": "done", "step": upload.job.step})

    def _failed(self, job: Job, sentence: str, *, said: bool = False) -> None:
        self._tell({"event": "failed", "step": job.step, "sentence": sentence, "said": said})

    def _say(self, sentence: str) -> None:
        self._tell({"event": "said", "sentence": sentence})


@dataclass(frozen=True, slots=True)
class _Upload:
    """A sealed checkpoint on its way to its tiers."""

    job: Job
    manifest: Manifest
    folder: Path
    start: float


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
