"""Every command that README, docs and recipes show is run here, with fewer steps, on a model that needs no warm start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from parts.models import save_model_folder
from parts.patience import PATIENCE_S
from parts.runs import child_environment
from polyturn.cli.main import main
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.builtin.search_qa import SearchQa
from polyturn.environments.code import generated

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")])
REAL = (
    "recipes/arithmetic-smollm2-1gpu/",
    "recipes/gsm8k-smollm2-cpu/",
    "recipes/search-qa/",
    "recipes/code/",
    "engine.kind=vllm",
)
"""Their commands need the real model, or vLLM, and minutes; test_gsm8k_real.py, test_search_real.py, test_code_real.py and
test_vllm_train_real.py run them."""
QUICK = {
    "train": ["run.steps=1", "rollout.groups_per_step=2", "rollout.group_size=2", "evaluation.episodes=2"],
    "eval": ["evaluation.episodes=2"],
    "rollout": ["rollout.groups_per_step=2", "rollout.group_size=2"],
    "warmstart": [],
}
PLACEHOLDER = re.compile(r"RECIPE|FILE|\bPATH\b|\bID\b|\bDIR\b|\bN\b|\[|\.\.\.")


@pytest.fixture(scope="module")
def untrained_tiny(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a random model that speaks the words of a command's recipe: facts, programs, or `lookup`."""
    vocabularies = {
        "search-qa-tiny": SearchQa(corpus="builtin:facts", instructions=False).vocabulary,
        "code-tiny": partial(generated.vocabulary, 2),
        "": Lookup(instructions=False).vocabulary,
    }

    @cache
    def made(name: str) -> Path:
        vocabulary = vocabularies[name]()
        return save_model_folder(tmp_path_factory.mktemp("tiny"), vocabulary.words, vocabulary.pattern)

    return lambda command: made(next(name for name in vocabularies if name in command))


def commands() -> list[str]:
    """Lines of code blocks that start with `polyturn` or `make`; lines with placeholders show a form, not a command."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, flags=re.S) + re.findall(r"(?m)^ {4}(\S.*)$", text)
        for line in "\n".join(blocks).splitlines():
            command = line.partition(" #")[0].strip()
            if re.match(r"(polyturn|make) ", command) and not PLACEHOLDER.search(command):
                found[command] = None
    return list(found)


def test_the_readme_opens_with_its_two_commands():
    shown = [line.split()[:2] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    make")]
    assert shown == [["make", "quickstart"], ["make", "test"]]


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_make_targets_exist(command: str):
    run = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr


def test_there_are_commands_of_every_verb():
    verbs = {command.split()[1] for command in commands() if command.startswith("polyturn ")}
    assert {"train", "eval", "warmstart", "env"} <= verbs


def of_several_processes(command: str) -> bool:
    """Whether a command starts processes: it forks, which a test's own process must not."""
    return "engine.kind=hf_server" in command


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.real] if of_several_processes(command) else [])
        for command in commands()
        if command.startswith("polyturn ") and not any(recipe in command for recipe in REAL)
    ],
)
def test_polyturn_commands_run(command: str, untrained_tiny: Callable[[str], Path], tmp_path: Path, monkeypatch, capsys):
    words = shlex.split(command)[1:]
    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    if words[0] in QUICK:
        model = untrained_tiny(command)
        exported = tmp_path / "runs" / "quickstart" / "export"
        exported.parent.mkdir(parents=True)
        exported.symlink_to(model)
        if "--steps" in words:
            words[words.index("--steps") + 1] = "1"
        words += [f"model.path={model}", *QUICK[words[0]]]
    if of_several_processes(command):
        argv = [sys.executable, "-m", "polyturn", *words]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=child_environment())
        assert run.returncode == 0, run.stderr
        return
    assert main(words) == 0
    assert "error" not in capsys.readouterr().err
