"""A run with six processes: it learns as in one, and whoever dies, hangs or is interrupted, it ends in order."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from parts.chance import chance
from parts.live_runs import PROCESSES, ROLES, LiveRun, live_run
from parts.runs import ROOT, Bench

__all__ = ["live_run"]
pytestmark = pytest.mark.real

LONG = "run.steps=100000"
NUM_KILLS = 10


@pytest.mark.parametrize(
    "ranks",
    [("parallel=ddp",), ("parallel=fsdp2",), ("parallel=fsdp2", "context_ranks=2"), ("tensor_ranks=2",)],
    ids=["ddp", "fsdp2", "context", "tensor"],
)
def test_the_tiny_recipe_learns_as_in_one_process(bench: Bench, live_run, ranks):
    # That it learns is shown once; the other ways to share the work must begin as one process does.
    recipe, steps = ROOT / "recipes" / "quickstart" / "recipe.yaml", 16 if ranks == ("parallel=ddp",) else 3
    words = (f"run.steps={steps}", "evaluation.episodes=8", "evaluation.modes=[greedy]")
    alone = bench.raw("train", str(recipe), f"run.output_dir={bench.runs}", *words)
    together: LiveRun = live_run(*words, *(f"trainer.{word}" for word in ranks), recipe=recipe)
    ended = together.end()
    assert (alone.code, ended.code) == (0, 0), ended.err
    curves = [[step["reward"] for step in found] for found in (alone.steps, together.steps)]
    assert [len(curve) for curve in curves] == [steps, steps]
    assert curves[0][0] == pytest.approx(curves[1][0]), "the first step: the same tasks, the same noise, the same weights"
    assert alone.steps[0]["grad_norm"] == pytest.approx(together.steps[0]["grad_norm"], rel=1e-3)
    if steps > 3:
        assert all(sum(curve[-4:]) / 4 > sum(curve[:4]) / 4 + 0.25 for curve in curves), curves
    assert all(step["mismatch_max"] < 1e-4 and step["policy_age"] == 0 for step in together.steps)
    assert (together.folder.export / "model.safetensors").is_file()
    assert {path.stem for path in together.folder.logs.glob("*.log")} == {*ROLES, "all"}
    assert re.search(rf"trainer-0 .*step={steps} ", (together.folder.logs / "all.log").read_text())


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_kill_at_any_moment_ends_the_rest(live_run, number):
    moments = chance(f"kill {number}")
    role, while_training = ROLES[number % len(ROLES)], moments.random() < 0.6
    run: LiveRun = live_run(LONG)
    if while_training:
        run.trains()
    run.pid(role)
    time.sleep(moments.random() * (0.5 if while_training else 4.0))
    run.kill(role)
    ended = run.end()
    assert ended.code == 3, ended.err
    assert re.search(rf"polyturn: error: {role} was killed by signal 9 \(SIGKILL.*its log: .*{role}\.log", ended.err), ended.err
    assert "Traceback" not in ended.out


@pytest.mark.parametrize("role", ["environment-1", "engine-0", "trainer-0", "trainer-1"])
def test_a_role_that_hangs_is_named_with_what_it_waits_for(live_run, role):
    run: LiveRun = live_run(LONG, "launch.silence_s=8")
    run.trains()
    os.kill(run.pid(role), signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3, ended.err
    assert re.search(rf"polyturn: error: {role} hangs: no heartbeat for \d+ s, its process is stopped; it ", ended.err), (
        ended.err
    )


def test_ctrl_c_once_saves_and_ends(live_run):
    run: LiveRun = live_run(LONG)
    run.trains()
    run.interrupt()
    ended = run.end()
    assert ended.code == 0, ended.err
    assert re.search(r"stopped by SIGINT after \d+ of 100000 steps", ended.out)
    assert (run.folder.export / "model.safetensors").is_file()


def test_ctrl_c_twice_ends_at_once(live_run):
    run: LiveRun = live_run(LONG)
    run.trains()
    run.interrupt()
    time.sleep(0.05)
    run.interrupt()
    ended = run.end()
    assert ended.code in (0, 130), ended.err  # it may have saved within that moment


def test_a_mistake_of_the_user_in_a_role_is_one_sentence(live_run, tmp_path: Path):
    ended = live_run(f"model.path={tmp_path}").end()
    assert ended.code == 2
    assert ended.err.count("polyturn: error: ") == 1
    assert "Traceback" not in ended.err


def test_a_dry_run_names_every_role(bench: Bench):
    ended = bench("train", *PROCESSES, "--dry-run")
    assert ended.code == 0
    assert all(role in ended.out for role in ("environment-1: ", "engine-0: ", "trainer-agent (trainer-0 to trainer-1): "))
