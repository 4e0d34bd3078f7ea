"""The writer as a process: what it does when all is well, when it dies, and when the driver does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from parts.memory_tier import memory_tier
from parts.runs import child_environment
from parts.stub_runs import eventually
from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.checkpoint.files import read_rest, read_state
from polyturn.checkpoint.places import tiers_of
from polyturn.checkpoint.writing import Settings
from polyturn.config.checkpoint_section import CheckpointEvery, CheckpointSection

SECTION = CheckpointSection(every=CheckpointEvery(disk=1))


def state(step: int, size: int = 1000) -> dict[str, object]:
    return {"modules": {"policy": {"model": {"w": torch.full((size,), float(step))}}}, "loop": {"step": step}}


def make(folder, said, *, separate, **given):
    section = SECTION.model_copy(update=given)
    settings = Settings(run_id="run", checkpoints=folder / "checkpoints", section=section)
    return Checkpointer(settings, say=said.append, separate=separate, log=folder / "logs" / "writer.log")


def save(saver, step, tiers=("disk",), size=1000):
    saver.save(state(step, size), step=step, policy_version=step, tiers=tiers, meta={})
    return saver.wait(step, 120.0)


def newest(folder, section=SECTION):
    found = tiers_of(section, "run", folder / "checkpoints", print).fetch_newest(folder / "back")
    back = read_state(folder / "back", read_rest(folder / "back"))
    return found.checkpoint.manifest.step, back["loop"]["step"], float(back["modules"]["policy"]["model"]["w"].mean())


def test_what_is_saved_comes_back(tmp_path):
    said = []
    saver = make(tmp_path, said, separate=False, url=str(tmp_path / "store"))
    assert save(saver, 3) == []
    assert save(saver, 4, ("disk", "s3")) == []
    assert saver.metrics().keys() == {"checkpoint/disk_s", "checkpoint/s3_s"}
    assert saver.metrics() == {}
    saver.close(10.0)
    assert newest(tmp_path) == (4, 4, 4.0)
    assert (tmp_path / "store" / "run" / "step_00000004" / "MANIFEST.json").exists()
    assert said == []


def test_a_machine_that_is_lost_is_survived_by_a_mirror(tmp_path, monkeypatch):
    """Two daemons, and a run on the machine of the first one: then that machine's memory and disk are gone."""
    monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", tmp_path / "first" / "shm")
    monkeypatch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
    (tmp_path / "first" / "shm").mkdir(parents=True)
    with memory_tier(tmp_path / "first" / "daemon") as first, memory_tier(tmp_path / "second") as second:
        given = {"every": CheckpointEvery(memory=1, disk=2), "mirrors": (first, second)}
        said = []
        saver = make(tmp_path / "first", said, separate=False, **given)
        for step in (2, 3):
            assert save(saver, step, ("memory", "mirror-1", "mirror-2", *(("disk",) if step == 2 else ()))) == []
        assert saver.metrics().keys() >= {"checkpoint/memory_s", "checkpoint/mirror-1_s", "checkpoint/mirror-2_s"}
        saver.close(10.0)
        shutil.rmtree(tmp_path / "first")
        monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", tmp_path)
        assert newest(tmp_path / "elsewhere", CheckpointSection(**given)) == (3, 3, 3.0)
        assert len(list((tmp_path / "second" / "run").glob("step_*"))) == 1, "as many as the memory keeps"
        assert said == []


def test_a_mirror_that_is_gone_costs_no_other_tier_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
    given = {"every": CheckpointEvery(memory=1, disk=1), "mirrors": ("memory-tier://127.0.0.1:9",)}
    said = []
    saver = make(tmp_path, said, separate=False, **given)
    assert save(saver, 1, ("memory", "disk", "mirror-1")) == said
    assert "step_00000001 is not in tier mirror-1: memory-tier://127.0.0.1:9:" in said[0]
    saver.close(10.0)
    assert newest(tmp_path, CheckpointSection(**given)) == (1, 1, 1.0)


def test_no_room_to_copy_to_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("polyturn.checkpoint.arena.free_memory", lambda: 10)
    said = []
    saver = make(tmp_path, said, separate=False)
    assert save(saver, 1) == said
    assert "the checkpoint of step 1 was not saved: no room to copy it to" in said[0]
    assert saver.metrics() == {"checkpoint/failures": 1.0}
    monkeypatch.setattr("polyturn.checkpoint.arena.free_memory", lambda: None)
    assert save(saver, 2) == []
    saver.close(10.0)


@pytest.mark.real
def test_a_writer_that_dies_is_told_and_started_again(tmp_path):
    said = []
    saver = make(tmp_path, said, separate=True)
    saver.start()
    assert save(saver, 1) == []
    os.kill(saver._writer.pid, signal.SIGKILL)
    eventually(lambda: not os.path.exists(f"/proc/{saver._writer.pid}") or saver._writer._process.poll(), "its end")  # noqa: PTH110
    assert save(saver, 2, size=5000) == []
    saver.save(state(3), step=3, policy_version=3, tiers=["disk"], meta={})
    saver._writer._process.kill()
    words = saver.wait(3, 120.0)
    assert (
        words == [] or "the checkpoint of step 3 may not be saved: the writer of checkpoints was ended by signal 9" in words[0]
    )
    assert save(saver, 4) == []
    saver.close(60.0)
    assert newest(tmp_path) == (4, 4, 4.0)


@pytest.mark.real
def test_the_writer_finishes_what_a_killed_driver_has_handed_over(tmp_path):
    code = (
        "import os, sys, signal, pathlib; from unit.checkpoint.test_checkpointer import make, state\n"
        "folder = pathlib.Path(sys.argv[1]); saver = make(folder, [], separate=True); saver.start()\n"
        "saver.save(state(7, 1_000_000), step=7, policy_version=7, tiers=['disk'], meta={})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=child_environment(), timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    manifest = tmp_path / "checkpoints" / "run" / "step_00000007" / "MANIFEST.json"
    eventually(manifest.exists, "the checkpoint of a driver that is gone")
    assert newest(tmp_path) == (7, 7, 7.0)
