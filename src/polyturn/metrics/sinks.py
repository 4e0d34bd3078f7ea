"""Where a step's numbers go: a file with all of them, one stable line on stdout, a progress bar on a terminal."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from polyturn.errors import ResourceError
from polyturn.metrics.names import STABLE_LINE

if TYPE_CHECKING:
    from rich.progress import Progress

Values: TypeAlias = "Mapping[str, float | None]"

_EVAL = ("eval/", "eval_greedy/")
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes metrics step by step: those of a step at once, those of an evaluation at that step in a call of their own."""

    def write(self, step: int, values: Values) -> None:
        """Take the metrics of `step`. Raises ResourceError when they can't be kept."""

    def close(self) -> None:
        """Finish. Safe to call twice."""


class MetricsLog:
    """Hands every step to all sinks. Also a context manager, which closes them."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._closed = False

    def write(self, step: int, values: Values) -> None:
        """Write a step to every sink. Raises ResourceError when one can't keep it."""
        if self._closed:
            raise ValueError(f"the metrics of step {step} came after the log was closed")
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close every sink, also when one fails, whose error is raised at the end. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonlSink:
    """Appends one JSON object a call to a file. A number that is nan or infinite becomes null, which every reader takes."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ResourceError(
                f"{self._path}: can't be opened for metrics ({error.strerror}); free the place and resume"
            ) from error

    def write(self, step: int, values: Values) -> None:
        """Append one line and flush it. Raises ResourceError when the disk refuses."""
        line = json.dumps({"step": step} | {name: _number(name, value) for name, value in values.items() if name != "step"})
        with self._saying("written"):
            self._file.write(f"{line}\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises ResourceError when the disk refuses what is left."""
        with self._saying("written"):
            self._file.close()

    @contextmanager
    def _saying(self, action: str) -> Iterator[None]:
        """Turn the disk's refusal into a sentence."""
        try:
            yield
        except OSError as error:
            raise ResourceError(f"{self._path}: can't be {action} ({error.strerror}); make room and start again") from error


class ConsoleSink:
    """Prints exactly one line a step that a script can read, `step=12 reward=0.41 loss=...`, and one for an evaluation.

    A number that a step has no value for is `nan`. An evaluation's line starts with `eval step=`.
    """

    def __init__(self) -> None:
        self._broken = False

    def write(self, step: int, values: Values) -> None:
        """Print the lines of a step."""
        if any(name in values for name in STABLE_LINE if name != "step"):
            stable = {name: step if name == "step" else values.get(name) for name in STABLE_LINE}
            self._print(" ".join(f"{name}={four_digits(value)}" for name, value in stable.items()))
        for family in _EVAL:
            found = {name.removeprefix(family): value for name, value in values.items() if name.startswith(family)}
            if found:
                words = " ".join(f"{name}={four_digits(value)}" for name, value in sorted(found.items(), key=_success_first))
                self._print(f"{family[:-1]} step={step} {words}")

    def close(self) -> None:
        """Nothing to close: stdout belongs to the process."""

    def _print(self, line: str) -> None:
        if self._broken:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self._broken = True  # its reader has left, which is no reason to stop a run
            _log.warning("nobody reads stdout any more; metrics go to the run folder only")


class ProgressSink:
    """A progress bar on stderr, where that is a terminal; nothing elsewhere."""

    def __init__(self, num_steps: int) -> None:
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = _progress_bar()
            self._task = self._progress.add_task("training", total=num_steps, shown="")
            self._progress.start()

    def write(self, step: int, values: Values) -> None:
        """Move the bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
            shown = "  ".join(f"{name} {four_digits(values[name])}" for name in ("reward", "success") if name in values)
            if shown:
                self._progress.update(self._task, shown=shown)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def four_digits(value: float | None) -> str:
    """A number with four significant digits and no exponent where none is needed; `nan` for None.

    >>> [four_digits(number) for number in (0.123456, 123456.0, 12, None, 1e-6)]
    ['0.1235', '123500', '12', 'nan', '1e-06']
    """
    if value is None:
        return "nan"
    if isinstance(value, int):
        return str(int(value))
    number = float(value)
    if math.isfinite(number) and 1000 <= abs(number) < 1e15:
        return f"{float(f'{number:.3e}'):.0f}"
    return f"{number:.4g}"


def _number(name: str, value: object) -> float | int | None:
    """What JSON has for a metric. Raises TypeError for what is no number: a bug of the caller's."""
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"metric {name} is a {type(value).__name__}, not a number")


def _success_first(item: tuple[str, float | None]) -> tuple[bool, str]:
    return item[0] != "success", item[0]


def _progress_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", "{task.fields[shown]}")
    return Progress(
        TextColumn(columns[0]),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn(columns[1]),
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # on a terminal lines go above the bar; a file or pipe gets them untouched
    )
