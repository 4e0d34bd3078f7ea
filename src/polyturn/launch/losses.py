"""What can happen to a role that ends a run, which of several things is to blame, and how to say it."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polyturn.errors import ResourceError, TrainingError, UserError
from polyturn.processes.endings import ending_words

ERROR = "polyturn: error: "
OWN_CODES = (UserError.exit_code, ResourceError.exit_code, TrainingError.exit_code)
"""Exit codes of a role that has said itself, in a sentence, why it ended."""

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 10
_LONGEST = 300


class Blame(enum.IntEnum):
    """How likely something is the cause of all that happened with it: the lower, the likelier."""

    KILLED_OR_SILENT = 0
    """From outside: nothing that happened to another role explains it."""
    ITSELF = 1
    """It ended, or was late, by what it did itself."""
    LOST_SOMETHING = 2
    """It said that something it needs was lost, so whatever was lost is to blame."""
    ENDED_BY_OTHERS = 3
    """Whoever watches it ended it because of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Something that ends the run.

    `words` go on after the role's name. `when` is on the monotonic clock. `hangs` says that asking it to end is useless.
    """

    role: str
    words: str
    blame: Blame
    when: float
    exit_code: int = ResourceError.exit_code
    speaks: bool = False
    """Whether its log ends with its own sentence, which is then all that is to be said."""
    hangs: bool = False


def ended(role: str, code: int, when: float, blame: Blame | None = None) -> Loss:
    """The loss of a role that has ended with `code`, negative for the signal that ended it."""
    if blame is None:
        blame = (
            Blame.LOST_SOMETHING if code == ResourceError.exit_code else Blame.ITSELF if code >= 0 else Blame.KILLED_OR_SILENT
        )
    words = "ended with exit code 0 while the run needed it" if code == 0 else ending_words(code)
    own = code in OWN_CODES
    return Loss(
        role=role,
        words=words,
        blame=blame,
        when=when,
        exit_code=code if own else ResourceError.exit_code,
        speaks=own,
    )


def root_cause(losses: Iterable[Loss]) -> Loss:
    """The one that the others follow from: by blame, then by time."""
    return min(losses, key=lambda loss: (loss.blame, loss.when))


def report(loss: Loss, logs: Path) -> list[str]:
    """What to print: a sentence, and what the role wrote last."""
    log = logs / f"{loss.role}.log"
    lines = last_lines(log, _TAIL_LINES)
    said = [line for line in last_lines(log, 10 * _TAIL_LINES) if line.startswith(ERROR)] if loss.speaks else []
    if said:
        return [*dict.fromkeys(said), f"polyturn: {loss.role} ended the run; its log: {log}"]
    head = f"{ERROR}{loss.role} {loss.words}; the run ends; its log: {log}"
    return [head, *(f"  {line}" for line in lines)] if lines else [head, "  (it wrote nothing)"]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file that are not blank, each cut to a length and free of control characters."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.split("\n")
    if size > _TAIL_BYTES:
        lines[0] = f"...{lines[0]}"
    shown = ("".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines)
    return [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..." for line in shown if line.strip()][-count:]
