"""docs/sandbox.md: its example runs, its documents are understood, its tables are whole, its numbers are the measured ones."""

from __future__ import annotations

import ast
import inspect
import json
import re
import types
import typing
from pathlib import Path

import pytest

from parts.forgers import FORGERS
from polyturn.sandbox import base, protocol
from polyturn.sandbox.base import MIB, Limits
from polyturn.sandbox.proxies import MOST_ITEMS
from polyturn.sandbox.wire import MOST_BYTES, MOST_DEPTH

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8")
ADR = (ROOT / "docs" / "adr" / "0004-verdicts-the-candidate-cannot-reach.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


async def test_the_example_runs_and_gives_what_it_says(capsys):
    (source,) = blocks("python")
    names: dict[str, object] = {}
    checked = 0
    for node in ast.parse(source).body:
        module = ast.Module([node], [])
        said = re.search(r"# (\(.*\))$", source.splitlines()[node.lineno - 1])
        if isinstance(node, ast.Expr) and said:
            value = eval(compile(ast.Expression(node.value), "page", "eval"), names)
            assert value == ast.literal_eval(said[1])
            checked += 1
        else:
            code = compile(module, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = types.FunctionType(code, names)()
            if inspect.iscoroutine(result):
                await result
    assert checked == 2
    assert "no network" in capsys.readouterr().out


def test_the_documents_are_understood():
    asked, answered = map(json.loads, blocks("json"))
    assert protocol.to_program(asked["program"]).files == {"data/x.bin": b"\x00\x01"}
    assert protocol.to_limits(asked["limits"]) == Limits(wall_s=5, memory_bytes=256 * MIB)
    assert protocol.to_tests(asked["tests"]).total == 2
    assert protocol.to_result(answered["result"]).ok
    assert protocol.to_verdict(answered["verdict"]).passed == 1
    assert f"At most {protocol.MOST_BYTES >> 20} MiB" in PAGE
    for path in (protocol.RUN, protocol.TESTS, protocol.ISOLATION):
        assert path in PAGE


@pytest.mark.parametrize("word", [*typing.get_args(base.ExitReason), "not_run", "passed", "failed"])
def test_every_ending_is_explained(word):
    assert f"`{word}`" in PAGE


def test_the_numbers_are_those_of_the_code():
    limits = Limits()
    for name in Limits.__slots__:
        value = getattr(limits, name)
        shown = f"{value >> 20} MiB" if name in ("memory_bytes", "output_bytes", "file_bytes") else f"{value:g}"
        assert re.search(rf"`{name}` {shown}\b", PAGE), name
    assert f"at most {MOST_ITEMS:,}" in PAGE
    assert f"One value may have {MOST_BYTES >> 20} MiB, and {MOST_DEPTH} levels" in PAGE.replace("\n", " ")
    assert len(FORGERS) >= 60, "the ADR says so"
    assert "sixty more" in ADR


def test_the_numbers_are_the_measured_ones():
    found = json.loads((ROOT / "benchmarks" / "results" / "sandbox_rate.json").read_text())["namespaces"]
    sets = found["references"]
    assert (sets["humaneval.jsonl"]["passed"], sets["mbpp_sanitized.jsonl"]["passed"]) == (164, 427)
    text = " ".join(PAGE.split())
    assert f"{found['run']['per_second']:.0f} short programs a second ({found['run']['cpu_ms']:.0f} ms of processor" in text
    assert f"{found['run_tests']['per_second']:.0f} verdicts a second" in text
    assert f"references in {sets['humaneval.jsonl']['seconds']:.1f} s" in text
    assert f"of MBPP in {sets['mbpp_sanitized.jsonl']['seconds']:.1f} s" in text
