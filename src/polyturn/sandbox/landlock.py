"""Landlock: a process gives up all files but those named, and, where the kernel can, TCP, abstract sockets and outward signals.

A second line behind a private root, and the first where there is none. It needs no privilege and can't be undone.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from polyturn.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_RULE_PATH_BENEATH = 1
_GET_VERSION = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # making character devices, sockets and block devices: granted nowhere
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version; 16 from version 5 on
_TCP = 0b11
_SCOPES = 0b11  # abstract unix sockets, signals


def version() -> int:
    """The kernel's Landlock version, 0 without Landlock."""
    try:
        return kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _GET_VERSION)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process, and all it starts, only `readable` paths to read and execute and `writable` ones to do all with.

    Paths that don't exist are left out. Needs no_new_privs. Raises OSError where Landlock is missing.
    """
    known = version()
    handled = (1 << _NUM_FILE_RIGHTS.get(known, 16)) - 1
    attributes = struct.pack("QQQ", handled, _TCP, _SCOPES)[: 24 if known >= 6 else 16 if known >= 4 else 8]
    ruleset = kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~_DEVICES)
        kernel.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(found).st_mode):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, found))
        kernel.syscall("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(found)
