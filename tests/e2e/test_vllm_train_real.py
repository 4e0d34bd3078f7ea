"""Whole runs through vLLM, started by the command line: they train on-policy, and leave nothing when vLLM dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from parts.live_runs import LiveRun, live_run
from parts.runs import ROOT
from parts.stub_runs import Ended
from parts.vllm_served import needs_vllm
from polyturn.processes.descendants import all_pids

__all__ = ["live_run"]
pytestmark = needs_vllm

RECIPE = ROOT / "recipes" / "quickstart" / "recipe.yaml"
ONE_SERVER = ("engine.kind=vllm_server", "trainer.num_ranks=1", "environment.num_processes=0", "trainer.threads=1")
SHORT = ("evaluation.episodes=8", "evaluation.modes=[greedy]", "rollout.groups_per_step=4")


WAYS = {
    "nccl": (),
    "lora": ("model.lora.rank=8", "weight_sync.verify_every=1"),
    "single_copy": ("weight_sync.mode=single_copy", "weight_sync.verify_every=1"),
}


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_a_run_trains_on_what_vllm_samples(live_run, words):
    run: LiveRun = live_run(*ONE_SERVER, *SHORT, "run.steps=3", *words, recipe=RECIPE)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert len(run.steps) == 3
    assert all(step["mismatch_max"] < 1e-4 and step["policy_age"] == 0 for step in run.steps)
    assert [step["policy_version"] for step in run.steps] == [1, 2, 3]
    assert all(step["num_faults"] == 0 for step in run.steps)
    name = "adapter_model" if words == WAYS["lora"] else "model"
    assert (run.folder.export / f"{name}.safetensors").is_file()
    assert not (run.folder.root / "adapters").exists()
    assert (run.folder.logs / "engine-0-vllm.log").is_file()


SHARING = {
    "the parts of one server": ("trainer.tensor_ranks=2", "engine.tensor_parallel_size=2"),
    "two servers": ("trainer.parallel=zero1", "engine.num_servers=2"),
}


@pytest.mark.parametrize("words", SHARING.values(), ids=SHARING)
def test_two_ranks_hold_one_copy_each_with_vllm(live_run, words):
    """Ranks that compute every layer together and those that compute alone, each on the memory of a worker of vLLM."""
    two = ("trainer.num_ranks=2", "weight_sync.mode=single_copy", "weight_sync.verify_every=1")
    run: LiveRun = live_run(*ONE_SERVER, *SHORT, *two, *words, "run.steps=2", recipe=RECIPE)
    ended = run.end(400)  # two of vLLM start on one machine
    assert ended.code == 0, ended.err
    assert len(run.steps) == 2
    assert all(step["mismatch_max"] < 1e-4 and step["policy_age"] == 0 for step in run.steps)
    assert [step["policy_version"] for step in run.steps] == [1, 2]
    assert load_file(run.folder.export / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape == (128, 128)


HERE = ("engine.kind=vllm", "trainer.num_ranks=1", "environment.num_processes=0", "trainer.threads=1")


@pytest.mark.parametrize("mode", ["single_copy", "in_process"])
def test_a_run_with_vllm_in_its_process_learns(live_run, mode):
    """Six steps of the quickstart are enough for the greedy policy to look on instead of giving up."""
    words = ("evaluation.episodes=32", "evaluation.modes=[greedy]", "run.steps=6", f"weight_sync.mode={mode}")
    run: LiveRun = live_run(*HERE, *words, recipe=RECIPE)
    # What torch compiles is kept among temporary files, so this is not `run.end()`.
    ended = Ended(run.process.wait(300), run.out, run.err)
    assert ended.code == 0, ended.err
    assert all(step["mismatch_max"] < 1e-4 and step["policy_age"] == 0 for step in run.steps)
    assert [step["policy_version"] for step in run.steps] == [1, 2, 3, 4, 5, 6]
    found = re.search(r"held-out success, greedy: before ([\d.]+) .* after ([\d.]+)", ended.out)
    assert found is not None, ended.out
    before, after = map(float, found.groups())
    assert before < 0.6 < 0.9 < after
    assert (run.folder.export / "model.safetensors").is_file()


def vllm_pids(run) -> list[int]:
    """vLLM's processes in a run, the API server first."""
    found = []
    for pid in sorted(all_pids()):
        try:
            words, variables = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if run.mark.encode() in variables and b"polyturn.engine.vllm_child" in words:
            found.append(pid)
    return found


def test_a_run_whose_vllm_is_killed_ends_and_says_so(live_run):
    run: LiveRun = live_run(*ONE_SERVER, *SHORT, "run.steps=100000", recipe=RECIPE)
    run.trains()
    (server, *_) = vllm_pids(run)
    os.kill(server, signal.SIGKILL)
    ended = run.end()
    assert ended.code == 3, ended.err
    assert re.search(r"polyturn: error: the vLLM server at http://127\.0\.0\.1:\d+ was killed by signal 9", ended.err), (
        ended.err
    )
