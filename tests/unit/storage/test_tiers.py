"""Checkpoints over tiers: published, found again past every damage, and never lost by a tier that fails."""

from __future__ import annotations

import json

import pytest

from parts.checkpoints import RUN, content_of, holds, make, replace
from polyturn.errors import ConfigError, StorageError
from polyturn.storage.guard import GuardedStore
from polyturn.storage.manifest import MANIFEST, read_manifest, verify
from polyturn.storage.publish import commit, publish, upload
from polyturn.storage.stores import LocalStore, MissingKeyError
from polyturn.storage.tiers import Tier, Tiers


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def tiers(tmp_path, said) -> Tiers:
    memory = Tier("memory", LocalStore(tmp_path / "memory"), keep=2)
    disk = Tier("disk", LocalStore(tmp_path / "disk"), every=10, keep=3)
    return Tiers(RUN, [memory, disk], say=said.append)


def publish_steps(tiers, tmp_path, *steps):
    for step in steps:
        folder, manifest = make(tmp_path / "work", step)
        assert all(outcome.ok for outcome in tiers.publish(folder, manifest))


class Refusing(LocalStore):
    """A store that fails in whatever it is asked."""

    def put(self, file, key, *, link=False):
        raise StorageError("no space left")

    def list(self, prefix):
        raise StorageError("no connection")


def test_publish_by_cadence_and_find_the_newest(tiers, tmp_path, said):
    publish_steps(tiers, tmp_path, 0, 10, 11)
    assert tiers.due(10) == ["memory", "disk"]
    assert [(tier.name, stored.step) for tier, stored in tiers.checkpoints()] == [
        ("memory", 11),
        ("memory", 10),
        ("disk", 10),
        ("memory", 0),
        ("disk", 0),
    ]
    found = tiers.newest_verified()
    assert found.checkpoint.tier == "memory"
    assert found.checkpoint.manifest.step == 11
    assert (found.rejected, found.unreachable, said) == ((), (), [])


def test_step_0_alone_is_found(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 0)
    assert tiers.newest_verified().checkpoint.manifest.step == 0


def test_nothing_is_found_where_nothing_is(tiers):
    assert tiers.newest_verified().checkpoint is None


def test_fetch_gives_back_the_sealed_folder(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 10)
    checkpoint = tiers.newest_verified().checkpoint
    for link in (True, False):
        into = tmp_path / f"in {link}"
        assert tiers.fetch(checkpoint, into, link=link) is None
        assert holds(into, 10)
        assert verify(into) is None
    assert list((tmp_path / "memory" / RUN).glob("leases/*")) == [], "the lease has ended"


def test_fetch_goes_on_where_it_was(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 10)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "__0_0.distcp").write_bytes(b"half of it")
    assert tiers.fetch(tiers.newest_verified().checkpoint, tmp_path / "in") is None
    assert holds(tmp_path / "in", 10)


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.9, None])
def test_walks_back_with_a_sentence_for_each(tiers, tmp_path, share, said):
    """The newest is torn in memory, its manifest is missing on disk; the older one has a flipped byte in memory."""
    publish_steps(tiers, tmp_path, 10, 20)
    by_place = {(tier.name, stored.step): stored for tier, stored in tiers.checkpoints()}
    key = next(entry.key for entry in by_place["memory", 20].entries if "__0_0" in entry.key)
    raw = content_of(20)["__0_0.distcp"]
    replace(by_place["memory", 20].place, key, None if share is None else raw[: int(len(raw) * share)], tmp_path)
    replace(by_place["disk", 20].place, f"{by_place['disk', 20].place.key}/{MANIFEST}", None, tmp_path)
    key = next(entry.key for entry in by_place["memory", 10].entries if "__0_0" in entry.key)
    raw = content_of(10)["__0_0.distcp"]
    replace(by_place["memory", 10].place, key, raw[:100] + b"X" + raw[101:], tmp_path)

    found = tiers.fetch_newest(tmp_path / "in")
    assert (found.checkpoint.tier, found.checkpoint.manifest.step) == ("disk", 10)
    assert holds(tmp_path / "in", 10)
    assert len(found.rejected) == 3
    assert found.rejected[0].startswith("step_00000020 in tier memory is not taken: its shard __0_0.distcp ")
    assert found.rejected[1] == "step_00000020 in tier disk is not taken: it has no manifest, so it was never completed"
    assert found.rejected[2].endswith("its shard __0_0.distcp is damaged: its checksum is not the manifest's")
    assert list(found.rejected) == said
    assert tiers.newest_verified().rejected == found.rejected


def test_a_checkpoint_of_another_run_is_not_taken(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 10)
    (tmp_path / "memory" / RUN).rename(tmp_path / "memory" / "other")
    (tmp_path / "disk" / RUN).rename(tmp_path / "disk" / "other")
    found = Tiers("other", [Tier("disk", LocalStore(tmp_path / "disk"))]).newest_verified()
    assert found.checkpoint is None
    assert "its manifest is of lookup" in found.rejected[0]


def test_a_tier_that_fails_loses_nothing_of_the_others(tmp_path, said):
    good = Tier("disk", LocalStore(tmp_path / "disk"))
    tiers = Tiers(RUN, [Tier("bad", Refusing(tmp_path / "bad")), good], say=said.append)
    folder, manifest = make(tmp_path / "work", 1)
    bad, fine = tiers.publish(folder, manifest)
    assert (bad.ok, fine.ok) == (False, True)
    assert bad.sentence == "step_00000001 is not in tier bad: no connection"
    found = tiers.newest_verified()
    assert found.checkpoint.tier == "disk"
    assert found.unreachable == ("tier bad could not be asked: no connection",)
    assert tiers.prune() == []
    assert said[-1].startswith("tier bad was not pruned: the tier bad is skipped") or "no connection" in said[-1]


def test_nothing_found_and_a_tier_unreachable_are_told_apart(tmp_path):
    tiers = Tiers(RUN, [Tier("bad", Refusing(tmp_path / "bad"))], say=lambda _: None)
    found = tiers.newest_verified()
    assert (found.checkpoint, len(found.unreachable)) == (None, 1)


def test_nothing_is_visible_before_the_manifest(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    tier = tiers.tiers[1]
    place = tiers.place(tier, 10)
    assert upload(folder, manifest.shards, place) == manifest.num_bytes
    assert tiers.newest_verified().checkpoint is None
    assert commit(manifest, place) is None
    assert tiers.newest_verified().checkpoint is not None


def test_commit_refuses_while_a_shard_is_missing(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    place = tiers.place(tiers.tiers[1], 10)
    upload(folder, manifest.shards[:-1], place)
    with pytest.raises(StorageError, match=r"can't be completed: its shard __1_0\.distcp is missing"):
        commit(manifest, place)
    assert not place.store.exists(f"{place.key}/{MANIFEST}")


def test_a_save_that_was_cut_off_goes_on_where_it_was(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    place = tiers.place(tiers.tiers[1], 10)
    upload(folder, manifest.shards[:1], place)
    assert upload(folder, manifest.shards, place) == manifest.num_bytes - manifest.shards[0].num_bytes
    assert publish(folder, manifest, place) is None
    assert publish(folder, manifest, place) is None, "publishing twice changes nothing"


def test_a_file_that_changed_since_it_was_sealed_is_not_published(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    (folder / ".metadata").unlink()
    (folder / ".metadata").write_bytes(b"M")
    outcomes = tiers.publish(folder, manifest)
    assert not any(outcome.ok for outcome in outcomes)
    assert "is not as it was sealed: its shard .metadata is damaged" in outcomes[0].sentence
    assert tiers.newest_verified().checkpoint is None


def test_of_two_writers_of_a_step_the_first_is_kept_whole(tiers, tmp_path, said):
    first, manifest = make(tmp_path / "first", 10)
    second, other = make(tmp_path / "second", 10, {"__0_0.distcp": b"another branch", ".metadata": b"m"})
    place = tiers.place(tiers.tiers[1], 10)
    upload(second, other.shards, place)
    assert publish(first, manifest, place) is None
    kept = publish(second, other, place)
    assert kept is not None
    assert "with other content; that one is kept" in kept
    assert tiers.fetch_newest(tmp_path / "in").checkpoint.manifest == manifest
    assert holds(tmp_path / "in", 10)


@pytest.mark.parametrize("same", [True, False], ids=["same bytes", "other bytes"])
def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tiers, tmp_path, same):
    publish_steps(tiers, tmp_path, 10)
    place = tiers.place(tiers.tiers[1], 10)
    key = next(entry.key for entry in place.store.list(f"{place.key}/") if "__0_0" in entry.key)
    raw = content_of(10)["__0_0.distcp"]
    replace(place, key, b"X" + raw[1:], tmp_path)
    assert verify(place) is not None
    folder, manifest = make(tmp_path / "again", 10, None if same else {"__0_0.distcp": b"not bit for bit"})
    assert publish(folder, manifest, place) is None
    assert verify(place) is None
    assert read_manifest(place).shards == manifest.shards


def test_a_torn_manifest_is_replaced(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    place = tiers.place(tiers.tiers[1], 10)
    place.store.put_if_absent(manifest.to_json()[:50], f"{place.key}/{MANIFEST}")
    assert publish(folder, manifest, place) is None
    assert verify(place) is None


def test_rewind_forgets_what_came_later(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 10, 20, 21)
    said = tiers.rewind(10)
    assert len(said) == 3
    assert {stored.step for _, stored in tiers.checkpoints()} == {10}


def test_bad_tiers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="every=0"):
        Tier("disk", LocalStore(tmp_path), every=0)
    disk = Tier("disk", LocalStore(tmp_path))
    with pytest.raises(ConfigError, match="must have names that differ"):
        Tiers(RUN, [disk, disk])
    folder, manifest = make(tmp_path / "work", 1)
    with pytest.raises(ConfigError, match="a checkpoint of run lookup can't be published as one of run other"):
        Tiers("other", [disk]).publish(folder, manifest)


def test_a_checkpoint_that_goes_away_before_the_fetch_is_walked_past(tiers, tmp_path):
    publish_steps(tiers, tmp_path, 10)
    checkpoint = tiers.newest_verified().checkpoint
    for entry in checkpoint.place.store.list(f"{checkpoint.place.key}/"):
        checkpoint.place.store.delete(entry.key)
    assert tiers.fetch(checkpoint, tmp_path / "in") == "it has no manifest, so it was never completed"


def test_nothing_of_a_newer_one_that_was_not_whole_is_left_among_the_fetched(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    tiers.publish(folder, manifest)
    folder, manifest = make(tmp_path / "work", 20, {"__7_0.distcp": b"a rank more", "__8_0.distcp": b"and one more"})
    tiers.publish(folder, manifest, only=["disk"])
    place = tiers.place(tiers.tiers[1], 20)
    key = next(entry.key for entry in place.store.list(f"{place.key}/") if "__8_0" in entry.key)
    replace(place, key, b"and one mOre", tmp_path)
    assert tiers.fetch_newest(tmp_path / "in").checkpoint.manifest.step == 10
    assert {path.name for path in (tmp_path / "in").iterdir()} == {*content_of(10), MANIFEST}


def test_what_this_process_published_is_not_read_again(tiers, tmp_path, monkeypatch):
    folder, manifest = make(tmp_path / "work", 10)
    tiers.publish(folder, manifest)

    def never(self, key):
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(LocalStore, "chunks", never)
    assert all(outcome.ok for outcome in tiers.publish(folder, manifest))


def test_stores_are_guarded(tiers):
    assert all(isinstance(tier.store, GuardedStore) for tier in tiers.tiers)


def test_manifests_in_a_store_are_the_sealed_ones(tiers, tmp_path):
    folder, manifest = make(tmp_path / "work", 10)
    tiers.publish(folder, manifest)
    place = tiers.place(tiers.tiers[1], 10)
    assert json.loads(place.store.read(f"{place.key}/{MANIFEST}")) == json.loads((folder / MANIFEST).read_bytes())
    with pytest.raises(MissingKeyError):
        place.store.read(f"{place.key}/{MANIFEST}.other")
