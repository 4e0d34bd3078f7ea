"""A programming problem as an environment keeps it in `Task.info`: its tests, and how code in a reply becomes a program."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.errors import DataError
from polyturn.programs import OutputCase, defines, parsed, syntax_problem
from polyturn.sandbox.base import Tests
from polyturn.types import Json, Task

_FIELDS = ("cases", "most_public", "setup", "names", "classes", "preamble", "stub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The tests of a problem and how code in a reply becomes a program.

    `names` are what the tests take from the program, `classes` those of them that are classes; None where only the tests can
    tell. `preamble` (imports, helpers) goes before every program, `stub` is a beginning that a reply may continue.
    """

    cases: tuple[str | OutputCase, ...]
    most_public: int
    """How many of the first cases may be shown to the model; the others would give away more than one test."""
    setup: str = ""
    names: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    preamble: str = ""
    stub: str = ""

    def info(self) -> dict[str, Json]:
        """As `Task.info` holds it."""
        cases: list[Json] = [
            case if isinstance(case, str) else {"input": case.stdin, "output": case.stdout} for case in self.cases
        ]
        return {
            "cases": cases,
            "most_public": self.most_public,
            "setup": self.setup,
            "names": None if self.names is None else list(self.names),
            "classes": None if self.classes is None else list(self.classes),
            "preamble": self.preamble,
            "stub": self.stub,
        }

    @classmethod
    def of(cls, task: Task) -> Problem:
        """The problem of a task. Raises DataError for a task that another environment made."""
        info: Mapping[str, Any] = task.info
        missing = [name for name in _FIELDS if name not in info]
        if missing:
            raise DataError(f"task {task.id} has no info field {missing[0]!r}; python_code plays tasks that it made itself")
        cases = tuple(
            case if isinstance(case, str) else OutputCase(stdin=case["input"], stdout=case["output"]) for case in info["cases"]
        )
        return cls(
            cases=cases,
            most_public=info["most_public"],
            setup=info["setup"],
            names=_names(info["names"]),
            classes=_names(info["classes"]),
            preamble=info["preamble"],
            stub=info["stub"],
        )

    def tests(self, count: int | None = None) -> Tests:
        """The first `count` cases, or all."""
        return Tests(cases=self.cases[:count], setup=self.setup, entry_points=self.names, classes=self.classes)

    def defined_by(self, code: str) -> bool:
        """Whether `code` defines what the tests ask for; False where that isn't known."""
        return bool(self.names) and defines(code, self.names or ())

    def program(self, code: str) -> Source:
        """What runs for the code of a reply: behind the preamble, or, where it only continues the stub, behind that."""
        if not self.stub or self.defined_by(code):
            if not self.preamble or "from __future__" in code:
                return Source(text=code)
            return Source(text=f"{self.preamble}\n{code}", shift=self.preamble.count("\n") + 1)
        body = code if code[:1].isspace() else textwrap.indent(code, "    ") if _returns(code) else None
        if body is not None:
            whole = f"{self.stub.rstrip()}\n{body}"
            if syntax_problem(whole) is None:
                return Source(text=whole)
        return Source(text=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A program to run; the model's own first line is line `shift` + 1."""

    text: str
    shift: int = 0


def _names(value: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


def _returns(code: str) -> bool:
    """Whether code has a `return` outside of any function, as the body of one has."""
    tree = parsed(code)
    ahead: list[ast.AST] = [tree] if tree else []
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Return):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead.extend(ast.iter_child_nodes(node))
    return False
