"""The contract as JSON, for a runner on another machine; docs/sandbox.md describes it for whoever writes one.

Bytes travel as base64. A field that is missing has its default, one that nobody knows is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias, TypeVar

from polyturn.errors import DataError, UserError, nearest
from polyturn.sandbox.base import CaseOutcome, Limits, Line, OutputCase, Program, RunResult, Tests, TestsResult

Document: TypeAlias = dict[str, Any]
T = TypeVar("T")

RUN, TESTS, ISOLATION = "/v1/run", "/v1/tests", "/v1/isolation"
MOST_BYTES = 64 << 20
"""Of one request or answer."""


def from_program(program: Program) -> Document:
    """A program as JSON."""
    files = {name: base64.b64encode(data).decode() for name, data in program.files.items()}
    return {"source": program.source, "stdin": program.stdin, "files": files}


def to_program(document: object) -> Program:
    """A program from JSON. Raises DataError naming what is wrong."""
    found = dict(_object(document, "program"))
    files = _object(found.pop("files", {}), "program.files")
    try:
        decoded = {name: base64.b64decode(data, validate=True) for name, data in files.items()}
    except (TypeError, ValueError, binascii.Error) as error:
        raise DataError(f"program.files: {error}; a file is a string of base64") from None
    return _build(Program, {**found, "files": decoded}, "program", text=("source", "stdin"))


def from_tests(tests: Tests) -> Document:
    """Tests as JSON: a case is a string, or an object with `stdin` and `stdout`."""
    cases = [case if isinstance(case, str) else asdict(case) for case in tests.cases]
    names = None if tests.entry_points is None else list(tests.entry_points)
    classes = None if tests.classes is None else list(tests.classes)
    given = {"setup": tests.setup, "module": tests.module, "case_s": tests.case_s}
    return {"cases": cases, "entry_points": names, "classes": classes, **given}


def to_tests(document: object) -> Tests:
    """Tests from JSON. Raises DataError naming what is wrong."""
    found = dict(_object(document, "tests"))
    cases = tuple(
        case
        if isinstance(case, str)
        else _build(OutputCase, _object(case, "tests.cases"), "tests.cases", text=("stdin", "stdout"))
        for case in _list(found.pop("cases", None), "tests.cases")
    )
    for field in ("entry_points", "classes"):
        if found.get(field) is not None:
            found[field] = tuple(map(str, _list(found[field], f"tests.{field}")))
    return _build(Tests, {**found, "cases": cases}, "tests", text=("setup", "module"))


def from_limits(limits: Limits | None) -> Document | None:
    """Limits as JSON; null leaves them to the runner."""
    return None if limits is None else asdict(limits)


def to_limits(document: object) -> Limits | None:
    """Limits from JSON. Raises UserError naming what is wrong."""
    return None if document is None else _build(Limits, _object(document, "limits"), "limits")


def to_result(document: object) -> RunResult:
    """A result from JSON. Raises DataError when it is none."""
    return _build(RunResult, _object(document, "result"), "result")


def from_verdict(verdict: TestsResult) -> Document:
    """A verdict as JSON."""
    return asdict(verdict)


def to_verdict(document: object) -> TestsResult:
    """A verdict from JSON. Raises DataError when it is none."""
    found = dict(_object(document, "verdict"))
    outcomes = tuple(
        _build(CaseOutcome, _object(one, "verdict.outcomes"), "verdict.outcomes")
        for one in _list(found.pop("outcomes", None), "verdict.outcomes")
    )
    return _build(TestsResult, {**found, "outcomes": outcomes}, "verdict")


def to_lines(document: object) -> tuple[Line, ...]:
    """Lines of defence from JSON. Raises DataError when they are none."""
    return tuple(_build(Line, _object(one, "isolation"), "isolation") for one in _list(document, "isolation"))


def _build(kind: type[T], values: Mapping[str, Any], where: str, *, text: tuple[str, ...] = ()) -> T:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise DataError(f"{where}: unknown field {name!r}; {nearest(str(name), known)}")
    for name in text:
        if name in values and not isinstance(values[name], str):
            raise DataError(f"{where}.{name} is a {type(values[name]).__name__}; it must be a string")
    try:
        return kind(**values)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}") from None


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}; it must be an object")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} is a {type(value).__name__}; it must be a list")
    return value
