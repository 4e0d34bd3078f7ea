"""Sets up logging: one line a record on stderr, so that stdout holds metrics only."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

from polyturn.errors import ConfigError, nearest

if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    _TextHandler = logging.StreamHandler  # takes no type argument before Python 3.11

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _StderrHandler(_TextHandler):
    """Writes to whatever `sys.stderr` is at the time, so that lines go above a progress bar and not through it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Stay with `sys.stderr`; the base class wants to set this."""


def set_up_logging(level: str) -> None:
    """Log Polyturn's records of `level` and above to stderr; `LOGLEVEL` in the environment wins. Safe to call again.

    A program that has handlers of its own keeps them and gets the records. Raises ConfigError for an unknown level.
    """
    source = "LOGLEVEL" if os.environ.get("LOGLEVEL") else "run.log_level"
    name = (os.environ.get("LOGLEVEL") or level).lower()
    if name not in _LEVELS:
        raise ConfigError(f"{source}={name!r} is no log level; {nearest(name, _LEVELS)}")
    logger = logging.getLogger("polyturn")
    logger.setLevel(_LEVELS[name])
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _StderrHandler)]
    if not logging.getLogger().handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
