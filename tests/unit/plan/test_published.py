"""The recipes of published set-ups pass a dry run, and their page says what the planner says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.config.load import load_recipe
from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.plan.automatic import settle
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import Machine, load_hardware
from polyturn.plan.models import model_facts
from polyturn.plan.planner import GIB
from polyturn.plan.study import study

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "recipes" / "published"
ROW = re.compile(r"\| \[(\S+)\]\((\S+)\.yaml\) \| `([^`]+)` \| (fits|refused) \| (\S+) GiB of (\S+) \| (?:`([^`]+)`)? ?\|")
PAGE = [ROW.fullmatch(line) for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
HARDWARE = load_hardware()
TASKS = 24
GPUS = {"gsm8k-14b-single-copy": "0,1"}
"""Recipes that name GPUs, which must be visible for a dry run."""


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def machine_of(words: str) -> Machine:
    options = shlex.split(words)
    if options[0] == "--instance":
        return HARDWARE.machine(options[1])
    return HARDWARE.gpus_alone(options[1], int(options[3]))


def recipe_of(name: str, overrides: str = "") -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml", overrides.split())


def test_the_page_has_every_recipe():
    names = [row.group(1) for row in PAGE if row is not None]
    assert len(names) == len(PAGE), "a line of the table has another form"
    assert sorted(names) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("row", PAGE, ids=[row.group(1) if row else "?" for row in PAGE])
def test_the_verdict_on_the_page_is_the_planners(row):
    name, _, words, verdict, needed, usable, overrides = row.groups()
    machine, recipe = machine_of(words), recipe_of(name)
    facts = model_facts(recipe.model.path)
    found = study(recipe, facts, HARDWARE, machine, num_tasks=TASKS)
    assert ("fits" if found.verdict.fits else "refused") == verdict
    assert f"{found.plan.needed / GIB:.1f}" == needed
    assert f"{machine.gpu.usable_bytes / GIB:.1f}" == usable
    assert found.verdict.overrides == (tuple(overrides.split()) if overrides else None)
    if overrides:
        resolve(recipe_of(name, overrides), num_train_tasks=TASKS, on_gpu=True)
        settled, _ = settle(recipe_of(name, overrides), facts, machine, num_tasks=TASKS)
        fitting = plan_on(settled, facts, machine, num_tasks=TASKS)
        assert fitting.problems(machine) == ()


def needs_packages(name: str) -> bool:
    """Adapters and a search index need packages that are not in the environment of the quick tests."""
    return "lora" in name or "triviaqa" in name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.real if needs_packages(name) else ())
        for name in sorted(path.stem for path in FOLDER.glob("*.yaml"))
    ],
)
def test_a_dry_run_passes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS.get(name, ""))
    assert main(["train", str(FOLDER / f"{name}.yaml"), "--dry-run", f"run.output_dir={tmp_path}"]) == 0
    assert "dry run: everything that can be checked" in capsys.readouterr().out


def test_published_numbers():
    triviaqa = recipe_of("mt-grpo-triviaqa-3b-8xa100")
    assert (triviaqa.trainer.num_ranks, triviaqa.engine.num_servers, triviaqa.rollout.group_size) == (7, 1, 14)
    small = recipe_of("mt-grpo-triviaqa-3b-4xa10g")
    assert (small.trainer.num_ranks, small.engine.num_servers, small.rollout.group_size) == (3, 1, 6)
    for name, numbers in {
        "code-3b-1gpu": (2, 512, 0.6),
        "code-3b-2gpu": (4, 512, 0.8),
        "code-3b-4gpu": (8, 1024, 0.8),
    }.items():
        recipe = recipe_of(name)
        rollout, share = recipe.rollout, recipe.engine.gpu_memory_utilization
        assert (rollout.group_size, rollout.max_trajectory_tokens, share) == numbers
    lora = recipe_of("gsm8k-3b-lora").model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (16, 32)
