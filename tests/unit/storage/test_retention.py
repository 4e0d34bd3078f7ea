"""What is kept and what is deleted: never the newest complete one, never one that is being read."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parts.checkpoints import RUN, holds, make
from parts.patience import PATIENCE_S
from polyturn.storage import leases
from polyturn.storage.leases import leased, readers
from polyturn.storage.manifest import MANIFEST, Place, step_name, verify
from polyturn.storage.publish import download, publish, upload
from polyturn.storage.retention import prune, steps_to_keep, stored_steps
from polyturn.storage.stores import LocalStore


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def at(store, step) -> Place:
    return Place(store, f"{RUN}/{step_name(step)}")


def fill(store, tmp_path, *steps):
    manifests = {}
    for step in steps:
        folder, manifests[step] = make(tmp_path / "work", step)
        assert publish(folder, manifests[step], at(store, step)) is None
    return manifests


def steps(store) -> list[int]:
    return sorted(stored.step for stored in stored_steps(store, RUN) if stored.whole() is not None)


@settings(max_examples=50)
@given(st.sets(st.integers(0, 500), max_size=30), st.integers(1, 5), st.integers(0, 50))
def test_the_newest_is_always_kept(complete, keep, keep_every):
    kept = steps_to_keep(complete, keep=keep, keep_every=keep_every)
    assert kept <= complete
    assert set(sorted(complete)[-keep:]) <= kept
    assert all(step in kept for step in complete if keep_every and step % keep_every == 0)
    assert all(step in sorted(complete)[-keep:] or step % keep_every == 0 for step in kept if keep_every)


def test_count_and_milestones(store, tmp_path):
    fill(store, tmp_path, 10, 20, 30, 40, 50)
    said = prune(store, RUN, keep=2, keep_every=20)
    assert steps(store) == [20, 40, 50]
    assert [sentence.split(" deleted")[0] for sentence in said] == [f"{at(store, 10)}", f"{at(store, 30)}"]
    assert not (store.root / RUN / step_name(10)).exists()
    assert prune(store, RUN, keep=2, keep_every=20) == []


def test_what_is_not_whole_does_not_count(store, tmp_path):
    """The newest two are torn: the newest complete one is the third, and stays."""
    fill(store, tmp_path, 10, 20, 30)
    (store.root / RUN / step_name(30) / MANIFEST).unlink()
    shard = next((store.root / RUN / step_name(20)).glob("__0_0*"))
    shard.unlink()
    shard.write_bytes(b"torn")
    prune(store, RUN, keep=1)
    assert steps(store) == [10]
    assert len(stored_steps(store, RUN)) == 3, "remains are left alone for a while: a save may be under way"
    said = prune(store, RUN, keep=1, grace_s=-1)
    assert len(stored_steps(store, RUN)) == 1
    assert all("remains of a save that was never completed" in sentence for sentence in said)


def test_drafts_of_dead_writers_are_collected(store, tmp_path):
    fill(store, tmp_path, 10)
    draft = store.root / RUN / step_name(10) / ".__0_0.draft-123-abc"
    draft.write_bytes(b"half")
    assert prune(store, RUN, keep=1) == []
    assert draft.exists()
    assert prune(store, RUN, keep=1, grace_s=-1) == [f"{store.url}: 1 unfinished files of dead writers removed"]
    assert not draft.exists()


def test_shards_of_a_writer_that_came_too_late_are_collected(store, tmp_path):
    fill(store, tmp_path, 10)
    folder, other = make(tmp_path / "other", 10, {"__0_0.distcp": b"another branch"})
    upload(folder, other.shards, at(store, 10))
    assert prune(store, RUN, keep=1) == []
    assert "1 files that are not its own deleted" in prune(store, RUN, keep=1, grace_s=-1)[0]
    assert verify(at(store, 10)) is None


def test_what_is_being_read_is_kept(store, tmp_path):
    fill(store, tmp_path, 10, 20)
    with leased(at(store, 10)):
        assert "is kept for now: " in prune(store, RUN, keep=1)[0]
        assert verify(at(store, 10)) is None
    prune(store, RUN, keep=1)
    assert steps(store) == [20]


def test_a_dead_readers_lease_ends(store, tmp_path):
    fill(store, tmp_path, 10, 20)
    with leased(at(store, 10), lease_s=-1.0):
        assert readers(at(store, 10)) == []
        prune(store, RUN, keep=1)
    assert steps(store) == [20]


def test_a_lease_is_renewed_in_its_second_half(store, tmp_path, monkeypatch):
    fill(store, tmp_path, 10)
    now = time.time()
    monkeypatch.setattr(leases.time, "time", lambda: now)
    with leased(at(store, 10), lease_s=100) as lease:
        (first,) = store.list(f"{RUN}/leases/")
        now += 40
        lease.renew()
        assert [entry.key for entry in store.list(f"{RUN}/leases/")] == [first.key]
        now += 20
        lease.renew()
        (second,) = store.list(f"{RUN}/leases/")
        assert second.key != first.key
        now += 90
        assert len(readers(at(store, 10))) == 1
    assert store.list(f"{RUN}/leases/") == []


def test_a_lease_that_can_not_be_read_counts_for_a_while(store, tmp_path):
    fill(store, tmp_path, 10)
    store.put_if_absent(b"{", f"{RUN}/leases/{step_name(10)}/x")
    assert readers(at(store, 10)) == ["a lease that can't be read"]


def test_a_reader_that_comes_in_the_middle_of_a_deletion_is_seen(store, tmp_path):
    """Between taking the manifest away and looking for leases again: the manifest is put back."""
    fill(store, tmp_path, 10, 20)
    entered = leased(at(store, 10))

    class Interrupted(LocalStore):
        def delete(self, key):
            super().delete(key)
            if key.endswith(f"{step_name(10)}/{MANIFEST}"):
                entered.__enter__()

    said = prune(Interrupted(store.root), RUN, keep=1)
    assert "is kept for now" in said[0]
    assert verify(at(store, 10)) is None
    entered.__exit__(None, None, None)


def test_readers_and_a_pruner_at_once(store, tmp_path):
    """Readers of old checkpoints get them whole or a sentence; the newest complete one is there all the time."""
    manifests = fill(store, tmp_path, *range(1, 9))
    wrong: list[str] = []
    got: list[int] = []

    def read(step: int) -> None:
        place, into = at(store, step), tmp_path / f"in {step} {threading.get_ident()}"
        with leased(place):
            if not store.exists(f"{place.key}/{MANIFEST}"):
                return
            fault = download(manifests[step], place, into, link=False)
        if fault is not None:
            wrong.append(fault)
        elif not holds(into, step):
            wrong.append(f"step {step} came wrong")
        else:
            got.append(step)

    threads = [threading.Thread(target=read, args=(step,)) for step in range(1, 9)]
    pruner = threading.Thread(target=lambda: [prune(store, RUN, keep=1) for _ in range(3)])
    pruner.start()
    for thread in threads:
        thread.start()
    for thread in [*threads, pruner]:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert 8 in got
    assert 8 in steps(store)
