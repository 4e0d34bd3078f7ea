"""Runs that are killed, for real: processes, signals, a writer of its own, one rank and two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from parts.chance import chance
from parts.kill_cases import Cases
from parts.kills import PHASES
from parts.patience import PATIENCE_S
from parts.runs import child_environment
from parts.stub_runs import eventually
from polyturn.storage.manifest import Place, verify
from polyturn.storage.stores import LocalStore

pytestmark = pytest.mark.real

KILLS = 10


@pytest.fixture
def place(tmp_path, colours_model):
    return Cases(tmp_path, colours_model)


def test_kill_9_at_every_phase_of_a_step_changes_nothing(place):
    assert place.run("whole", "run.steps=5") == 0
    for number, phase in enumerate(PHASES):
        at = 2 + number % 3
        assert place.run(phase, "run.steps=5", through=("-m", "parts.kills", phase, str(at), "--")) == -signal.SIGKILL, (
            place.said(phase)
        )
        assert place.run(phase, "run.steps=5", "--resume") == 0, place.said(phase)
        assert "goes on after step" in place.said(phase)
        place.assert_same(phase, "whole")


def test_two_ranks_go_on_after_the_driver_was_killed(place):
    words = ("trainer.num_ranks=2", "run.steps=300")
    assert place.run("whole", *words) == 0, place.said("whole")
    run = place.start("cut", *words)
    eventually(lambda: place.stored("cut") or run.poll() is not None, "the first checkpoint")
    beat = json.loads((place.of("cut") / "heartbeats" / "trainer-0.json").read_text())
    os.kill(beat["pid"], signal.SIGKILL)
    assert run.wait(PATIENCE_S) == 3, place.said("cut")
    assert place.steps("cut") < 300
    assert place.run("cut", *words, "--resume") == 0, place.said("cut")
    assert "run cut goes on after step" in place.said("cut")
    place.assert_same("cut", "whole")


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_stop_saves_and_exits_with_0(place, ranks, number):
    words = (f"trainer.num_ranks={ranks}", "run.steps=60", "checkpoint.every.disk=1000")
    assert place.run("whole", *words) == 0, place.said("whole")
    run = place.start("cut", *words)
    eventually(lambda: place.steps("cut") >= 3 or run.poll() is not None, "the third step")
    run.send_signal(number)
    assert run.wait(PATIENCE_S) == 0, place.said("cut")
    (step,) = place.stored("cut")
    assert 3 <= step == place.steps("cut") < 60
    assert place.run("cut", *words, "--resume") == 0
    place.assert_same("cut", "whole")


def settled(value):
    """What `value()` is once it has not changed for two seconds."""
    before, until = None, time.monotonic() + 60
    while (now := value()) != before and time.monotonic() < until:
        before = now
        time.sleep(2)
    return now


def test_a_second_sigint_ends_at_once_and_harms_no_checkpoint(place):
    words = ("run.steps=100000",)
    run = place.start("cut", *words)
    eventually(lambda: place.stored("cut") or run.poll() is not None, "the first checkpoint")
    run.send_signal(signal.SIGINT)
    time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE_S) in (0, 130), "0 where everything was saved before the second came"
    newest = settled(lambda: max(place.stored("cut")))  # the writer still ends what it had begun
    whole = Place(LocalStore(place.of("cut") / "checkpoints"), f"cut/step_{newest:08d}")
    assert verify(whole) is None
    assert place.run("cut", f"run.steps={newest + 2}", "--resume") == 0, place.said("cut")
    assert place.steps("cut") == newest + 2


def test_killed_again_and_again_it_ends_as_it_would_have(place):
    """A run of 150 steps, killed at random moments until it comes through."""
    words = ("run.steps=150", "checkpoint.every.memory=1", "checkpoint.every.disk=3")
    assert place.run("whole", *words) == 0
    assert place.kill_until_done("cut", words, KILLS, chance("killed again and again")) > 0
    assert "not taken: its shard" not in place.said("cut"), "a torn checkpoint was visible"
    place.assert_same("cut", "whole")


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_shards_are_saved_whole_and_gone_on_from_in_any_layout(place, tensor_ranks):
    """Of fsdp2's ranks: what one of them wrote is the policy that all of them exported, and they go on from it."""
    cut = f"trainer.tensor_ranks={tensor_ranks}"
    shards = (cut, "trainer.num_ranks=2", "trainer.parallel=fsdp2", "engine.kind=hf_server", "engine.deterministic=false")
    words = (*shards, "checkpoint.every.disk=1000")
    run = place.start("cut", *words, "run.steps=100000")
    eventually(lambda: place.steps("cut") >= 3 or run.poll() is not None, "the third step")
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE_S) == 0, place.said("cut")
    (step,) = place.stored("cut")
    out = place.folder / "exported"
    argv = [sys.executable, "-m", "polyturn", "export", str(place.of("cut")), "--out", str(out)]
    subprocess.run(argv, check=True, env=child_environment(), timeout=PATIENCE_S)
    saved, exported = (load_file(folder / "model.safetensors") for folder in (out, place.of("cut") / "export"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in saved.items())
    assert place.run("cut", *words, f"run.steps={step + 3}", "--resume") == 0, place.said("cut")
    assert f"goes on after step {step}" in place.said("cut")
    assert place.steps("cut") == step + 3

    exported = load_file(place.of("cut") / "export" / "model.safetensors")
    for layout in (
        ("trainer.num_ranks=1", "trainer.parallel=single"),
        ("trainer.num_ranks=2", "trainer.parallel=ddp"),
        ("trainer.num_ranks=2", "trainer.parallel=fsdp2"),
    ):
        whole = (*layout, "trainer.tensor_ranks=1")
        assert place.run("cut", *words, *whole, f"run.steps={step + 3}", "--resume") == 0, place.said("cut")
        again = load_file(place.of("cut") / "export" / "model.safetensors")
        assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items()), layout
    assert place.run("cut", *words, *whole, f"run.steps={step + 4}", "--resume") == 0, place.said("cut")
    assert place.steps("cut") == step + 4
