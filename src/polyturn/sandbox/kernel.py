"""The system calls of isolation that Python has no names for, through ctypes. Each raises OSError with its name.

Linux only; on another system the first call raises OSError (ENOSYS), so this module may be imported anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_NAME = 1, 4, 38, 15

_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library, raising OSError when it returns -1."""
    if _libc is None:
        raise OSError(errno.ENOSYS, f"{name} is of Linux, this is {sys.platform}")
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(_libc, name)(*converted))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """A system call by number; `what` is its name in an error."""
    if _libc is None:
        raise OSError(errno.ENOSYS, f"{what} is of Linux, this is {sys.platform}")
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move this process (for pid namespaces: its next child) into new namespaces."""
    call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`."""
    kinds = kind.encode() or None
    call("mount", os.fsencode(source), os.fsencode(target), kinds, flags, options.encode() or None)


def unmount(target: str) -> None:
    """Take a mount out of sight; it ends when its last user does."""
    call("umount2", os.fsencode(target), MNT_DETACH)


def pivot_root(root: str, old: str) -> None:
    """Make `root` the root of this mount namespace and put the old one at `old`."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root: its number on {os.uname().machine} is not known here")
    syscall("pivot_root", number, os.fsencode(root), os.fsencode(old))


def prctl(option: int, *arguments: int | bytes) -> None:
    """One of the PR_ operations on this process."""
    call("prctl", option, *arguments, *([0] * (4 - len(arguments))))


def drop_capabilities() -> None:
    """Give up every capability for good: no exec, of no file, gets one back."""
    for number in range(_NUM_CAPABILITIES):
        try:
            prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:  # past the last one of this kernel
                break
            if error.errno != errno.EPERM:  # no CAP_SETPCAP: nothing was held to begin with
                raise
    try:
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc is None:
        raise OSError(errno.ENOSYS, f"capset is of Linux, this is {sys.platform}")
    if _libc.capset(header, nothing) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


def close_all_but(keep: set[int]) -> None:
    """Close every file descriptor that is not in `keep`."""
    lowest = 0
    for kept in sorted(keep):
        if kept > lowest:  # an empty range at 0 would be taken for all
            os.closerange(lowest, kept)
        lowest = kept + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))
