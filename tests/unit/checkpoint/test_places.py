"""Where the tiers of a run are."""

from __future__ import annotations

import pytest

from parts.checkpoints import RUN, make
from parts.memory_tier import memory_tier
from polyturn.checkpoint import places
from polyturn.checkpoint.places import free_memory_tiers, memory_root, scratch_root, tiers_of
from polyturn.config.checkpoint_section import CheckpointEvery, CheckpointKeep, CheckpointSection
from polyturn.errors import ConfigError


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(places, "_SHARED_MEMORY", folder)
    return folder


def tiers(tmp_path, **given):
    return tiers_of(CheckpointSection(**given), "run", tmp_path / "run" / "checkpoints", print).tiers


def test_the_tiers_of_a_recipe(tmp_path):
    assert [(tier.name, tier.every, tier.keep) for tier in tiers(tmp_path)] == [("disk", 25, 3)]
    every, keep = CheckpointEvery(memory=1, disk=10, s3=50), CheckpointKeep(memory=2, disk=4, s3=5, milestones=100)
    found = tiers(tmp_path, every=every, keep=keep, url=str(tmp_path / "store"))
    assert [(tier.name, tier.every, tier.keep, tier.keep_every) for tier in found] == [
        ("memory", 1, 2, 0),
        ("disk", 10, 4, 100),
        ("s3", 50, 5, 100),
    ]
    assert tiers(tmp_path, url=str(tmp_path / "store"))[1].every == 25, "as the disk"
    assert tiers(tmp_path, every=CheckpointEvery(disk=None)) == ()


def test_mirrors_get_what_memory_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
    every, keep = CheckpointEvery(memory=2, s3=50), CheckpointKeep(memory=2)
    urls = ("memory-tier://a:9300", "memory-tier://b:9300")
    found = tiers(tmp_path, every=every, keep=keep, mirrors=urls, url=str(tmp_path / "store"))
    assert [(tier.name, tier.every, tier.keep, tier.keep_every) for tier in found] == [
        ("memory", 2, 2, 0),
        ("disk", 25, 3, 0),
        ("mirror-1", 2, 2, 0),
        ("mirror-2", 2, 2, 0),
        ("s3", 50, 3, 0),
    ]
    assert [tier.store.url for tier in found[2:4]] == list(urls)


def test_memory_is_given_back_here_and_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
    gone = "memory-tier://127.0.0.1:9"
    with memory_tier(tmp_path / "peer") as url:
        section = CheckpointSection(every=CheckpointEvery(memory=1), mirrors=(gone, url))
        checkpoints = tmp_path / "lookup" / "checkpoints"
        found = tiers_of(section, RUN, checkpoints, print)
        for step in (0, 1):
            found.publish(*make(tmp_path / "work", step), only=["memory", "mirror-2"])
        free_memory_tiers(section, RUN, checkpoints, elsewhere=False)
        assert [(tier.name, stored.step) for tier, stored in found.checkpoints()] == [("mirror-2", 1), ("mirror-2", 0)]
        free_memory_tiers(section, RUN, checkpoints, elsewhere=True)
        assert list(found.checkpoints()) == []


def test_runs_do_not_share_memory(tmp_path):
    assert memory_root(tmp_path / "a" / "checkpoints") != memory_root(tmp_path / "b" / "checkpoints")
    assert scratch_root(tmp_path, ["memory", "disk"]).parent == memory_root(tmp_path)
    assert scratch_root(tmp_path, ["disk"]).parent == tmp_path


def test_memory_that_others_can_reach_is_refused(tmp_path, shared_memory):
    every = CheckpointEvery(memory=1)
    tiers(tmp_path, every=every)
    (own,) = shared_memory.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    with pytest.raises(ConfigError, match="is not this user's own folder, closed to others"):
        tiers(tmp_path, every=every)
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not this user's own folder"):
        tiers(tmp_path, every=every)
