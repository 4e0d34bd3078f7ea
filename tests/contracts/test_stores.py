"""Every store of files keeps one contract, through real files and real servers on loopback."""

from __future__ import annotations

import threading

import pytest

from parts.stores import KINDS, Servers, opened
from polyturn.errors import StorageError
from polyturn.storage.guard import GuardedStore
from polyturn.storage.stores import MissingKeyError, Store

BIG = bytes(range(256)) * 4096 * 12  # 12 MiB: several pieces, and several parts on S3


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path, s3_servers: Servers):
    with opened(request.param, tmp_path, s3_servers) as found:
        yield found


def put(store: Store, key: str, content: bytes, tmp_path) -> None:
    file = tmp_path / "to put"
    file.write_bytes(content)
    store.put(file, key)


def test_is_a_store(store):
    assert isinstance(store, Store)
    assert store.url


@pytest.mark.parametrize("size", [0, 1, len(BIG)])
def test_what_is_put_is_got(store, tmp_path, size):
    put(store, "run/step_00000001/a.metadata", BIG[:size], tmp_path)
    store.get("run/step_00000001/a.metadata", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BIG[:size]
    assert store.read("run/step_00000001/a.metadata") == BIG[:size]
    assert b"".join(store.chunks("run/step_00000001/a.metadata")) == BIG[:size]
    assert [path.name for path in tmp_path.iterdir() if "draft" in path.name] == []


def test_a_put_replaces(store, tmp_path):
    put(store, "run/a", b"first, and longer", tmp_path)
    put(store, "run/a", b"second", tmp_path)
    assert store.read("run/a") == b"second"


def test_a_linked_file_is_whole(store, tmp_path):
    (tmp_path / "sealed").write_bytes(b"sealed")
    store.put(tmp_path / "sealed", "run/a", link=True)
    store.get("run/a", tmp_path / "got", link=True)
    assert (tmp_path / "got").read_bytes() == b"sealed"
    assert store.read("run/a") == b"sealed"
    (tmp_path / "sealed").unlink()
    assert store.read("run/a") == b"sealed"


def test_list(store, tmp_path):
    assert store.list("run/") == []
    for key in ("run/step_00000001/a", "run/step_00000001/b/c", "run/step_00000002/a", "run/leases/x", "running/a"):
        put(store, key, key.encode(), tmp_path)
    assert [(entry.key, entry.num_bytes) for entry in store.list("run/step_")] == [
        ("run/step_00000001/a", 19),
        ("run/step_00000001/b/c", 21),
        ("run/step_00000002/a", 19),
    ]
    assert [entry.key for entry in store.list("run/step_00000001/")] == ["run/step_00000001/a", "run/step_00000001/b/c"]
    assert store.list("run/")[0].key == "run/leases/x"
    assert len(store.list("")) == 5
    assert store.list("nowhere/") == []
    assert all(entry.modified > 1.6e9 for entry in store.list(""))


def test_a_long_listing_is_whole(store):
    keys = [f"run/many/{number:04d}" for number in range(12)]
    for key in keys:
        assert store.put_if_absent(b"x", key)
    assert [entry.key for entry in store.list("run/many/")] == keys


def test_delete_and_exists(store, tmp_path):
    put(store, "run/a/b", b"x", tmp_path)
    assert store.exists("run/a/b")
    assert not store.exists("run/a")
    assert not store.exists("run/a/b/c")
    store.delete("run/a/b")
    store.delete("run/a/b")
    assert not store.exists("run/a/b")
    assert store.list("run/") == []


def test_what_is_not_there(store, tmp_path):
    for ask in (
        lambda: store.read("run/none"),
        lambda: store.get("run/none", tmp_path / "none"),
        lambda: list(store.chunks("run/none")),
    ):
        with pytest.raises(MissingKeyError, match="run/none"):
            ask()
    assert not (tmp_path / "none").exists()


def test_put_if_absent(store):
    assert store.put_if_absent(b"first", "run/a")
    assert not store.put_if_absent(b"second", "run/a")
    assert store.read("run/a") == b"first"
    store.delete("run/a")
    assert store.put_if_absent(b"third", "run/a")
    assert store.read("run/a") == b"third"


def test_of_several_writers_one_wins(store):
    won: list[int] = []
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait(30)
        if store.put_if_absent(b"%d" % number, "run/commit"):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    assert store.read("run/commit") == b"%d" % won[0]


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../../b", "a/", "a\\b", "a\0", "x" * 901])
def test_keys_that_could_leave_the_store_are_refused(store, tmp_path, key):
    for ask in (
        lambda: store.put_if_absent(b"", key),
        lambda: store.read(key),
        lambda: store.delete(key),
        lambda: store.exists(key),
        lambda: store.get(key, tmp_path / "got"),
    ):
        with pytest.raises(StorageError, match="key"):
            ask()


def test_sweep_leaves_what_is_whole(store, tmp_path):
    put(store, "run/a", b"x", tmp_path)
    store.sweep("run/", 0.0)
    assert store.read("run/a") == b"x"


def test_a_guard_changes_nothing(store, tmp_path):
    guarded = GuardedStore(store, "tier", stall_s=60)
    put(guarded, "run/a", BIG, tmp_path)
    assert b"".join(guarded.chunks("run/a")) == BIG
    guarded.get("run/a", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BIG
    assert not guarded.put_if_absent(b"", "run/a")
    assert guarded.exists("run/a")
    assert [entry.key for entry in guarded.list("run/")] == ["run/a"]
    guarded.delete("run/a")
    with pytest.raises(MissingKeyError):
        guarded.read("run/a")
    assert not guarded.breaker.is_open
