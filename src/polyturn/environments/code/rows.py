"""Rows of HumanEval and MBPP, told by their fields, and rows of the built-in formats, as problems.

HumanEval   prompt, entry_point, test, canonical_solution
MBPP        prompt or text, code, test_list, and test_imports or test_setup_code, challenge_test_list
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.environments.code.problems import Problem
from polyturn.errors import DataError
from polyturn.programs import OutputCase, entry_points, parsed, program_in, row_tests, syntax_problem
from polyturn.sandbox import suites
from polyturn.types import Message, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRow:
    """A row: its opening messages, the reference program where it has one, and the problem."""

    messages: tuple[Message, ...]
    reference: str | None
    problem: Problem


def is_humaneval(fields: Mapping[str, Any]) -> bool:
    """Whether a row is one of HumanEval, or made like one."""
    return {"prompt", "entry_point", "test"} <= set(fields)


def is_mbpp(fields: Mapping[str, Any]) -> bool:
    """Whether a row is one of MBPP, whole or sanitized, or made like one."""
    return {"code", "test_list"} <= set(fields) and bool({"prompt", "text"} & set(fields))


def humaneval(fields: Mapping[str, Any]) -> CodeRow:
    """A HumanEval row. Where its `check` is nothing but assertions, each is a case of its own; else `check` is the only one.

    Raises:
        DataError: a field that is missing or no text, or code that is no Python.
    """
    for name in ("prompt", "entry_point", "test", "canonical_solution"):
        _text(fields, name)
    prompt, entry_point = fields["prompt"], fields["entry_point"]
    row = {"task_id": fields.get("task_id", entry_point), **fields}
    program, tests = suites.humaneval(row)
    preamble = _without(prompt + "    pass\n", entry_point)
    setup, cases = _assertions(fields["test"], entry_point)
    if cases:
        helpers = tests.setup[: len(tests.setup) - len(fields["test"])]
        setup = f"{helpers}\n{setup}"
    problem = Problem(
        cases=tuple(cases) or tests.cases,
        most_public=len(cases),
        setup=setup if cases else tests.setup,
        names=tests.entry_points,
        classes=tests.classes,
        preamble=preamble,
        stub=prompt,
    )
    question = f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```"
    return CodeRow(messages=(Message(role="user", content=question),), reference=program.source, problem=problem)


def mbpp(fields: Mapping[str, Any]) -> CodeRow:
    """An MBPP row; `challenge_test_list` comes last. The question names the function as the reference does.

    Raises:
        DataError: a field that is missing or no text, or tests that use nothing the reference defines.
    """
    _text(fields, "code")
    question = _text(fields, "prompt" if fields.get("prompt") else "text")
    tests = [*_texts(fields, "test_list"), *_texts(fields, "challenge_test_list")]
    if not tests:
        raise DataError("field 'test_list' is empty; an MBPP row needs tests")
    imports = [*_texts(fields, "test_imports"), *([fields["test_setup_code"]] if fields.get("test_setup_code") else [])]
    row = {"task_id": fields.get("task_id", "?"), "code": fields["code"], "test_list": tests, "test_imports": imports}
    program, made = suites.mbpp(row)
    problem = Problem(
        cases=made.cases,
        most_public=len(made.cases),
        setup=made.setup,
        names=made.entry_points,
        classes=made.classes,
    )
    asked = naming(question.strip(), program.source, made.entry_points or ())
    return CodeRow(messages=(Message(role="user", content=asked),), reference=program.source, problem=problem)


def built_in(row: Row) -> CodeRow:
    """A row of a built-in format with `tests`, `test_cases`, or both. Raises DataError where it has none, or no usable ones."""
    cases = row_tests(row.tests, row.test_cases)
    if not cases:
        raise DataError("the row has neither 'tests' nor 'test_cases'; python_code scores programs by them")
    for index, test in enumerate(row.tests):
        if (wrong := syntax_problem(test)) is not None:
            raise DataError(f"tests[{index}] is not valid Python: {wrong}")
    reference = program_in(row.answer).code if row.answer else None
    found = entry_points(reference, row.tests) if reference else None
    messages = row.messages
    if reference and found:
        last = messages[-1]
        asked = naming(last.content, reference, found.names)
        messages = (*messages[:-1], Message(role=last.role, content=asked))
    problem = Problem(
        cases=tuple(cases),
        most_public=len(cases),
        names=None if found is None else found.names,
        classes=None if found is None else found.classes,
    )
    return CodeRow(messages=messages, reference=reference or None, problem=problem)


def naming(question: str, reference: str, names: Sequence[str]) -> str:
    r"""The question with the names that tests will use and it doesn't say, with parameters as the reference has them.

    >>> naming("Write a function that adds.", "def add(a, b): return a + b", ["add"])
    'Write a function that adds.\n\nThe program must define `add(a, b)`.'
    """
    unsaid = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", question)]
    if not unsaid:
        return question
    heads = {head.partition("(")[0].removeprefix("class "): head for head in _heads(reference)}
    shown = ", ".join(f"`{heads.get(name, name)}`" for name in unsaid)
    return f"{question}\n\nThe program must define {shown}."


def shown_case(case: str | OutputCase) -> str:
    """A case in a line or more, as the model sees it."""
    return case if isinstance(case, str) else f"for the input {case.stdin!r} it prints {case.stdout!r}"


def _heads(code: str) -> list[str]:
    heads = []
    for node in _tree(code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            heads.append(f"{node.name}({ast.unparse(node.args)})")
        elif isinstance(node, ast.ClassDef):
            heads.append(f"class {node.name}")
    return heads


def _assertions(test: str, entry_point: str) -> tuple[str, list[str]]:
    """What a HumanEval test defines besides `check`, and the assertions in it as cases; no cases where it does anything else.

    An assertion that does not ask the program anything (`assert True`) is left out: it would be a test passed for nothing.
    """
    tree = _tree(test)
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        return test, []
    candidate, cases = checks[0].args.args[0].arg, []
    for node in checks[0].body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if not isinstance(node, ast.Assert):
            return test, []
        asked = [name for name in ast.walk(node) if isinstance(name, ast.Name) and name.id == candidate]
        for name in asked:
            name.id = entry_point
        if asked:
            cases.append(ast.unparse(node))
    rest = [node for node in tree.body if node is not checks[0]]
    return "\n".join(ast.unparse(node) for node in rest), cases


def _without(source: str, name: str) -> str:
    return "\n\n".join(ast.unparse(node) for node in _tree(source).body if getattr(node, "name", None) != name)


def _tree(source: str) -> ast.Module:
    tree = parsed(source)
    if tree is None:
        raise DataError(f"{syntax_problem(source)}; correct the row's code or leave the row out")
    return tree


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        found = "missing" if value is None else "empty" if isinstance(value, str) else f"a {type(value).__name__}"
        raise DataError(f"field {name!r} is {found}; the row needs text there")
    return value


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"field {name!r} must be a list of texts")
    return [item for item in value if item.strip()]
