"""A publishing process is killed at random moments: what is found afterwards is whole, and as new as was promised."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parts.chance import chance, seed
from parts.checkpoints import RUN
from parts.patience import PATIENCE_S
from parts.publisher import big_content
from parts.s3 import BUCKET
from polyturn.storage.stores import open_store
from polyturn.storage.tiers import Tier, Tiers

ROOT = Path(__file__).parents[3]
PUBLISHER = ROOT / "tests" / "parts" / "publisher.py"


def publish_until_killed(work: Path, first: int, places: dict[str, str], delay_s: float, *, lines: int) -> dict[str, int]:
    """Start a publisher, kill it that long after so many lines of it, and return the newest step it promised, by tier."""
    command = [sys.executable, str(PUBLISHER), str(work), str(first), *(f"{name}={url}" for name, url in places.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    timer = threading.Timer(60, process.kill)  # if it never says anything
    timer.start()
    promised: dict[str, int] = {}
    killer: threading.Timer | None = None
    assert process.stdout is not None
    for line in process.stdout:
        lines -= 1
        if killer is None and lines <= 0:
            killer = threading.Timer(delay_s, process.kill)
            killer.start()
        word, step, name = line.split(" ", 2)
        assert word == "published", line
        promised[name.strip()] = int(step)
    assert process.wait(PATIENCE_S) == -9
    timer.cancel()
    process.stdout.close()
    assert promised, "the publisher promised nothing"
    return promised


def survive(tmp_path: Path, places: dict[str, str], *, kills: int, longest_s: float) -> None:
    rng = chance(sorted(places))
    tiers = Tiers(RUN, [Tier(name, open_store(url), keep=2) for name, url in places.items()], say=lambda _: None, grace_s=-1)
    step = 0
    ever: dict[str, int] = {}
    for kill in range(kills):
        ever |= publish_until_killed(
            tmp_path / "work", step, places, rng.uniform(0, longest_s), lines=1 if ever else len(places)
        )
        why = f"kill {kill} of POLYTURN_TEST_SEED={seed()}"
        for tier in tiers.tiers:
            into = tmp_path / f"in {kill} {tier.name}"
            found = Tiers(RUN, [tier], say=lambda _: None).fetch_newest(into, link=False)
            if found.checkpoint is None:
                assert tier.name not in ever, why
                continue
            at = found.checkpoint.manifest.step
            assert at >= ever.get(tier.name, 0), why
            expected = big_content(at)
            assert {path.name for path in into.iterdir()} == {*expected, "MANIFEST.json"}, why
            assert all((into / name).read_bytes() == raw for name, raw in expected.items()), why
        newest = tiers.newest_verified().checkpoint
        assert newest is not None
        step = newest.manifest.step + 1
    assert ever.keys() == places.keys()
    tiers.prune()
    for tier in tiers.tiers:
        left = [entry.key for entry in tier.store.list(f"{RUN}/")]
        whole = {stored.place.key for found, stored in tiers.checkpoints() if found is tier and stored.whole() is not None}
        assert len(whole) <= 2
        assert {key.rpartition("/")[0] for key in left} == whole, "nothing of the dead saves is left"
        assert tier.store.sweep(f"{RUN}/", -1) == 0


def test_local_tiers(tmp_path):
    survive(tmp_path, {"memory": str(tmp_path / "memory"), "disk": str(tmp_path / "disk")}, kills=2, longest_s=0.3)


@pytest.mark.real
def test_local_tiers_ten_times(tmp_path):
    survive(tmp_path, {"memory": str(tmp_path / "memory"), "disk": str(tmp_path / "disk")}, kills=10, longest_s=0.8)


@pytest.mark.real
@pytest.mark.parametrize("server", ["moto", "seaweedfs"])
def test_an_object_store(tmp_path, s3_servers, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_servers.url(server))
    places = {"disk": str(tmp_path / "disk"), "s3": f"s3://{BUCKET}/kills/{tmp_path.name}/"}
    survive(tmp_path, places, kills=10, longest_s=1.5)
