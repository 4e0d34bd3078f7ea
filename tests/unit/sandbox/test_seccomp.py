"""What the filter says to each system call, on every machine it can be made for: the filter is run here, step by step."""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace

import pytest

from polyturn.sandbox import seccomp

ALLOWED, EPERM, EAGAIN, ENOSYS = "allowed", 1, 11, 38
NUMBERS = {
    "x86_64": {
        "read": 0, "mmap": 9, "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "fork": 57, "execve": 59, "kill": 62,
        "ptrace": 101, "setsid": 112, "prctl": 157, "mount": 165, "tkill": 200, "tgkill": 234, "unshare": 272, "prlimit64": 302,
        "memfd_create": 319, "bpf": 321, "io_uring_setup": 425, "clone3": 435, "chmod": 90, "setpriority": 141,
    },
    "aarch64": {
        "read": 63, "mmap": 222, "socket": 198, "connect": 203, "socketpair": 199, "clone": 220, "execve": 221, "kill": 129,
        "ptrace": 117, "setsid": 157, "prctl": 167, "mount": 40, "tkill": 130, "tgkill": 131, "unshare": 97, "prlimit64": 261,
        "memfd_create": 279, "bpf": 280, "io_uring_setup": 425, "clone3": 435, "fchmodat": 53, "setpriority": 140,
    },
}  # fmt: skip
MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(code: bytes, machine: int, number: int, first: int = 0) -> str | int:
    """Run the filter as the kernel does: `allowed`, `killed` or the error number."""
    steps = [struct.unpack_from("HBBI", code, place) for place in range(0, len(code), 8)]
    data = struct.pack("=iIQQ", number, machine, 0, first)
    place, value = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[place]
        place += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: "killed"}.get(operand, operand & 0xFFFF)
        else:
            test = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            place += if_true if test else if_false


@pytest.fixture(params=sorted(NUMBERS))
def machine(request, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param, sysname="Linux"))
    return request.param


@pytest.mark.parametrize(
    ("name", "first", "decision"),
    [
        ("read", 0, ALLOWED),
        ("mmap", 0, ALLOWED),
        ("execve", 0, ALLOWED),
        ("setsid", 0, ALLOWED),
        ("kill", 1, ALLOWED),
        ("prctl", 1, ALLOWED),
        ("socket", 1, EPERM),
        ("socket", 2, EPERM),
        ("connect", 3, EPERM),
        ("socketpair", 1, ALLOWED),
        ("socketpair", 2, EPERM),
        ("ptrace", 0, EPERM),
        ("mount", 0, EPERM),
        ("unshare", 0, EPERM),
        ("bpf", 0, EPERM),
        ("io_uring_setup", 0, EPERM),
        ("memfd_create", 0, EPERM),
        ("prlimit64", 0, ALLOWED),
        ("prlimit64", 1, EPERM),
        ("clone", 17, ALLOWED),
        ("clone", 0x3D0F00, ALLOWED),
        ("clone", 0x10000000 | 17, EPERM),
        ("clone", 0x00020000 | 17, EPERM),
        ("clone3", 0, ENOSYS),
        ("setpriority", 0, ALLOWED),
    ],
)
def test_of_a_program_in_namespaces(machine, name, first, decision):
    code = seccomp.build(new_processes=True)
    assert decide(code, MACHINE[machine], NUMBERS[machine][name], first) == decision


@pytest.mark.parametrize(
    ("name", "first", "decision"),
    [
        ("read", 0, ALLOWED),
        ("clone", 17, EAGAIN),
        ("clone", 0x3D0F00, ALLOWED),
        ("kill", 500, ALLOWED),
        ("kill", 501, EPERM),
        ("kill", 1, EPERM),
        ("kill", 0, EPERM),
        ("kill", 0xFFFFFFFF, EPERM),
        ("tgkill", 500, ALLOWED),
        ("tgkill", 501, EPERM),
        ("tkill", 500, EPERM),
        ("prctl", 1, EPERM),
        ("prctl", 15, ALLOWED),
        ("setpriority", 0, EPERM),
    ],
)
def test_of_a_program_without_namespaces(machine, name, first, decision):
    code = seccomp.build(new_processes=False, same_user=True, signals_to=500)
    assert decide(code, MACHINE[machine], NUMBERS[machine][name], first) == decision


def test_other_ways_into_the_kernel(machine):
    code = seccomp.build(new_processes=True)
    assert decide(code, 0x40000003, 3) == "killed", "a 32-bit call"
    if machine == "x86_64":
        assert decide(code, MACHINE[machine], 0x40000000 | 41) == EPERM, "an x32 call"
        assert decide(seccomp.build(new_processes=False), MACHINE[machine], 57) == EAGAIN


def test_a_machine_that_is_not_known(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="s390x", sysname="Linux"))
    assert not seccomp.available()
    with pytest.raises(OSError, match="s390x are not known"):
        seccomp.build(new_processes=True)
