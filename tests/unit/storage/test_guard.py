"""A store that hangs costs seconds: its request is given up, and the next ones are refused at once."""

from __future__ import annotations

import threading

import pytest

from polyturn.errors import DeadlineError, StorageError
from polyturn.storage.breaker import SkippedError
from polyturn.storage.guard import GuardedStore, guarded
from polyturn.storage.progress import tick
from polyturn.storage.stores import LocalStore


class Sick(LocalStore):
    """A local store whose reads do what a test wants."""

    def __init__(self, root, read) -> None:
        super().__init__(root)
        self.read = read


def test_a_request_that_moves_nothing_is_given_up(tmp_path):
    released, ended = threading.Event(), threading.Event()

    def hang(key: str) -> bytes:
        released.wait(60)
        try:
            tick(1)
        except StorageError:
            ended.set()
            raise
        return b""

    store = GuardedStore(Sick(tmp_path, hang), "s3", stall_s=0.2)
    with pytest.raises(DeadlineError, match=r"the tier s3 \(.*\): reading run/a moved nothing for 0.2 s"):
        store.read("run/a")
    with pytest.raises(SkippedError, match="skipped and tried again in 30 s: the tier s3"):
        store.list("run/")
    released.set()
    assert ended.wait(60), "a request that was given up ends at its next tick"


def test_another_way_to_the_same_place_has_the_same_breaker(tmp_path):
    """As a library of somebody else's has, which says little of how far it is."""
    store, never = GuardedStore(LocalStore(tmp_path), "s3", stall_s=60.0), threading.Event()
    assert store.ask(lambda: never.wait(0.3), "saving step 1", stall_s=30.0) is False
    with pytest.raises(DeadlineError, match=r"saving step 2 moved nothing for 0.2 s"):
        store.ask(lambda: never.wait(60), "saving step 2", stall_s=0.2)
    with pytest.raises(SkippedError):
        store.list("run/")
    never.set()


def test_a_request_that_is_too_slow_is_given_up(tmp_path):
    never = threading.Event()

    def drip(key: str) -> bytes:
        while True:
            never.wait(0.02)
            tick(1)

    store = GuardedStore(Sick(tmp_path, drip), "s3", stall_s=0.25)
    with pytest.raises(DeadlineError, match="less than 1,000,000 a second"):
        store.read("run/a")


def test_a_long_request_that_moves_is_not(tmp_path):
    pause = threading.Event()

    def work(key: str) -> bytes:
        for _ in range(12):
            pause.wait(0.05)
            tick(1_000_000)
        return b"done"

    assert GuardedStore(Sick(tmp_path, work), "s3", stall_s=0.3).read("run/a") == b"done"


def test_errors_come_through_and_count(tmp_path):
    def fail(key: str) -> bytes:
        raise StorageError("it answered 500")

    store = GuardedStore(Sick(tmp_path, fail), "s3")
    for _ in range(3):
        with pytest.raises(StorageError, match="it answered 500"):
            store.read("run/a")
    with pytest.raises(SkippedError):
        store.read("run/a")


def test_a_guarded_store_is_not_guarded_twice(tmp_path):
    store = guarded(LocalStore(tmp_path), "disk")
    assert guarded(store, "disk") is store
