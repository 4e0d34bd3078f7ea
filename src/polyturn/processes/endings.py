"""How a process ended, in words, and in a file where its parent's parent can read it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from polyturn.processes.whole_file import write_whole


def ending_words(code: int) -> str:
    """What an exit code as `subprocess` gives it (negative for a signal) means, as the rest of a sentence.

    >>> ending_words(-9)
    'was killed by signal 9 (SIGKILL; the kernel does that too, when memory runs out)'
    >>> ending_words(1)
    'ended with exit code 1'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal without a name"
    hint = "; the kernel does that too, when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{hint})"


def write_ending(folder: Path, name: str, code: int) -> None:
    """Say in the run folder how the role `name` ended, for whoever is not its parent."""
    write_whole(_file(folder, name), json.dumps({"exit_code": code}))


def read_ending(folder: Path, name: str) -> int | None:
    """How the role `name` ended, negative for a signal; None while nobody has said."""
    try:
        return int(json.loads(_file(folder, name).read_text(encoding="utf-8"))["exit_code"])
    except FileNotFoundError:
        return None


def _file(folder: Path, name: str) -> Path:
    return folder / "roles" / f"{name}.ended"
