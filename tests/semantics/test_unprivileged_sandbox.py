"""The sandbox in the hands of a user without privileges: all hostile programs again, in user namespaces and without any."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.hostile import SECRET
from parts.patience import PATIENCE_S
from polyturn.sandbox import folders

ROOT = Path(__file__).parents[2]
NOBODY = 65534
VERSION = "import sys; sys.exit(sys.version_info < (3, 10))"

pytestmark = pytest.mark.real


def interpreter() -> str | None:
    """A Python that anybody may run."""
    for path in (folders.interpreter(), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            run = subprocess.run(
                [path, "-c", VERSION], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=PATIENCE_S, check=False
            )
        except OSError:
            continue
        if run.returncode == 0:
            return path
    return None


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The code, where anybody can read it, and the bait, which nobody but its owner can."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        shutil.copytree(ROOT / "src" / "polyturn" / "sandbox", path / "polyturn" / "sandbox")
        shutil.copytree(ROOT / "src" / "polyturn" / "processes", path / "polyturn" / "processes")
        for name in ("__init__.py", "errors.py", "programs.py"):
            shutil.copy(ROOT / "src" / "polyturn" / name, path / "polyturn" / name)
        shutil.copytree(ROOT / "tests" / "parts", path / "parts")
        (path / "bait").mkdir(mode=0o755)
        (path / "bait" / "secret").write_text(SECRET)
        shutil.chown(path / "bait", NOBODY, NOBODY)
        shutil.chown(path / "bait" / "secret", NOBODY, NOBODY)
        yield path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; as one, the other tests are this one")
@pytest.mark.parametrize("isolation", ["auto", "filters"])
def test_all_are_contained(isolation: str, place: Path):
    python = interpreter()
    if python is None:
        pytest.skip("there is no Python here that another user may run")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        run = subprocess.run(
            [python, "-m", "parts.hostile_run", isolation, str(place / "bait"), port],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd=place,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["uid"] == NOBODY
    assert found["wrong"] == []
    assert found["passed"] == 1
    assert all(held for name, (held, how) in found["lines"].items() if name not in ("a user of its own", "Landlock")), found[
        "lines"
    ]
    assert [path.name for path in (place / "bait").iterdir()] == ["secret"]
    assert (place / "bait" / "secret").read_text() == SECRET
