"""A run's checkpoints on every kind of store: published, found past damage, read while others delete, fetched as sealed."""

from __future__ import annotations

import pytest

from parts.checkpoints import RUN, content_of, holds, make, replace
from parts.stores import KINDS, Servers, opened
from polyturn.storage.leases import leased
from polyturn.storage.manifest import MANIFEST, verify
from polyturn.storage.publish import publish, upload
from polyturn.storage.tiers import Tier, Tiers


@pytest.fixture(params=KINDS)
def tiers(request: pytest.FixtureRequest, tmp_path, s3_servers: Servers):
    with opened(request.param, tmp_path, s3_servers) as store:
        yield Tiers(RUN, [Tier("only", store, keep=2)], say=lambda _: None, stall_s=60)


def published(tiers, tmp_path, *steps) -> None:
    for step in steps:
        folder, manifest = make(tmp_path / "work", step)
        (outcome,) = tiers.publish(folder, manifest)
        assert outcome.ok, outcome.sentence


def kept(tiers) -> list[int]:
    return [stored.step for _, stored in tiers.checkpoints() if stored.whole() is not None]


def test_published_pruned_found_and_fetched(tiers, tmp_path):
    assert tiers.newest_verified().checkpoint is None
    published(tiers, tmp_path, 0, 10, 20)
    assert tiers.newest_verified().checkpoint.manifest.step == 20
    first = tiers.place(tiers.tiers[0], 0)
    with leased(first):
        assert "is kept for now" in tiers.prune()[0]
    assert kept(tiers) == [20, 10, 0]
    assert "deleted" in tiers.prune()[0]
    assert kept(tiers) == [20, 10]
    assert tiers.fetch_newest(tmp_path / "in").checkpoint.manifest.step == 20
    assert holds(tmp_path / "in", 20)
    assert verify(tmp_path / "in") is None
    assert tiers.rewind(10) != []
    assert kept(tiers) == [10]


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "no manifest", "torn manifest"])
def test_past_damage_and_healed_when_the_step_comes_again(tiers, tmp_path, damage):
    published(tiers, tmp_path, 10, 20)
    place = tiers.place(tiers.tiers[0], 20)
    raw = content_of(20)["__0_0.distcp"]
    shard = next(entry.key for entry in place.store.list(f"{place.key}/") if "__0_0" in entry.key)
    manifest = place.store.read(f"{place.key}/{MANIFEST}")
    key, content = {
        "torn": (shard, raw[:1000]),
        "flipped": (shard, raw[:-1] + b"!"),
        "missing": (shard, None),
        "no manifest": (f"{place.key}/{MANIFEST}", None),
        "torn manifest": (f"{place.key}/{MANIFEST}", manifest[:100]),
    }[damage]
    replace(place, key, content, tmp_path)
    found = tiers.fetch_newest(tmp_path / "in")
    assert found.checkpoint.manifest.step == 10
    assert holds(tmp_path / "in", 10)
    assert len(found.rejected) == 1
    folder, again = make(tmp_path / "again", 20)
    assert publish(folder, again, place) is None
    assert verify(place) is None


def test_the_first_of_two_writers_is_kept(tiers, tmp_path):
    first, manifest = make(tmp_path / "first", 10)
    second, other = make(tmp_path / "second", 10, {"__0_0.distcp": b"another branch"})
    place = tiers.place(tiers.tiers[0], 10)
    upload(second, other.shards, place)
    assert publish(first, manifest, place) is None
    assert "with other content; that one is kept" in (publish(second, other, place) or "")
    assert tiers.newest_verified().checkpoint.manifest.shards == manifest.shards
