"""Tokenised opening messages, kept on disk: named after the file's hash, the transform and the tokenizer.

An entry also holds a digest of the messages it was made from. One that was made from others, whatever the reason, is made
again: a stale entry is never used. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from polyturn.errors import ResourceError, UserError
from polyturn.types import Message

Encode: TypeAlias = "Callable[[Sequence[Message]], Sequence[int]]"
FORMAT = 1
"""Part of an entry's name: raised when what lies in it changes."""
FEW_ROWS = 2000
"""Fewer are tokenised faster than processes start."""
_CHUNK = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenised:
    """Ids of many openings laid end to end: opening i is `ids[offsets[i]:offsets[i + 1]]`, empty where `problems` has i."""

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    problems: Mapping[int, str] = field(default_factory=dict)
    from_cache: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each opening."""
        return np.diff(self.offsets)


def tokenise(
    openings: Sequence[Sequence[Message]], encode: Encode, *, num_workers: int = 1, again: Callable[[], Encode] | None = None
) -> Tokenised:
    """Encode every opening. What a tokenizer refuses is a problem of that row.

    With `num_workers` above 1 and `again`, which makes `encode` anew and can be pickled, processes of their own share the work,
    unless there are so few rows that starting them would take longer.

    Raises:
        ResourceError: a worker died.
    """
    if num_workers > 1 and again is not None and len(openings) >= FEW_ROWS:
        rows = _in_processes(openings, again, num_workers)
    else:
        rows = [_one(encode, opening) for opening in openings]
    problems = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
    arrays = [np.empty(0, dtype=np.int32) if isinstance(row, str) else row for row in rows]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in arrays], out=offsets[1:])
    ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
    return Tokenised(ids=ids, offsets=offsets, problems=problems)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file; of the name for what is no file."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        digest.update(str(path).encode())
    return digest.hexdigest()


class TokenCache:
    """A folder of tokenised files."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def entry(self, *, file: str, transform: str, tokenizer: str) -> Path:
        """Where the openings of a file with this hash lie, made by this transform, cut by this tokenizer."""
        name = hashlib.sha256("\0".join((str(FORMAT), file, transform, tokenizer)).encode()).hexdigest()[:32]
        return self._folder / f"{name}.npz"

    def tokenised(
        self,
        entry: Path,
        openings: Sequence[Sequence[Message]],
        encode: Encode,
        *,
        num_workers: int = 1,
        again: Callable[[], Encode] | None = None,
    ) -> Tokenised:
        """The entry, made (see `tokenise`) when it is missing, damaged or of other messages. One with problems is not kept."""
        digest = _digest(openings)
        found = _read(entry, digest)
        if found is not None:
            return found
        made = tokenise(openings, encode, num_workers=num_workers, again=again)
        if not made.problems:
            _write(entry, made, digest)
        return made


def _one(encode: Encode, opening: Sequence[Message]) -> npt.NDArray[np.int32] | str:
    """Ids of one opening, or why it has none."""
    try:
        return np.asarray(encode(opening), dtype=np.int32)
    except UserError as error:
        return str(error)


_encode: Encode | None = None
"""Set in a worker."""


def _start_worker(again: Callable[[], Encode]) -> None:
    global _encode
    _encode = again()


def _work(opening: Sequence[Message]) -> npt.NDArray[np.int32] | str:
    assert _encode is not None, "a worker was not started"
    return _one(_encode, opening)


def _in_processes(
    openings: Sequence[Sequence[Message]], again: Callable[[], Encode], num_workers: int
) -> list[npt.NDArray[np.int32] | str]:
    # A fork would copy locks that other threads of ours hold.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=(again,)) as pool:
            return list(pool.map(_work, openings, chunksize=_CHUNK))
    except BrokenProcessPool as error:
        raise ResourceError(f"a process that tokenised rows died ({error}); set data.num_workers=1") from error


def _digest(openings: Sequence[Sequence[Message]]) -> str:
    digest = hashlib.sha256()
    for opening in openings:
        for message in opening:
            for part in (message.role, message.content):
                raw = part.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "big") + raw)
        digest.update(b"\xff")
    return digest.hexdigest()


def _read(entry: Path, digest: str) -> Tokenised | None:
    try:
        # Opened here: numpy leaves the file open when it is no whole archive.
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if str(arrays["digest"]) != digest:
                return None
            return Tokenised(ids=arrays["ids"], offsets=arrays["offsets"], from_cache=True)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _write(entry: Path, made: Tokenised, digest: str) -> None:
    """Write an entry, whole or not at all."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    draft = entry.with_name(f".{entry.stem}.{os.getpid()}.npz")
    with draft.open("wb") as file:
        np.savez(file, ids=made.ids, offsets=made.offsets, digest=np.array(digest))
    draft.replace(entry)
