"""Real disks that are full or can't be written to, in a mount namespace of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
from parts.checkpoints import RUN, make, holds
from polyturn.errors import StorageError
from polyturn.storage.manifest import seal
from polyturn.storage.stores import LocalStore
from polyturn.storage.tiers import Tier, Tiers

base = Path(sys.argv[1])
small = base / "small"
small.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(small)], check=True)
said = []
tiers = Tiers(RUN, [Tier("small", LocalStore(small)), Tier("disk", LocalStore(base / "disk"), every=10)], say=said.append)
results = {}
def publish(name, step, content=None):
    folder, manifest = make(base / "work", step, content)
    results[name] = [[outcome.tier, outcome.ok, outcome.sentence] for outcome in tiers.publish(folder, manifest)]
publish("fits", 10)
publish("full", 20, {"__0_0.distcp": bytes(1_000_000)})
results["left when full"] = [path.name for path in small.rglob("*") if ".draft-" in path.name]
subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
publish("read only", 30)
found = tiers.fetch_newest(base / "in")
results["newest"] = [found.checkpoint.tier, found.checkpoint.manifest.step, holds(base / "in", 30)]
alone = Tiers(RUN, [Tier("small", LocalStore(small))], say=said.append)
results["still there"] = alone.fetch_newest(base / "from a read-only disk").checkpoint.manifest.step
results["pruned"] = alone.prune()
try:
    (small / "lookup" / "step_00000099").mkdir()
except OSError as error:
    results["mkdir"] = error.strerror
try:
    seal(small / "lookup" / "step_00000010", run_id=RUN, step=10, policy_version=1)
except StorageError as error:
    results["seal"] = str(error)
print(json.dumps(results))
"""


def can_mount(tmp_path: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    (tmp_path / "probe").mkdir()
    mount = f"mount -t tmpfs none {tmp_path / 'probe'}"
    return subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, timeout=PATIENCE_S).returncode == 0


def test_full_and_read_only_disks(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("this machine allows no mount namespaces")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])}
    command = ["unshare", "-rm", sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    assert [ok for _, ok, _ in results["fits"]] == [True, True]
    small, disk = results["full"]
    assert (small[1], disk[1]) == (False, True)
    assert "No space left on device; free space there, or keep fewer checkpoints" in small[2]
    assert results["left when full"] == [], "the draft is removed, so that the disk does not stay full"
    small, disk = results["read only"]
    assert (small[1], disk[1]) == (False, True)
    assert "Read-only file system; mount it writable, or give another folder" in small[2]
    assert results["newest"] == ["disk", 30, True]
    assert results["still there"] == 10, "what is on a read-only disk can be read, without a lease"
    assert "Read-only" in results["seal"]


def test_a_folder_without_permission(tmp_path):
    from polyturn.storage.stores import AccessError, LocalStore

    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(AccessError, match="no permission for run/a"):
        LocalStore(tmp_path / "closed").put_if_absent(b"x", "run/a")
