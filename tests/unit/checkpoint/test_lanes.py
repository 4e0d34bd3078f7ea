"""Uploads of one tier: one at a time, the newest of those that wait."""

from __future__ import annotations

import threading

from polyturn.checkpoint.lanes import Lane


def test_the_newest_that_waits_is_next_and_the_end_waits_for_it():
    begun, go, done = threading.Event(), threading.Event(), list[int]()

    def work(thing: int) -> None:
        begun.set()
        assert go.wait(60)
        done.append(thing)

    lane = Lane("uploads", work)
    assert lane.add(1) == []
    assert begun.wait(60)
    assert [lane.add(2), lane.add(3), lane.add(4)] == [[], [2], [3]]
    go.set()
    lane.close()
    assert done == [1, 4]
