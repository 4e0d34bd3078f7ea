from __future__ import annotations

import json
import logging
import os
import time

from polyturn.processes.heartbeat import Heartbeat, read_heartbeat


def read_until(path, condition, limit_s: float = 10.0):
    """The first heartbeat that meets `condition`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        beat = read_heartbeat(path)
        if beat is not None and condition(beat):
            return beat
        time.sleep(0.005)
    raise AssertionError(f"the heartbeat never became what was expected, last: {beat}")


def test_the_current_wait_can_be_read_while_it_lasts(tmp_path):
    path = tmp_path / "driver.json"
    assert read_heartbeat(path) is None
    with Heartbeat(path, "driver", interval_s=0.01) as heartbeat:
        before = time.time()
        with heartbeat.waiting("12 trajectories of step 3", deadline_s=600):
            beat = read_until(path, lambda beat: beat.num_waits == 1)
        (wait,) = beat.waits
        assert wait.what == "12 trajectories of step 3"
        assert before <= wait.since <= beat.written
        assert wait.deadline == wait.since + 600
        assert (beat.role, beat.pid) == ("driver", os.getpid())
        assert read_until(path, lambda beat: beat.num_waits == 0).waits == ()


def test_the_most_urgent_wait_comes_first_and_the_list_is_cut(tmp_path):
    path = tmp_path / "driver.json"
    with Heartbeat(path, "driver", interval_s=0.01) as heartbeat:
        with heartbeat.waiting("no end"), heartbeat.waiting("late", 100), heartbeat.waiting("soon", 5):
            beat = read_until(path, lambda beat: beat.num_waits == 3)
        assert [wait.what for wait in beat.waits] == ["soon", "late", "no end"]
        open_waits = [heartbeat.waiting(f"turn {number}", 10) for number in range(100)]
        for wait in open_waits:
            wait.__enter__()
        beat = read_until(path, lambda beat: beat.num_waits == 100)
        assert len(beat.waits) == 8
        for wait in open_waits:
            wait.__exit__(None, None, None)


def test_it_keeps_beating_during_one_long_wait(tmp_path):
    path = tmp_path / "driver.json"
    with Heartbeat(path, "driver", interval_s=0.01) as heartbeat, heartbeat.waiting("one thing"):
        first = read_until(path, lambda beat: beat.num_waits == 1)
        later = read_until(path, lambda beat: beat.written > first.written)
        assert later.waits == first.waits


def test_waits_do_not_touch_the_disk(tmp_path):
    path = tmp_path / "driver.json"
    with Heartbeat(path, "driver", interval_s=3600) as heartbeat:
        written = path.stat().st_mtime_ns
        for _ in range(1000):
            with heartbeat.waiting("a turn", 1):
                pass
        assert path.stat().st_mtime_ns == written


def test_a_reader_never_sees_half_a_file_and_nothing_is_left_over(tmp_path):
    path = tmp_path / "driver.json"
    with Heartbeat(path, "driver", interval_s=0.0005) as heartbeat, heartbeat.waiting("x" * 5000):
        for _ in range(500):
            json.loads(path.read_text())
    assert [item.name for item in tmp_path.iterdir()] == ["driver.json"]
    assert read_heartbeat(path).num_waits == 0


def test_a_disk_that_refuses_is_logged_once_and_ends_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), Heartbeat(tmp_path / "gone" / "driver.json", "driver", interval_s=0.005):
        time.sleep(0.05)
    assert len(caplog.messages) == 1
    assert "can't be written (No such file or directory)" in caplog.messages[0]


def test_a_wait_that_raises_is_over(tmp_path):
    heartbeat = Heartbeat(tmp_path / "driver.json", "driver")
    with heartbeat:
        try:
            with heartbeat.waiting("nothing"):
                raise KeyError
        except KeyError:
            pass
    assert read_heartbeat(tmp_path / "driver.json").num_waits == 0
