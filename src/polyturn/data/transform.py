"""The user's own function between file and format: row in, row out, or None to drop it."""

from __future__ import annotations

import copy
import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyturn.config.dotted import load_dotted
from polyturn.errors import ConfigError, DataError


class Transform:
    """`data.transform`, loaded. Raises ConfigError for a path that names no function."""

    def __init__(self, path: str) -> None:
        self.path = path
        head, _, tail = path.rpartition(".")
        function: Any = load_dotted(path if ":" in path or not head else f"{head}:{tail}")
        if not callable(function):
            raise ConfigError(f"data.transform={path} is no function; name one that takes a row and returns a row or None")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"data.transform={path} is a coroutine function; write it with def")
        self._function: Callable[[dict[str, Any]], Any] = function

    @property
    def key(self) -> str:
        """Changes when the path or the source file of the function does."""
        try:
            source = Path(inspect.getfile(inspect.unwrap(self._function))).read_bytes()
        except (TypeError, OSError):
            source = b""
        return f"{self.path}@{hashlib.sha256(source).hexdigest()[:16]}"

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row that the function makes of `row`, which it may change, or None to drop it.

        Raises:
            DataError: the function raised, or returned something else.
        """
        try:
            result = self._function(copy.deepcopy(dict(row)))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            raise DataError(f"data.transform {self.path} raised {type(error).__name__} at {place}: {error}") from error
        if result is None:
            return None
        if not isinstance(result, Mapping) or not all(isinstance(key, str) for key in result):
            raise DataError(
                f"data.transform {self.path} returned {result!r:.60}; a row (a dict with names as keys) or None is needed"
            )
        return dict(result)
