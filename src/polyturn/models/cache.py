"""Where models made here are kept, and how one gets there: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polyturn.errors import ModelError, UserError


def cache_folder() -> Path:
    """`POLYTURN_CACHE`, else `polyturn` in the user's cache folder."""
    named = os.environ.get("POLYTURN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyturn"


def is_model(folder: Path) -> bool:
    """Whether `folder` holds a finished model."""
    return (folder / "config.json").is_file()


@contextmanager
def draft_of(
    folder: Path,
    *,
    what: str = "built-in models",
    is_whole: Callable[[Path], bool] = is_model,
    error_class: type[UserError] = ModelError,
) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends, and goes when the block raises.

    Two processes may make the same thing at once: the first one's folder stays, the other's goes. Raises `error_class` for a
    cache that can't be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise error_class(
            f"{what} are kept in {folder.parent}, which can't be written to ({error.strerror}); "
            "set POLYTURN_CACHE to a folder of yours"
        ) from error
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp lets nobody else in, and the cache may be shared
        try:
            draft.rename(folder)
        except OSError:
            if not is_whole(folder):  # else another process made the same one meanwhile
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
