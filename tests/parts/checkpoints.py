"""Small sealed checkpoints, and ways to break a stored one."""

from __future__ import annotations

from pathlib import Path

from polyturn.storage.manifest import Manifest, Place, seal, step_name

RUN = "lookup"


def content_of(step: int) -> dict[str, bytes]:
    """Files of a checkpoint; other steps have other bytes."""
    return {"__0_0.distcp": b"weights of step %d " % step * 2000, "__1_0.distcp": b"rank 1, step %d" % step, ".metadata": b"m"}


def make(folder: Path, step: int, content: dict[str, bytes] | None = None, **meta: object) -> tuple[Path, Manifest]:
    """A sealed checkpoint in `folder/step_...`."""
    target = folder / step_name(step)
    for name, raw in (content_of(step) if content is None else content).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(raw)
    return target, seal(target, run_id=RUN, step=step, policy_version=step, meta=meta)


def holds(folder: Path, step: int) -> bool:
    """Whether a folder has exactly the files of a step."""
    return all((folder / name).read_bytes() == raw for name, raw in content_of(step).items())


def replace(place: Place, key: str, raw: bytes | None, scratch: Path) -> None:
    """Put other bytes where a stored file is, or none."""
    place.store.delete(key)
    if raw is not None:
        (scratch / "replacement").write_bytes(raw)
        place.store.put(scratch / "replacement", key)
