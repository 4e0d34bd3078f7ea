"""The list of what GPUs are asked: a mistake in it is found where there is none of them to lose time on."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from parts.runs import ROOT

SCRIPT = ROOT / "benchmarks" / "on_gpus.sh"
PARTS = dict(re.findall(r"^([a-z]\w+) +\d+  (.+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
PYTHON = """#!/usr/bin/env bash
printf '<%s>' "$@"
[[ "$*" != *trainer_profile* ]]
"""


@pytest.fixture
def called(tmp_path: Path):
    """`called(WORDS)` runs the script with a python3 that only says what it was told, and fails as a profile."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)

    return call


def test_without_a_part_it_lists_them(called):
    ended = called()
    assert ended.returncode == 2
    assert [line.split()[0] for line in ended.stdout.splitlines()] == list(PARTS)


def test_every_part_is_called_and_one_that_fails_leaves_the_others_alone(called, tmp_path):
    out = tmp_path / "out"
    called(str(out), *PARTS, "unknown")
    said = (out / "done").read_text().splitlines()
    assert [re.sub(r" after \d+ s$", "", line) for line in said] == [
        *(f"{part}: exit code {int(part == 'profile')}" for part in PARTS),
        "no part unknown",
    ]
    assert f"<--out><{out}/engines_server_lora.json>" in (out / "server_lora.log").read_text()
    assert "<tests/gpu/test_shards_gpu.py::test_shared_beginnings_in_the_kernel>" in (out / "prefix_tests.log").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_scripts_cases_and_options_are_there(called, tmp_path, part):
    called(str(tmp_path / "out"), part)
    words = re.findall(r"<([^>]*)>", (tmp_path / "out" / f"{part}.log").read_text())
    script = next(word for word in words if word.startswith(("benchmarks/", "tests/")))
    text = (ROOT / script.partition("::")[0]).read_text(encoding="utf-8")
    if script.startswith("benchmarks/"):
        after = words[words.index(script) + 1 :]
        known = text + (ROOT / "benchmarks" / "cases.py").read_text(encoding="utf-8")
        assert [word for word in after if word.startswith("--") and f'"{word}"' not in known] == []
        cases = after[after.index("--cases") + 1 :] if "--cases" in after else []
        assert [case for case in cases if f'"{case}"' not in text and part != "planner_float32"] == []
    else:
        for file, _, test in (word.partition("::") for word in words if word.startswith("tests/")):
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")
