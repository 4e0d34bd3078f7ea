"""What is put aside is never looked through again, and what is garbage by then is collected."""

from __future__ import annotations

import gc
import weakref

import pytest

from polyturn.processes.garbage import put_aside


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before():
    gc.unfreeze()  # what `conftest.py` put aside
    yield
    gc.freeze()


def test_garbage_goes_and_the_rest_is_out_of_sight():
    gone, stays = weakref.ref(Ring()), Ring()
    put_aside()
    assert gone() is None
    assert gc.get_freeze_count() > 1000
    assert not any(one is stays for one in gc.get_objects())


def test_what_comes_later_is_collected_as_ever():
    put_aside()
    later = weakref.ref(Ring())
    gc.collect()
    assert later() is None
