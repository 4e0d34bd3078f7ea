"""Which lines of defence hold here: a program of our own tries what programs must not be able to do, and tells how it went."""

from __future__ import annotations

import json
from typing import Any

from polyturn.errors import IsolationError, SandboxError
from polyturn.sandbox.base import MIB, Limits, Line, RunResult
from polyturn.sandbox.confine import Means

PROBE_LIMITS = Limits(wall_s=60, cpu_s=60, memory_bytes=256 * MIB, num_processes=8, num_files=64, file_bytes=4 * MIB)
"""The address space of its 7 threads must fit in, so that it is their number that is tried."""

PROBE = r"""
import ctypes, json, os, socket, threading
found = {}

def gets(name, attempt):
    try:
        found[name] = attempt() or "done"
    except BaseException as error:
        found[name] = None

def reach():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 53))

def write():
    for folder in ("/", "/etc", "/usr/lib", "/var", "/dev", "/proc/self", os.path.dirname(os.__file__)):
        path = f"{folder}/polyturn-probe-{os.getpid()}"
        try:
            open(path, "x").close()
        except OSError:
            continue
        os.unlink(path)
        return path

def read():
    for path in ("/etc/shadow", "/etc/hostname", "/proc/1/environ"):
        try:
            return open(path).read() and path
        except OSError:
            continue

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def crowd():
    stop, threads = threading.Event(), []
    try:
        while len(threads) < 12:
            threads.append(threading.Thread(target=stop.wait))
            threads[-1].start()
    finally:
        stop.set()

for name, attempt in {"socket": lambda: socket.socket() and None, "reach": reach, "fork": fork, "crowd": crowd,
                      "memory": lambda: len(bytearray(256 << 20)), "root": lambda: os.setuid(0) if os.getuid() else 1 / 0,
                      "signal": lambda: os.kill(os.getppid(), 0) if os.getpid() != 2 else os.kill(1, 0)}.items():
    gets(name, attempt)
found["write"], found["read"] = write(), read()
libc = ctypes.CDLL(None)
found |= {"no_new_privs": libc.prctl(39, 0, 0, 0, 0), "seccomp": libc.prctl(21, 0, 0, 0, 0)}
found |= {"pid": os.getpid(), "uid": os.getuid(), "proc": os.path.exists("/proc/self/status")}
print(json.dumps(found))
"""


def judge(means: Means, result: RunResult) -> tuple[Line, ...]:
    """What the probe found, a line each. Raises SandboxError when the probe itself could not run."""
    if not result.ok:
        raise SandboxError(
            f"the sandbox can't run a program of its own ({result.reason}: {result.stderr[-500:].strip()}); on this machine it "
            "needs another isolation, or another Python"
        )
    found = json.loads(result.stdout)
    return (
        _network(means, found),
        _files(means, found),
        _group(means, found),
        _memory(means, found),
        _processes(means, found),
        _identity(means, found),
        _system_calls(means, found),
        _landlock(means),
    )


def insist(lines: tuple[Line, ...], *, unsafe: bool) -> None:
    """Raise IsolationError, naming every needed line that does not hold, unless `unsafe`."""
    missing = [f"{line.name} ({line.how})" for line in lines if line.needed and not line.held]
    if missing and not unsafe:
        raise IsolationError(
            f"model-written code can't be kept apart on this machine: {'; '.join(missing)}; run as root, allow user "
            "namespaces, use a kernel with Landlock, run programs elsewhere (the http sandbox), or accept it with unsafe=true"
        )


def _because(means: Means, *reasons: str) -> str:
    texts = [f"{reason}: {means.why_not[reason]}" for reason in reasons if reason in means.why_not]
    return "; ".join(texts) or "the probe got through"


def _line(name: str, held: bool, how: list[str], why_not: str, *, needed: bool = True) -> Line:
    return Line(name=name, held=held, how=", ".join(how) if held else why_not, needed=needed)


def _network(means: Means, found: dict[str, Any]) -> Line:
    how = ["a network namespace without devices"] if means.namespaces else []
    how += ["no sockets (seccomp)"] if found["socket"] is None else []
    return _line("no network", found["reach"] is None, how, _because(means, "namespaces", "seccomp"))


def _files(means: Means, found: dict[str, Any]) -> Line:
    how = ["a private root (mount namespace)"] if means.namespaces else []
    how += [f"Landlock version {means.landlock}"] if means.landlock else []
    reached = [f"reads {found['read']}"] if found["read"] else []
    reached += [f"writes {found['write']}"] if found["write"] else []
    held = not reached and bool(how)
    return _line("no files but its own", held, how, "; ".join([*reached, _because(means, "namespaces", "landlock")]))


def _group(means: Means, found: dict[str, Any]) -> Line:
    held = (means.namespaces and found["pid"] == 2) or found["fork"] is None
    how = ["a pid namespace"] if means.namespaces else ["it can't start processes (seccomp)"]
    return _line("ends as a whole", held, how, _because(means, "namespaces", "seccomp"))


def _memory(means: Means, found: dict[str, Any]) -> Line:
    watched = found["proc"] or not means.namespaces  # without them, the one process is watched from outside
    how = ["address space of each process", "memory of all of them watched" if watched else "their number"]
    return _line("memory capped", found["memory"] is None, how, "a program got more than its limit")


def _processes(means: Means, found: dict[str, Any]) -> Line:
    if found["fork"] is None:
        return _line("number of processes capped", True, ["one, its threads bounded by its address space"], "")
    return _line("number of processes capped", found["crowd"] is None, ["RLIMIT_NPROC"], _because(means, "uid"))


def _identity(means: Means, found: dict[str, Any]) -> Line:
    held = found["root"] is None and found["no_new_privs"] == 1 and (means.first_uid is not None or means.user_namespace)
    how = ["a user namespace" if means.user_namespace else f"user id {found['uid']}", "no capabilities", "no_new_privs"]
    return _line("a user of its own", held, how, _because(means, "uid"), needed=False)


def _system_calls(means: Means, found: dict[str, Any]) -> Line:
    held = found["seccomp"] == 2
    return _line("dangerous system calls refused", held, ["seccomp"], _because(means, "seccomp"), needed=False)


def _landlock(means: Means) -> Line:
    how = [f"version {means.landlock}"]
    return _line("Landlock", means.landlock > 0, how, _because(means, "landlock"), needed=False)
