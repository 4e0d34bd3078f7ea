"""Rules of the house that no linter checks: torch stays out of the light rooms, every test runs, nothing grows too big."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "transformers", "vllm")
MOST_LINES, MOST_FUNCTION_LINES = 500, 80

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for room in json.loads(sys.argv[1]):
    module = importlib.import_module(room)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{room}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted(sys.modules)))
"""


def light_rooms() -> list[str]:
    """The rooms that the import contract keeps free of torch, and the command line."""
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (contract,) = [found for found in contracts if found["type"] == "forbidden" and "torch" in found["forbidden_modules"]]
    return [*contract["source_modules"], "polyturn.cli"]


def test_light_rooms_do_not_load_torch():
    rooms = light_rooms()
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(rooms)], capture_output=True, text=True, cwd=ROOT / "src", timeout=120
    )
    assert run.returncode == 0, run.stderr
    loaded = json.loads(run.stdout.splitlines()[-1])
    assert {"polyturn.config.load", "polyturn.metrics.sinks", "polyturn.processes.tasks"} <= set(loaded)
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []


def test_the_contract_lists_the_rooms_the_design_promises():
    promised = [
        "types",
        "errors",
        "processes",
        "config",
        "metrics",
        "sandbox",
        "data",
        "environments",
        "rendering",
        "rollouts",
        "trajectories",
        "advantages",
        "plan",
        "storage",
        "convert",
    ]
    assert {f"polyturn.{room}" for room in promised} <= set(light_rooms())


def python_files_of_tests() -> list[Path]:
    return sorted(path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", python_files_of_tests(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_with_tests_is_collected(path, pytestconfig):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    has_tests = any(isinstance(node, functions) and node.name.startswith("test_") for node in ast.walk(tree))
    if not has_tests:
        assert not path.name.startswith("test_"), "a test file without a test"
        return
    patterns = pytestconfig.getini("python_files")
    assert any(path.match(pattern) for pattern in patterns), f"pytest looks at {patterns} only"
    skipped = pytestconfig.getini("norecursedirs")
    folders = path.relative_to(ROOT).parts[:-1]
    assert not [part for part in folders for pattern in skipped if Path(part).match(pattern)], f"pytest never enters {skipped}"
    assert folders[0] in pytestconfig.getini("testpaths")


def test_nothing_turns_tests_off_wholesale():
    for path in [*python_files_of_tests(), ROOT / "pyproject.toml"]:
        if path != Path(__file__):
            assert "collect_ignore" not in path.read_text(encoding="utf-8"), path


def test_one_of_the_make_targets_runs_every_marker():
    markers = [line.split(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    assert sorted(markers) == ["gpu", "real", "vllm"], "a new marker needs a make target that runs it"


def definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_sizes(path):
    text = path.read_text(encoding="utf-8")
    if "# size: " in text:
        return
    assert text.count("\n") <= MOST_LINES, "split the module, or say why not in a comment '# size: why'"
    for function in definitions(ast.parse(text)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= MOST_FUNCTION_LINES, f"{function.name}: split it, or say why not in a comment '# size: why'"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_whatever_is_public_has_a_docstring(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = [] if ast.get_docstring(tree) else ["the module"]
    holders: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for holder in holders:
        if isinstance(holder, ast.ClassDef) and holder.name.startswith("_"):
            continue
        for node in holder.body:
            setter = any(ast.unparse(found).endswith(".setter") for found in getattr(node, "decorator_list", []))
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not setter
                and not ast.get_docstring(node)
            ):
                bare.append(node.name)
    assert bare == []


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a make target with little more than a PATH, so that the caller's settings don't leak in."""
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | environment
    return subprocess.run(["make", *arguments], capture_output=True, text=True, cwd=ROOT, env=clean, timeout=PATIENCE_S)


def test_make_lists_its_targets():
    lines = make().stdout.splitlines()
    names = {line.split()[1] for line in lines}
    assert {"venv", "quickstart", "test", "test-real", "check", "format", "docs"} <= names


def test_make_says_in_a_sentence_what_is_missing(tmp_path):
    unset = make("test-real")
    assert unset.returncode != 0
    assert "POLYTURN_DATA is unset; set it to the folder with the test data" in unset.stderr
    gone = make("test-real", POLYTURN_DATA=str(tmp_path / "gone"))
    assert gone.returncode != 0
    assert "is no folder" in gone.stderr
    absent = make("venv", f"VENV={tmp_path}/venv", "PYTHON=python-that-is-not-here")
    assert absent.returncode != 0
    assert "python-that-is-not-here is not installed; install Python 3.10 or newer" in absent.stderr
    old = tmp_path / "old-python"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[2])" "$@"\n')
    old.chmod(0o755)
    refused = make("venv", f"VENV={tmp_path}/venv", f"PYTHON={old}")
    assert refused.returncode != 0
    assert f"{old} is Python 3.9, Polyturn needs 3.10 or newer" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_stops_with_a_sentence_without_data(tmp_path):
    script = tmp_path / "checkout" / ".ci" / "run"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    run = subprocess.run(["bash", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, timeout=PATIENCE_S)
    assert run.returncode == 2
    assert run.stderr == "ci: POLYTURN_DATA is unset and ../shared/data is not there; set it to the folder with the test data\n"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
