"""The command line itself: help without weight, words in any order, errors as sentences and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parts.runs import child_environment, run_python
from polyturn import __version__
from polyturn.cli import train
from polyturn.cli.main import VERBS, build_parser, main
from polyturn.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    NonFiniteError,
    PolyturnError,
    SampleError,
    TooManyDroppedError,
    WeightMismatchError,
    WeightSyncError,
)

HELP = """
import contextlib, io, json, sys
from polyturn.cli.main import main
shown = {}
for argv in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(argv)
        except SystemExit as stop:
            shown[" ".join(argv)] = [stop.code, out.getvalue()]
print(json.dumps([shown, sorted(sys.modules)]))
"""

HELPS = {
    "--help": ["train", "plan", "launch", "eval", "export", "rollout", "replay", "warmstart", "env", "data", "convert", "role"],
    "train --help": ["RECIPE.yaml", "section.key=value", "--dry-run", "--resume", "--load", "--from"],
    "convert --help": ["FILE", "--recipe"],
    "export --help": ["RUN", "--step", "--out"],
    "checkpoint --help": ["list", "verify", "prune", "copy"],
    "memory-tier --help": ["serve"],
    "plan --help": [
        "RECIPE.yaml",
        "section.key=value",
        "--instance",
        "--gpu",
        "--gpus",
        "--tasks",
        "--hardware",
        "--json",
        "--from",
    ],
    "launch --help": ["local"],
    "launch local --help": ["RECIPE.yaml", "section.key=value", "--dry-run", "--resume", "--load"],
    "role --help": ["NAME", "--config"],
    "eval --help": ["RECIPE.yaml", "--model", "--episodes", "--samples", "--json"],
    "rollout --help": ["RECIPE.yaml", "section.key=value", "--out", "--tasks", "--model"],
    "replay --help": ["RECIPE.yaml", "FILE.jsonl", "section.key=value", "--out", "--model"],
    "warmstart --help": ["--out", "--steps", "--demonstrations", "--learning-rate"],
    "env --help": ["list", "check"],
    "env list --help": ["List built-in environments"],
    "env check --help": ["ID", "key=value", "--data", "--seed"],
    "data --help": ["check", "show", "split", "convert", "new"],
    "data check --help": ["FILE|ID", "--recipe", "--transform", "--run-tests", "--no-cache", "--all", "--json"],
    "data show --help": ["--rows", "--line"],
    "data split --help": ["--val", "--seed"],
    "data convert --help": ["OUT", "--format"],
    "data new --help": ["--format", "--force"],
    "--version": [__version__],
}


def test_help_of_every_verb_imports_nothing_heavy():
    ended = run_python(HELP, json.dumps([words.split() for words in HELPS]))
    assert ended.code == 0, ended.err
    shown, modules = json.loads(ended.out)
    for words, says in HELPS.items():
        code, text = shown[words]
        assert code == 0
        for word in says:
            assert word in text, words
    heavy = {"torch", "transformers", "pydantic", "rich", "numpy", "ruamel", "tokenizers", "jinja2"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in modules)
    assert "polyturn.cli.train" in modules, "the child ran what it was meant to"


def test_help_covers_every_verb():
    actions = next(action for action in build_parser()._actions if action.dest == "verb")
    assert set(actions.choices) == {words.split()[0] for words in HELPS if not words.startswith("-")}
    assert len(actions.choices) == len(VERBS)


# ── words in any order ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "words",
    [
        ["RECIPE", "run.steps=7", "run.seed=3", "--dry-run"],
        ["RECIPE", "--dry-run", "run.steps=7", "run.seed=3"],
        ["RECIPE", "run.steps=7", "--dry-run", "run.seed=3"],
        ["--dry-run", "RECIPE", "run.steps=7", "run.seed=3"],
        ["RECIPE", "run.steps=1", "--dry-run", "run.steps=7", "run.seed=3"],
    ],
)
def test_overrides_before_and_after_options(bench, words):
    words = [str(bench.recipe) if word == "RECIPE" else word for word in words]
    ended = bench.raw("train", *words, f"run.output_dir={bench.runs}")
    assert (ended.code, ended.err) == (0, "")
    saved = (bench.runs / "short.resolved.yaml").read_text()
    assert "steps: 7" in saved
    assert "seed: 3" in saved


def test_later_overrides_win():
    args = build_parser().parse_args(["train", "r.yaml", "a.b=1", "a.b=2"])
    assert args.overrides == ["a.b=1", "a.b=2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train"], "the following arguments are required: RECIPE.yaml"),
        (["train", "r.yaml", "--dryrun"], "unrecognized arguments: --dryrun"),
        (["train", "r.yaml", "--dry-run", "steps"], "unrecognized arguments: steps"),
        (["train", "r.yaml", "--dry-run", "--x=1"], "unrecognized arguments: --x=1"),
        (["eval", "r.yaml", "--episodes", "many"], "invalid int value"),
        (["warmstart", "r.yaml"], "the following arguments are required: --out"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "the following arguments are required: VERB"),
        (["env"], "the following arguments are required: ACTION"),
        (["env", "list", "--x"], "unrecognized arguments: --x"),
        (["env", "check", "lookup", "--seed", "1", "maze"], "unrecognized arguments: maze"),
    ],
)
def test_words_that_mean_nothing_exit_2(capsys, words, says):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_that_raises(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(train, "run", run)
    return main(["train", "r.yaml"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (DeadlineError, 3),
        (EngineError, 3),
        (WeightSyncError, 3),
        (NonFiniteError, 4),
        (TooManyDroppedError, 4),
        (WeightMismatchError, 4),
        (SampleError, 1),
        (PolyturnError, 1),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(monkeypatch, capsys, error, code):
    monkeypatch.delenv("POLYTURN_TRACEBACK", raising=False)
    assert run_that_raises(monkeypatch, error("value, rule, fix")) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "polyturn: error: value, rule, fix\n")


def test_several_mistakes_are_a_line_each(monkeypatch, capsys):
    run_that_raises(monkeypatch, ConfigError("one\ntwo"))
    assert capsys.readouterr().err == "polyturn: error: one\npolyturn: error: two\n"


def test_a_traceback_for_whoever_asks(monkeypatch, capsys):
    monkeypatch.setenv("POLYTURN_TRACEBACK", "1")
    assert run_that_raises(monkeypatch, ConfigError("value, rule, fix")) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("polyturn: error: value, rule, fix\n")


@pytest.mark.parametrize("module", ["torch", "transformers.models", "safetensors"])
def test_a_missing_package_names_its_install_line(monkeypatch, capsys, module):
    code = run_that_raises(monkeypatch, ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert code == 2
    assert capsys.readouterr().err == f"polyturn: error: this command needs {module}; pip install 'polyturn[train]'\n"


def test_a_bug_of_ours_is_not_made_pretty(monkeypatch):
    with pytest.raises(ModuleNotFoundError):
        run_that_raises(monkeypatch, ModuleNotFoundError("No module named 'polyturn.gone'", name="polyturn.gone"))
    with pytest.raises(ZeroDivisionError):
        run_that_raises(monkeypatch, ZeroDivisionError())


def test_an_interrupt_is_130(monkeypatch, capsys):
    assert run_that_raises(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "polyturn: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    argv = [sys.executable, "-m", "polyturn", "env", "list"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()
    assert (run.returncode, said) == (141, b"")
