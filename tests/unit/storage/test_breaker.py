"""A place that fails is left alone for a while, and tried again."""

from __future__ import annotations

import pytest

from polyturn.storage.breaker import Breaker, SkippedError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> Breaker:
    return Breaker("the tier s3", failures=3, pause_s=30, longest_pause_s=100, clock=clock)


def fail(breaker: Breaker, **how: bool) -> None:
    breaker.enter()
    breaker.failed("it answered 500", **how)


def test_opens_after_failures_in_a_row(breaker):
    fail(breaker)
    fail(breaker)
    breaker.enter()
    breaker.succeeded()
    fail(breaker)
    fail(breaker)
    assert not breaker.is_open
    fail(breaker)
    assert breaker.is_open
    with pytest.raises(SkippedError, match="the tier s3 is skipped and tried again in 30 s: it answered 500"):
        breaker.enter()


def test_one_that_hung_opens_at_once(breaker):
    fail(breaker, hung=True)
    assert breaker.is_open


def test_after_the_pause_one_request_is_the_trial(breaker, clock):
    fail(breaker, hung=True)
    clock.now = 31
    assert not breaker.is_open
    breaker.enter()
    with pytest.raises(SkippedError, match="when the trial that is under way has ended"):
        breaker.enter()
    breaker.succeeded()
    breaker.enter()


def test_the_pause_grows_to_its_longest_and_shrinks_after_a_success(breaker, clock):
    fail(breaker, hung=True)
    for pause in (30, 60, 100, 100):
        clock.now += pause - 1
        with pytest.raises(SkippedError):
            breaker.enter()
        clock.now += 1
        fail(breaker)
    clock.now += 101
    breaker.enter()
    breaker.succeeded()
    fail(breaker, hung=True)
    clock.now += 31
    breaker.enter()
