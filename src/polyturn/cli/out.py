"""`--out`: a new file or folder. Nothing is overwritten; what can not be made is refused before anything is paid for it."""

from __future__ import annotations

from pathlib import Path


def new_path(given: str, kind: str) -> Path:
    """`--out` as a path. Raises ConfigError when it is there already; `kind` is `file` or `folder`."""
    from polyturn.errors import ConfigError

    out = Path(given)
    if out.exists():
        raise ConfigError(f"--out={out} exists already; name a new {kind}, nothing is overwritten")
    return out


def refuse_unwritable(out: Path, kind: str) -> None:
    """Raise ConfigError when `out` can't be made. Makes the folders above it."""
    from polyturn.errors import ConfigError

    try:
        out.mkdir(parents=True)
        out.rmdir()
    except OSError as error:
        raise ConfigError(f"--out={out} can't be made ({error.strerror}); name another {kind}") from error
