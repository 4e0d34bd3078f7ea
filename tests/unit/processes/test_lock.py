"""A lock that ends with whoever holds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parts.patience import PATIENCE_S
from polyturn.errors import ResourceError
from polyturn.processes.lock import FileLock


def test_one_at_a_time(tmp_path):
    with FileLock(tmp_path / "lock", "the folder", wait_s=1.0), pytest.raises(ResourceError, match="the folder is in use by"):
        FileLock(tmp_path / "lock", "the folder", wait_s=0.05)
    FileLock(tmp_path / "lock", "the folder", wait_s=0.05).close()


def test_a_child_that_was_given_it_holds_it_too(tmp_path):
    lock = FileLock(tmp_path / "lock", "the folder", wait_s=1.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.descriptor,))
    lock.close()
    try:
        with pytest.raises(ResourceError):
            FileLock(tmp_path / "lock", "the folder", wait_s=0.05)
    finally:
        child.kill()
        child.wait(PATIENCE_S)
        assert child.stdin is not None
        child.stdin.close()
    FileLock(tmp_path / "lock", "the folder", wait_s=30.0).close()
