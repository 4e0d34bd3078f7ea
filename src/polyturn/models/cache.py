"""Where models made here are kept, and how one gets there: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyturn.errors import ModelError


def cache_folder() -> Path:
    """`POLYTURN_CACHE`, else `polyturn` in the user's cache folder."""
    named = os.environ.get("POLYTURN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyturn"


def is_model(folder: Path) -> bool:
    """Whether `folder` holds a finished model."""
    return (folder / "config.json").is_file()


@contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends, and goes when the block raises.

    Two processes may make the same model at once: the first one's folder stays, the other's goes. Raises ModelError for a
    cache that can't be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"built-in models are kept in {folder.parent}, which can't be written to ({error.strerror}); "
            "set POLYTURN_CACHE to a folder of yours"
        ) from error
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp lets nobody else in, and the cache may be shared
        try:
            draft.rename(folder)
        except OSError:
            if not is_model(folder):  # else another process made the same one meanwhile
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
