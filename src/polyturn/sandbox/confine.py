"""Where a program's process is cut off from the machine, in three stages, and what of it this kernel allows.

1. `enter` (supervisor, once): namespaces without a network and with a root of their own.
2. `enter_for_program` (monitor, per program): its own pid namespace, its own folder.
3. `lock_down` (the program's process, last thing before its code): limits, another user, no privileges, Landlock, seccomp.

Where namespaces are refused, stage 3 alone must hold ("filters"): then a program may start threads and no processes, since
nothing else would make it certain that all of it ends.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from polyturn.sandbox import folders, kernel, landlock, seccomp
from polyturn.sandbox.base import Limits

_FIRST_UID = 2_000_000_000  # far from what systems hand out, to people or to containers
_NUM_UIDS = 100_000_000
_NOBODY = 65534
_MOST_SLOTS = 4096


@dataclass(slots=True)
class Means:
    """What the supervisor found it can do, and for what it can't, why not."""

    namespaces: bool = False
    user_namespace: bool = False
    first_uid: int | None = None
    """Each program gets a user id of its own, from here on; None where it has to keep the supervisor's."""
    counts_processes: bool = False
    """Whether the kernel limits the processes of a program by themselves: those of root it never counts."""
    landlock: int = 0
    seccomp: bool = False
    why_not: dict[str, str] = field(default_factory=dict)

    @property
    def new_processes(self) -> bool:
        """Whether a program may start processes: only where their number is limited and all can be ended at once."""
        return self.namespaces and self.counts_processes

    def as_dict(self) -> dict[str, Any]:
        """For the message to the driver."""
        return asdict(self)


def enter(mode: str, paths: list[str]) -> Means:
    """Stage 1. `mode` is auto, namespaces or filters; a mode that can't be had shows in the result."""
    means = Means(landlock=landlock.version(), seccomp=seccomp.available())
    is_root = os.getuid() == 0
    if not means.landlock:
        means.why_not["landlock"] = "the kernel has no Landlock (Linux 5.13, enabled at boot)"
    if not means.seccomp:
        means.why_not["seccomp"] = f"the system calls of {os.uname().machine} are not known here"
    if mode == "filters":
        means.why_not["namespaces"] = "not asked for"
    else:
        _enter_namespaces(means, paths)
    means.first_uid = _choose_uids(means)
    means.counts_processes = means.first_uid is not None or (means.user_namespace and not is_root)
    return means


def enter_for_program(means: Means) -> None:
    """Stage 2. The next child is process 1 of a new pid namespace."""
    if means.user_namespace:
        _new_user_namespace(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS, inside=_NOBODY)
    elif means.namespaces:
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)


def uid_of(means: Means, slot: int) -> int:
    """The user id of the program in `slot`, as it sees it itself."""
    return os.getuid() if means.first_uid is None else means.first_uid + slot


def become(uid: int) -> None:
    """Be another user, in no group but its own."""
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def lock_down(means: Means, limits: Limits, *, folder: str, address_space_bytes: int, readable: list[str]) -> None:
    """Stage 3, after `become`. `address_space_bytes` is what the interpreter itself has mapped."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    set_limits(limits, address_space_bytes)
    if means.counts_processes:  # else the limit would be for all processes of this user
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.num_processes, limits.num_processes))
    kernel.drop_capabilities()
    if means.landlock and means.namespaces:
        landlock.restrict(["/"], [folder, "/dev/null"])
    elif means.landlock:
        landlock.restrict([*readable, *folders.DEVICES, "/etc/ld.so.cache"], [folder, "/dev/null"])
    if means.seccomp:
        alone = None if means.namespaces else os.getpid()
        same_user = means.first_uid is None
        seccomp.install(seccomp.build(new_processes=means.new_processes, same_user=same_user, signals_to=alone))


def set_limits(limits: Limits, address_space_bytes: int) -> None:
    """The limits that the kernel keeps for each process."""
    cpu_s = math.ceil(limits.cpu_s)
    hard = {
        resource.RLIMIT_AS: limits.memory_bytes + address_space_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in hard.items():
        resource.setrlimit(which, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _enter_namespaces(means: Means, paths: list[str]) -> None:
    """Try as root, else inside a user namespace; in a child first, as a half-built root can't be taken back."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    reasons = []
    for user_namespace in (False, True):

        def attempt(user_namespace: bool = user_namespace) -> None:
            if user_namespace:
                _new_user_namespace(flags, inside=0)
            else:
                kernel.unshare(flags)
            folders.build_root(paths, keep_proc=user_namespace)
            means.namespaces, means.user_namespace = True, user_namespace

        def rehearse(attempt: Any = attempt) -> None:
            attempt()
            enter_for_program(means)

        problem = _in_child(rehearse)
        if problem is None:
            attempt()
            return
        reasons.append(problem)
    means.why_not["namespaces"] = f"{reasons[0]}; in a user namespace: {reasons[1]}"


def _new_user_namespace(flags: int, *, inside: int) -> None:
    """Enter a user namespace, with others owned by it, in which this user is `inside`."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


def _choose_uids(means: Means) -> int | None:
    """The first of `_MOST_SLOTS` unused user ids, if this process may become them and they can read Python's files."""
    if os.getuid() != 0 or means.user_namespace:
        means.why_not["uid"] = "only root can hand out user ids"
        return None
    spread = os.getpid() * _MOST_SLOTS % _NUM_UIDS
    reasons = []
    for first in (_FIRST_UID + spread, _NOBODY - 1 - _MOST_SLOTS):

        def attempt(uid: int = first) -> None:
            become(uid)
            os.close(os.open(os.__file__, os.O_RDONLY))

        problem = _in_child(attempt)
        if problem is None:
            return first
        reasons.append(problem)
    means.why_not["uid"] = f"another user could not read Python's files ({reasons[0]})"
    return None


def _in_child(attempt: Any) -> str | None:
    """Run `attempt` in a process of its own; None, or why it raised OSError."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = ""
        try:
            attempt()
        except OSError as error:
            message = error.strerror or str(error)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0 if not message else 1)
    os.close(writer)
    with open(reader, "rb") as file:  # noqa: PTH123
        message = file.read().decode()
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else message or f"the attempt ended with status {status}"
