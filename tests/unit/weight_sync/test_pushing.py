"""What a push to servers says of its phases: names, seconds, also of one that failed."""

from __future__ import annotations

from itertools import count

import pytest

from polyturn.errors import WeightSyncError
from polyturn.weight_sync import phases
from polyturn.weight_sync.pushing import Pushing


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by a second whenever a phase ends or begins."""
    monkeypatch.setattr(phases.time, "perf_counter", count().__next__)


def refuse():
    raise OSError("no space")


async def test_a_push_says_how_long_its_phases_took(ticking):
    parts = Pushing([], deadline_s=30.0, token=None, probe=None)

    async def work():
        await parts.alone("save", lambda: None)
        await parts.each("load", lambda server: server.ask("POST", "/load"))
        await parts.alone("save", lambda: None)

    await parts.run(1, work)
    assert parts.seconds == {"save": 2, "load": 1}
    await parts.run(2, lambda: parts.each("load", lambda server: server.ask("POST", "/load")))
    assert parts.seconds == {"load": 1}, "of the last push alone"


async def test_a_phase_that_failed_counts_until_then(ticking):
    parts = Pushing([], deadline_s=30.0, token=None, probe=None)
    with pytest.raises(WeightSyncError, match="weight push 3 failed: OSError: no space"):
        await parts.run(3, lambda: parts.alone("save", refuse))
    assert parts.seconds == {"save": 1}
