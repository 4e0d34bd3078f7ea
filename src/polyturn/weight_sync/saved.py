"""Folders of weights that appear whole or not at all, the last few of them kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from polyturn.errors import WeightSyncError


class SavedFolders:
    """Folders in `root`, each written by `save(folder)`. `keep` are the newest that stay."""

    def __init__(self, root: Path, save: Callable[[Path], None], *, keep: int) -> None:
        self._root = root
        self._save = save
        self._keep = keep
        self._made: list[Path] = []

    def write(self, name: str) -> Path:
        """The folder `name`: written under another name, and on the disk, before it gets its own. Blocks.

        Raises WeightSyncError when it can't be written.
        """
        target, draft = self._root / name, self._root / f".{name}.{os.getpid()}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            self._save(draft)
            for file in draft.iterdir():
                _to_disk(file)
            draft.rename(target)
            _to_disk(self._root)
        except OSError as error:
            raise WeightSyncError(f"the weights can't be written to {target}: {error.strerror or error}") from error
        self._made.append(target)
        return target

    def forget_old(self) -> None:
        """Remove all but the newest."""
        while len(self._made) > self._keep:
            shutil.rmtree(self._made.pop(0), ignore_errors=True)

    def remove_all(self) -> None:
        """Remove what is left, and the root when that leaves it empty."""
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
        self._made.clear()
        if self._root.is_dir() and not any(self._root.iterdir()):
            self._root.rmdir()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
