"""Checkpoints that Amazon's library has put into S3, as files of a store under our names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from polyturn.storage.stores.base import Entry, MissingKeyError, Store
from polyturn.storage.stores.sagemaker_names import MANIFEST, part_of, stored_names


class SagemakerS3Store:
    """`inner` holds the library's layout, in which one rank has written: `RUN/rank_0/step_42/NAME`."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        """Of the place itself."""
        return self._inner.url

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Store a file."""
        self._inner.put(file, _theirs(key), link=link)

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Fetch a file."""
        self._inner.get(_theirs(key), file, link=link)

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        return self._inner.read(_theirs(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces."""
        return self._inner.chunks(_theirs(key))

    def list(self, prefix: str) -> list[Entry]:
        """Files by prefix; the manifest of each step says how its shards are called."""
        run_id = prefix.partition("/")[0]
        steps: dict[str, list[Entry]] = {}
        others = []
        for entry in self._inner.list(f"{run_id}/" if run_id else ""):
            parts = entry.key.split("/")
            if len(parts) == 4 and parts[1] == "rank_0" and parts[2].removeprefix("step_").isdigit():
                steps.setdefault(f"{parts[0]}/step_{int(parts[2].removeprefix('step_')):08d}", []).append(entry)
            else:
                others.append(entry)
        for folder, entries in steps.items():
            if f"{folder}/".startswith(prefix) or prefix.startswith(f"{folder}/"):
                others += self._named(folder, entries)
        return sorted((entry for entry in others if entry.key.startswith(prefix)), key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """Remove a file."""
        self._inner.delete(_theirs(key))

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        return self._inner.exists(_theirs(key))

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Store a small file where there is none."""
        return self._inner.put_if_absent(content, _theirs(key))

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what dead writers left."""
        return self._inner.sweep(f"{prefix.partition('/')[0]}/", older_than_s)

    def _named(self, folder: str, entries: Sequence[Entry]) -> Sequence[Entry]:
        names: dict[str, str] = {}
        if any(entry.key.endswith(f"/{MANIFEST}") for entry in entries):
            try:
                names = stored_names(self.read(f"{folder}/{MANIFEST}"))
            except MissingKeyError:  # it was deleted a moment ago
                entries = [entry for entry in entries if not entry.key.endswith(f"/{MANIFEST}")]
        own = {entry.key.rpartition("/")[2]: entry for entry in entries}
        return [replace(entry, key=f"{folder}/{names.get(name, name)}") for name, entry in own.items()]


def _theirs(key: str) -> str:
    part = part_of(key)
    return key if part is None else f"{part.run_id}/rank_0/step_{part.step}/{part.name}"
