"""Amazon's own library under our manifest: each way in which it loses data by itself is a sentence here, or costs nothing.

It saves to our daemon, which speaks the protocol of HyperPod's, and to a real S3 server; nothing of it is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parts.memory_tier import memory_tier
from parts.s3 import BUCKET
from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.checkpoint.files import rank_errors, read_rest, read_state
from polyturn.checkpoint.places import tiers_of
from polyturn.checkpoint.sagemaker import import_library
from polyturn.checkpoint.writing import Settings
from polyturn.config.checkpoint_section import CheckpointEvery, CheckpointKeep, CheckpointSection
from polyturn.errors import MissingDependencyError
from polyturn.loop.resume import checkpoint_or_nothing
from polyturn.storage.manifest import verify
from polyturn.storage.stores.hyperpod import HyperPodStore

NOBODY = "http://127.0.0.1:9"


def state(step: int) -> dict[str, object]:
    modules = {"policy": {"model": {"w": torch.full((100, 70), float(step)), "h": torch.arange(9).bfloat16() + step}}}
    return {"modules": modules, "loop": {"step": step}}


class Run:
    """A run that saves in this process, and what it has said."""

    def __init__(self, folder: Path, *, daemon: str, url: str | None) -> None:
        self.folder, self.said = folder, list[str]()
        self.section = CheckpointSection(
            backend="sagemaker_tiered",
            memory_daemon=daemon,
            every=CheckpointEvery(memory=1, disk=None),
            keep=CheckpointKeep(memory=3, s3=3),
            url=url,
        )
        settings = Settings(run_id="run", checkpoints=folder / "checkpoints", section=self.section)
        self._saver = Checkpointer(settings, say=self.said.append, separate=False, log=folder / "log")

    def save(self, step: int, *tiers: str) -> list[str]:
        self._saver.save(state(step), step=step, policy_version=step, tiers=tiers, meta={"of": "a test"})
        return self._saver.wait(step, 120.0)

    def close(self) -> None:
        self._saver.close(10.0)

    def tiers(self):
        return tiers_of(self.section, "run", self.folder / "checkpoints", self.said.append)

    def newest(self) -> tuple[str, int, tuple[str, ...]]:
        """Tier and step that a resume takes, loaded and compared, and what was passed over."""
        into = self.folder / uuid.uuid4().hex
        found = self.tiers().fetch_newest(into)
        assert found.checkpoint is not None, (found.rejected, found.unreachable)
        step = found.checkpoint.manifest.step
        assert verify(into) is None
        assert found.checkpoint.manifest.meta == {"of": "a test"}
        back, expected = read_state(into, read_rest(into)), state(step)
        for name, tensor in expected["modules"]["policy"]["model"].items():
            assert torch.equal(back["modules"]["policy"]["model"][name], tensor)
        assert back["loop"] == {"step": step}
        return found.checkpoint.tier, step, found.rejected


@contextlib.contextmanager
def run(folder: Path, *, daemon: str = NOBODY, url: str | None = None):
    made = Run(folder, daemon=daemon, url=url)
    try:
        yield made
    finally:
        made.close()


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "amzn_sagemaker_checkpointing", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'polyturn\[sagemaker-checkpoints\]'"):
        import_library()


@pytest.fixture
def library():
    pytest.importorskip("amzn_sagemaker_checkpointing")


@pytest.fixture
def daemon(tmp_path):
    with memory_tier(tmp_path / "daemon", hyperpod=True) as url:
        yield url.replace("memory-tier", "http")


@pytest.fixture(params=["moto", "seaweedfs"])
def bucket(request, s3_servers, monkeypatch):
    """A prefix of a bucket, and a client that can do damage there."""
    import boto3

    endpoint = s3_servers.url(request.param)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    client = boto3.session.Session().client("s3", endpoint_url=endpoint)
    prefix = f"library/{uuid.uuid4().hex}"

    def key(step: int, name: str) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{prefix}/run/rank_0/step_{step}/{name}"}

    def change(step: int, name: str, by) -> None:
        raw = client.get_object(**key(step, name))["Body"].read()
        client.put_object(**key(step, name), Body=by(raw))

    yield SimpleNamespace(
        url=f"s3://{BUCKET}/{prefix}", change=change, delete=lambda step, name: client.delete_object(**key(step, name))
    )
    client.close()


pytestmark = [pytest.mark.filterwarnings("ignore:.*:ResourceWarning"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
real = pytest.mark.real


@real
def test_both_tiers_and_the_readers_of_both(library, tmp_path, daemon, bucket, monkeypatch):
    with run(tmp_path, daemon=daemon, url=bucket.url) as saved:
        assert saved.save(6, "memory", "s3") == []
        assert saved.save(7, "memory") == []
        assert saved.newest() == ("memory", 7, ())
        assert [(tier.name, stored.step) for tier, stored in saved.tiers().checkpoints()] == [
            ("memory", 7),
            ("memory", 6),
            ("s3", 6),
        ]
        assert saved.said == []

    from amzn_sagemaker_checkpointing.checkpointing.filesystem.reader import SageMakerTieredStorageReader
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_base import _TieredStorageBase
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from torch.distributed.checkpoint import load

    made = import_library()
    monkeypatch.setattr(InMemoryClientConfig.__init__, "__defaults__", (daemon, 30.0, 0, 1.5, False))
    monkeypatch.setattr(_TieredStorageBase, "_setup_logger", staticmethod(lambda name, *_: logging.getLogger(name)))
    for config, step in ((made.config("run", 1), 7), (made.config("run", 1, s3_path_strategy=made.s3_paths(bucket.url)), 6)):
        into = {"modules.policy.model.w": torch.zeros(100, 70)}
        with rank_errors():
            load(into, storage_reader=SageMakerTieredStorageReader(config, step=step), no_dist=True)
        assert float(into["modules.policy.model.w"].mean()) == step, "what we save is theirs to load"


@real
def test_without_a_daemon_s3_has_it_and_without_both_nobody_starts_from_scratch(library, tmp_path, bucket):
    with run(tmp_path, url=bucket.url) as saved:
        (sentence,) = saved.save(4, "memory", "s3")
        assert "step 4 is not in tier memory: http://127.0.0.1:9: " in sentence
        assert "is the daemon running there" in sentence
        assert saved.newest()[:2] == ("s3", 4)
    with run(tmp_path) as alone:
        assert len(alone.save(5, "memory")) == 1
        tiers = alone.tiers()
        found = tiers.fetch_newest(tmp_path / "nothing")
        assert (found.checkpoint, len(found.unreachable)) == (None, 1)
        with pytest.raises(Exception, match="nothing starts anew unasked"):
            checkpoint_or_nothing(tiers, found)


@real
def test_a_daemon_that_never_answers_costs_one_wait_and_no_checkpoint(library, tmp_path, bucket, monkeypatch):
    monkeypatch.setitem(HyperPodStore.__init__.__kwdefaults__, "wait_s", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=64) as silent,
        run(tmp_path, daemon=f"http://127.0.0.1:{silent.getsockname()[1]}", url=bucket.url) as saved,
    ):
        (sentence,) = saved.save(1, "memory", "s3")
        assert "timed out" in sentence
        assert saved.newest()[:2] == ("s3", 1)


@real
@pytest.mark.parametrize("name", ["checkpoint.pt", "metadata.metadata", "state.json", "MANIFEST.json"])
def test_a_file_of_the_newest_step_that_is_gone_from_s3(library, tmp_path, bucket, name):
    with run(tmp_path, url=bucket.url) as saved:
        for step in (3, 4):
            saved.save(step, "s3")
        bucket.delete(4, name)
        tier, step, rejected = saved.newest()
        assert (tier, step) == ("s3", 3)
        assert ("it has no manifest" if name == "MANIFEST.json" else f"its shard {name} is missing") in rejected[0]


@real
def test_a_shard_that_memory_has_lost_while_s3_has_an_older_step(library, tmp_path, daemon, bucket):
    with run(tmp_path, daemon=daemon, url=bucket.url) as saved:
        saved.save(3, "s3")
        saved.save(4, "memory")
        shutil.rmtree(tmp_path / "daemon" / "hyperpod" / "run")
        tier, step, rejected = saved.newest()
        assert (tier, step) == ("s3", 3)
        assert "step_00000004 in tier memory is not taken: its shard checkpoint.pt is missing" in rejected[0]


@real
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.9, None], ids=["0", "25", "50", "90", "a byte"])
@pytest.mark.parametrize("name", ["checkpoint.pt", "metadata.metadata"])
def test_a_shard_that_s3_has_torn_or_flipped(library, tmp_path, bucket, share, name):
    with run(tmp_path, url=bucket.url) as saved:
        for step in (3, 4):
            saved.save(step, "s3")

        def damaged(raw: bytes) -> bytes:
            at = len(raw) // 2
            return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] if share is None else raw[: int(len(raw) * share)]

        bucket.change(4, name, damaged)
        tier, step, rejected = saved.newest()
        assert (tier, step) == ("s3", 3)
        assert f"step_00000004 in tier s3 is not taken: its shard {name} " in rejected[0]


@real
def test_step_0_alone_is_found(library, tmp_path, daemon, bucket):
    with run(tmp_path, url=bucket.url) as saved:
        saved.save(0, "s3")
        assert saved.newest()[:2] == ("s3", 0)
    with run(tmp_path, daemon=daemon) as saved:
        saved.save(0, "memory")
        assert saved.newest()[:2] == ("memory", 0)


@real
def test_the_same_step_again_and_what_is_not_kept(library, tmp_path, daemon, bucket):
    with run(tmp_path, daemon=daemon, url=bucket.url) as saved:
        for step in (1, 2, 2, 3, 4):
            assert saved.save(step, "memory", "s3") == []
        assert [(tier.name, stored.step) for tier, stored in saved.tiers().checkpoints()] == [
            (tier, step) for step in (4, 3, 2) for tier in ("memory", "s3")
        ]


@real
def test_a_bucket_that_is_gone_is_told(library, tmp_path, daemon, bucket):
    with run(tmp_path, daemon=daemon, url="s3://no-such-bucket/x") as saved:
        (sentence,) = saved.save(1, "memory", "s3")
        assert sentence.startswith("step 1 is not in tier s3: ")
        assert saved.newest()[:2] == ("memory", 1)
