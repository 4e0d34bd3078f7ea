"""`polyturn launch local`, `polyturn train` with several processes, and `polyturn role`."""

from __future__ import annotations

import argparse
import json

import pytest

from parts.runs import run_python
from polyturn.cli import role, train
from polyturn.errors import ConfigError
from polyturn.metrics.run_folder import RunFolder

MANY = ("engine.kind=hf_server", "engine.num_servers=2", "trainer.num_ranks=2", "environment.num_processes=1")


@pytest.mark.parametrize("verb", [["train"], ["launch", "local"]])
def test_a_dry_run_prints_the_plan_and_starts_nothing(bench, verb, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ended = bench.raw(*verb, str(bench.recipe), f"run.output_dir={bench.runs}", *MANY, "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    plan = [line for line in ended.out.splitlines() if "POLYTURN_RUN_TOKEN=(set)" in line]
    assert [line.split(":")[0] for line in plan] == [
        "environment-0",
        "engine-0",
        "engine-1",
        "trainer-agent (trainer-0 to trainer-1)",
    ]
    assert [line.split("CUDA_VISIBLE_DEVICES=")[1].split()[0] for line in plan] == ["''", "6", "7", "4,5"]
    assert [path.name for path in bench.runs.iterdir()] == ["short.resolved.yaml"]


@pytest.mark.parametrize(
    ("verb", "words", "kept"),
    [
        ("train", [], False),
        ("train", ["engine.kind=hf_server"], True),
        ("train", ["trainer.num_ranks=2"], True),
        ("train", ["environment.num_processes=1"], True),
        ("launch local", [], True),
    ],
)
def test_who_runs_in_one_process(bench, monkeypatch, verb, words, kept):
    asked = []
    monkeypatch.setattr("polyturn.processes.keeper.keep", lambda: asked.append("keeper") or 7)
    monkeypatch.setattr(train, "_train", lambda checked, resume, load: asked.append("in process") or 0)
    ended = bench.raw(*verb.split(), str(bench.recipe), f"run.output_dir={bench.runs}", *words)
    assert asked == (["keeper"] if kept else ["in process"])
    assert ended.code == (7 if kept else 0), "the keeper's code is the command's"


def test_a_refusal_is_a_sentence_before_there_is_a_folder(bench):
    ended = bench.process("train", "trainer.num_ranks=2", "trainer.device=cuda:1")
    assert ended.code == 2
    assert ended.err.startswith("polyturn: error: trainer.device=cuda:1 names one GPU of a single process")
    assert ended.err.count("\n") == 1
    assert not bench.runs.exists()


def test_what_is_started_is_what_was_checked(bench, monkeypatch):
    """Everything up to the first process: the folder, the resolved recipe in it, the roles that read it."""
    started = []
    monkeypatch.setattr("polyturn.processes.keeper.keep", lambda: None)
    monkeypatch.setattr("polyturn.launch.local.run_roles", lambda *given: started.append(given) or 0)
    words = (*MANY, "launch.stop_grace_s=3", "trainer.step_deadline_s=100", "checkpoint.deadline_s=10", "trainer.device=cpu")
    ended = bench.raw("launch", "local", str(bench.recipe), f"run.output_dir={bench.runs}", *words)
    assert (ended.code, ended.err) == (0, "")
    ((specs, folder, patience),) = started
    assert folder == RunFolder(bench.runs / "short")
    assert {spec.argv[-1] for spec in specs} == {str(folder.recipe)}
    assert "num_servers: 2" in folder.recipe.read_text()
    assert (patience.stop_grace_s, patience.save_s, patience.silence_s) == (3.0, 113.0, 60.0)
    assert ended.out.splitlines()[-1] == f"run folder: {folder.root}"


def test_nothing_with_threads_is_loaded_before_the_fork(bench):
    """A fork copies the forking thread only; a lock that another one held would stay locked for ever."""
    code = "import os, sys, polyturn.processes.keeper as keeper\n"
    code += "keeper.keep = lambda: print(len(os.listdir('/proc/self/task'))) or 0\n"
    code += "from polyturn.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    assert run_python(code, "launch", "local", str(bench.recipe)).out == "1\n"


# ── role ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


ROLE = """
import json, os, sys, types
roles = types.ModuleType("polyturn.loop.roles")
def run_role(role, recipe):
    print("hello")
    found = [role.name, str(role.folder), role.token, recipe.run.steps, "torch" in sys.modules]
    found += [os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")]
    print(json.dumps(found))
    return 5
roles.run_role = run_role
sys.modules["polyturn.loop.roles"] = roles
from polyturn.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
AGENTS = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"}


@pytest.mark.parametrize(
    ("name", "variables", "becomes", "gpus"),
    [
        ("engine-0", {"RANK": "3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"}, "engine-0", ["4,5", "1"]),
        ("trainer-agent", AGENTS, "trainer-agent", ["4,5", "1"]),
        ("trainer-1", AGENTS, "trainer-3", ["5", "0"]),
    ],
)
def test_a_role_takes_its_place(bench, name, variables, becomes, gpus):
    folder = RunFolder.create(bench.runs, "run")
    place = {"POLYTURN_RUN_FOLDER": str(folder.root), "POLYTURN_RUN_TOKEN": "secret"}
    ended = run_python(ROLE, "role", name, "--config", str(bench.recipe), **place, **variables)
    assert (ended.code, ended.err) == (5, "")
    log = folder.logs / f"{becomes}.log"
    out = log.read_text() if becomes == "trainer-3" else ended.out
    assert log.exists() == (becomes == "trainer-3"), "a rank writes its own log, the others' starter does it"
    assert out.splitlines()[0] == "hello"
    assert json.loads(out.splitlines()[1]) == [becomes, str(folder.root), "secret", 2, False, *gpus]


@pytest.mark.parametrize("name", ["boss", "engine", "engine-x", "trainer-agent-0"])
def test_what_is_no_role_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTURN_RUN_FOLDER", str(tmp_path))
    with pytest.raises(ConfigError, match="is no role"):
        role.run(argparse.Namespace(name=name, config="x"))
