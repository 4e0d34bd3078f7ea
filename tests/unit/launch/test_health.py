"""Who hangs, on clocks that are turned by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from polyturn.launch.health import Health
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.role import heartbeat_file


class Scene:
    """A run folder, a supervisor's clocks, and roles that write when they are told to."""

    def __init__(self, folder):
        self.folder = RunFolder.create(folder, "run").root
        self.now, self.wall = 1000.0, 5000.0
        self.health = Health(self.folder, silence_s=60.0, overdue_s=15.0, clock=lambda: self.now, wall=lambda: self.wall)

    def beat(self, role, *waits, pid=None):
        """`waits` are (what, seconds since it began, deadline after that or None)."""
        rows = [
            {"what": what, "since": self.wall - since, "deadline": None if limit is None else self.wall - since + limit}
            for what, since, limit in waits
        ]
        beat = {"role": role, "pid": pid or os.getpid(), "host": "here", "written": self.wall}
        heartbeat_file(self.folder, role).write_text(json.dumps(beat | {"num_waits": len(rows), "waits": rows}))

    def look(self, *roles):
        return [(loss.role, loss.words) for loss in self.health.look(roles)]

    def later(self, seconds, *roles):
        """Time goes by as it does for a supervisor that looks all the time."""
        for _ in range(round(seconds)):
            self.now, self.wall = self.now + 1, self.wall + 1
            found = self.look(*roles)
        return found


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_a_fresh_heartbeat_is_fine_and_none_is_no_business_of_it(scene):
    assert scene.later(600, "engine-0") == []
    scene.beat("engine-0", ("the next request", 3600, None))
    assert scene.look("engine-0", "engine-1") == []


def test_silence_counts_from_the_last_change(scene):
    scene.beat("engine-0", ("the next request", 4, 600), ("a thread", 2, None))
    assert scene.later(60, "engine-0") == []
    scene.beat("engine-0", ("the next request", 4, 600), ("a thread", 2, None))
    assert scene.later(61, "engine-0") == []
    ((role, words),) = scene.later(1, "engine-0")
    assert role == "engine-0"
    assert words == (
        "hangs: no heartbeat for 61 s; it had waited 4 s for the next request, with a deadline of 600 s, and 1 more"
    )


def test_a_process_that_has_ended_is_not_silent(scene):
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    child.wait()
    scene.beat("engine-0", pid=child.pid)
    assert scene.later(100, "engine-0") == []


def test_nobody_is_silent_because_the_supervisor_stood_still(scene):
    scene.beat("engine-0")
    scene.look("engine-0")
    scene.now, scene.wall = scene.now + 500, scene.wall + 500
    assert scene.look("engine-0") == []
    scene.beat("engine-0")
    assert scene.look("engine-0") == []
    assert scene.later(62, "engine-0")[0][0] == "engine-0"


def test_a_clock_that_is_set_makes_nobody_silent(scene):
    scene.beat("engine-0")
    scene.look("engine-0")
    scene.wall += 86400
    assert scene.later(30, "engine-0") == []


def test_a_wait_past_its_deadline(scene):
    scene.beat("trainer-0", ("12 trajectories of step 3", 614, 600), ("another", 1, 600))
    assert scene.look("trainer-0") == []
    scene.beat("trainer-0", ("12 trajectories of step 3", 616, 600), ("another", 3, 600))
    assert scene.look("trainer-0") == [
        ("trainer-0", "hangs: it waits for 12 trajectories of step 3, and is 16 s past its deadline of 600 s")
    ]


def test_a_machine_that_slept_passes_nobodys_deadline(scene):
    scene.beat("trainer-0", ("a step", 10, 600))
    scene.look("trainer-0")
    scene.wall += 3600  # the monotonic clock stood still
    scene.beat("trainer-0", ("a step", 3610, 600))
    assert scene.look("trainer-0") == []
    scene.now, scene.wall = scene.now + 4, scene.wall + 620
    scene.beat("trainer-0", ("a step", 4230, 600))
    scene.now += 3
    assert scene.look("trainer-0") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"waits": 3}', '{"role": "x", "waits": []}', "\xff"])
def test_a_file_that_says_nothing_is_no_sign_of_life(scene, text):
    scene.beat("engine-0")
    scene.look("engine-0")
    heartbeat_file(scene.folder, "engine-0").write_text(text, encoding="latin-1")
    assert scene.look("engine-0") == []
    assert scene.later(61, "engine-0")[0][0] == "engine-0"


def test_silent_for_less_when_asked(scene):
    scene.beat("engine-0")
    scene.later(8, "engine-0")
    assert [loss.role for loss in scene.health.silent_for(["engine-0", "engine-1"], 5.0)] == ["engine-0"]
    assert scene.health.silent_for(["engine-0"], 9.0) == []
