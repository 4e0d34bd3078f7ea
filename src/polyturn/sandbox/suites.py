"""Rows of HumanEval and MBPP as programs with tests. What tests need besides the entry point is theirs, not the program's."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from typing import Any

from polyturn.errors import DataError
from polyturn.programs import parse
from polyturn.sandbox.base import Program, Tests


def humaneval(row: Mapping[str, Any], completion: str | None = None) -> tuple[Program, Tests]:
    """A HumanEval row; `completion` continues its prompt, the reference does by default.

    Helpers that the prompt defines before the entry point (`poly`, `encode_cyclic`) go to the tests as the prompt has them: a
    program that redefined its own copy would decide its own verdict. Raises DataError when the prompt is no Python.
    """
    solution = row["canonical_solution"] if completion is None else completion
    entry_point = row["entry_point"]
    helpers = _all_but(row["prompt"] + "    pass\n", entry_point, row["task_id"])
    tests = Tests(setup=f"{helpers}\n{row['test']}", cases=(f"check({entry_point})",), entry_points=(entry_point,), classes=())
    return Program(source=row["prompt"] + solution), tests


def mbpp(row: Mapping[str, Any], solution: str | None = None) -> tuple[Program, Tests]:
    """A row of sanitized MBPP; `solution` is the whole program, the reference by default.

    The entry points are the functions of the reference that the tests use. Raises DataError when there are none.
    """
    used = {name for case in row["test_list"] for name in _names(case, row["task_id"])}
    entry_points = tuple(sorted(_definitions(row["code"], row["task_id"]) & used))
    if not entry_points:
        raise DataError(f"MBPP/{row['task_id']}: no test uses what the reference defines; leave the row out")
    cases = tuple(str(case) for case in row["test_list"])
    imports = [*row["test_imports"], *(f"import {name}" for name in sorted(used & sys.stdlib_module_names))]
    classes = tuple(sorted(_definitions(row["code"], row["task_id"], ast.ClassDef) & used))
    tests = Tests(setup="\n".join(imports), cases=cases, entry_points=entry_points, classes=classes)
    return Program(source=row["code"] if solution is None else solution), tests


def _parse(source: str, row: Any) -> ast.Module:
    try:
        return parse(source)
    except SyntaxError as error:
        raise DataError(f"row {row}: line {error.lineno} is no Python ({error.msg}); correct it or leave the row out") from None


def _all_but(source: str, name: str, row: Any) -> str:
    tree = _parse(source, row)
    kept = [node for node in tree.body if getattr(node, "name", None) != name]
    return "\n\n".join(ast.unparse(node) for node in kept)


def _definitions(source: str, row: Any, kinds: Any = ast.FunctionDef | ast.ClassDef) -> set[str]:
    return {node.name for node in _parse(source, row).body if isinstance(node, kinds)}


def _names(source: str, row: Any) -> set[str]:
    return {node.id for node in ast.walk(_parse(source, row)) if isinstance(node, ast.Name)}
