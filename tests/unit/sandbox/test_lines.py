"""What the probe found becomes lines, and a missing one that is needed is refused with its reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polyturn.errors import IsolationError, SandboxError, UserError
from polyturn.sandbox import lines
from polyturn.sandbox.base import RunResult
from polyturn.sandbox.confine import Means

FULL = Means(namespaces=True, first_uid=2_000_000_000, counts_processes=True, landlock=7, seccomp=True)
HELD = {
    "socket": None,
    "reach": None,
    "fork": "done",
    "crowd": None,
    "memory": None,
    "root": None,
    "signal": None,
    "write": None,
    "read": None,
    "pid": 2,
    "uid": 2_000_000_000,
    "no_new_privs": 1,
    "seccomp": 2,
    "proc": True,
}


def result(**found) -> RunResult:
    return RunResult(reason="ok", exit_code=0, signal=None, stdout=json.dumps(HELD | found), stderr="", seconds=0.0, cpu_s=0.0)


def test_all_of_it_holds():
    judged = lines.judge(FULL, result())
    assert all(line.held for line in judged)
    assert str(judged[0]) == "held      no network: a network namespace without devices, no sockets (seccomp)"
    lines.insist(judged, unsafe=False)


@pytest.mark.parametrize(
    ("means", "found", "name", "how"),
    [
        ({}, {"reach": "done"}, "no network", "the probe got through"),
        ({"why_not": {"namespaces": "no"}}, {"reach": "done", "socket": "done"}, "no network", "namespaces: no"),
        ({}, {"read": "/etc/shadow"}, "no files but its own", "reads /etc/shadow"),
        ({}, {"write": "/etc/x"}, "no files but its own", "writes /etc/x"),
        ({"namespaces": False, "landlock": 0, "why_not": {"landlock": "old"}}, {}, "no files but its own", "landlock: old"),
        ({"namespaces": False, "why_not": {"seccomp": "old"}}, {"pid": 99}, "ends as a whole", "seccomp: old"),
        ({}, {"pid": 99}, "ends as a whole", "the probe got through"),
        ({}, {"memory": "done"}, "memory capped", "a program got more than its limit"),
        ({"why_not": {"uid": "not root"}}, {"crowd": "done"}, "number of processes capped", "uid: not root"),
    ],
)
def test_a_needed_line_that_does_not_hold_is_refused(means, found, name, how):
    judged = lines.judge(replace(FULL, **means), result(**found))
    (line,) = [line for line in judged if line.name == name]
    assert not line.held
    assert how in line.how
    assert str(line).startswith("NOT held")
    with pytest.raises(IsolationError, match="accept it with unsafe=true") as caught:
        lines.insist(judged, unsafe=False)
    assert name in str(caught.value)
    assert isinstance(caught.value, UserError)
    lines.insist(judged, unsafe=True)


def test_lines_that_are_a_bonus_may_be_missing():
    judged = lines.judge(replace(FULL, landlock=0, first_uid=None), result(seccomp=0, socket="done", root="done"))
    assert {line.name for line in judged if not line.held} == {
        "a user of its own",
        "dangerous system calls refused",
        "Landlock",
    }
    lines.insist(judged, unsafe=False)


def test_a_probe_that_does_not_run_is_a_broken_sandbox():
    broken = replace(result(), reason="error", stderr="ImportError: no module named os")
    with pytest.raises(SandboxError, match=r"can't run a program of its own .*no module named os"):
        lines.judge(FULL, broken)
