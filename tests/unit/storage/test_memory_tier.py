"""The daemon that keeps checkpoints of other machines in memory, over real connections."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from parts.checkpoints import RUN, holds, make
from parts.memory_tier import memory_tier
from parts.patience import PATIENCE_S
from polyturn.cli.main import main
from polyturn.errors import ConfigError, ResourceError, StorageError
from polyturn.storage.memory_tier.server import MemoryTierServer
from polyturn.storage.stores import Access, AccessError, LocalStore, open_store
from polyturn.storage.stores.memory_tier import CHECKSUM
from polyturn.storage.tiers import Tier, Tiers

ROOT = Path(__file__).parents[3]
SECRET = Access(token="secret")


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Authorization": "Bearer secret", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_peer_keeps_what_the_machine_loses(tmp_path):
    with memory_tier(tmp_path / "peer") as url:
        local = Tier("memory", LocalStore(tmp_path / "memory"), keep=1)
        peer = Tier("peer", open_store(url, SECRET), keep=2)
        tiers = Tiers(RUN, [local, peer])
        for step in (1, 2, 3):
            folder, manifest = make(tmp_path / "work", step)
            assert all(outcome.ok for outcome in tiers.publish(folder, manifest))
            tiers.prune()
        again = Tiers(RUN, [Tier("memory", LocalStore(tmp_path / "another machine"), keep=1), peer])
        found = again.fetch_newest(tmp_path / "in")
        assert (found.checkpoint.tier, found.checkpoint.manifest.step) == ("peer", 3)
        assert holds(tmp_path / "in", 3)
        assert [stored.step for _, stored in again.checkpoints()] == [3, 2]


def test_files_are_there_after_a_restart(tmp_path):
    with memory_tier(tmp_path / "root") as url:
        open_store(url, SECRET).put_if_absent(b"x", "run/a")
    with memory_tier(tmp_path / "root") as url:
        assert open_store(url, SECRET).read("run/a") == b"x"


def test_without_the_token_nothing_is_given(tmp_path):
    with memory_tier(tmp_path / "root", hyperpod=False) as url:
        with pytest.raises(AccessError, match="the token is wrong") as caught:
            open_store(url, Access(token="guess")).list("")
        assert "guess" not in str(caught.value)
        for method, path in (
            ("GET", "/v1/list"),
            ("GET", "/v1/files/a"),
            ("GET", "/v1/cp/namespaces/a"),
            ("POST", "/v1/sweep"),
        ):
            assert ask(url, method, path, Authorization="")[0] == 401
        assert ask(url, "GET", "/v1/cp/namespaces/a")[0] == 404
        assert ask(url, "GET", "/health", Authorization="") == (200, b'{"used_bytes": 0, "capacity_bytes": 1073741824}')


def test_what_does_not_arrive_as_it_was_is_refused(tmp_path):
    with memory_tier(tmp_path / "root") as url:
        status, said = ask(url, "PUT", "/v1/files/run/a", b"damaged", **{CHECKSUM: "0" * 32})
        assert (status, said) == (422, b"run/a did not arrive as it was sent")
        assert open_store(url, SECRET).list("") == []


def test_what_was_damaged_in_memory_is_noticed(tmp_path):
    with memory_tier(tmp_path / "root") as url:
        store = open_store(url, SECRET)
        store.put_if_absent(b"right", "run/a")
        path = tmp_path / "root" / "run" / "a"
        seen = path.stat()
        path.chmod(0o644)
        path.write_bytes(b"wrong")
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        with pytest.raises(StorageError, match="run/a did not arrive as it was sent"):
            store.read("run/a")


def test_no_more_than_its_capacity(tmp_path):
    with memory_tier(tmp_path / "root", capacity_bytes=1000) as url:
        store = open_store(url, SECRET)
        assert store.put_if_absent(bytes(600), "run/a")
        with pytest.raises(StorageError, match="the memory tier is full: 600 of 1,000 bytes are used"):
            store.put_if_absent(bytes(600), "run/b")
        store.delete("run/a")
        assert store.put_if_absent(bytes(600), "run/b")


@pytest.mark.parametrize(
    "path", ["/v1/files/../x", "/v1/files/%2e%2e/x", "/v1/files/a//b", "/v1/files/a%00b", "/v1/files/%2Fetc"]
)
def test_keys_that_would_leave_the_folder_are_refused(tmp_path, path):
    with memory_tier(tmp_path / "root") as url:
        assert ask(url, "PUT", f"/v1/files/{path}", b"", **{CHECKSUM: "99aa06d3014798d86001c324468d497f"})[0] in (400, 404)
        assert list(tmp_path.rglob("x")) == []


def test_bad_addresses():
    for url in ("memory-tier://", "memory-tier://host:port", "memory-tier://host:1/path", "memory-tier://me:pw@host"):
        with pytest.raises(ConfigError):
            open_store(url, SECRET)
    with pytest.raises(ConfigError, match="needs a token; set POLYTURN_MEMORY_TIER_TOKEN"):
        open_store("memory-tier://127.0.0.1:9")
    with pytest.raises(StorageError, match="is the daemon running there"):
        open_store("memory-tier://127.0.0.1:9", SECRET).list("")


def test_a_port_that_is_taken(tmp_path):
    with memory_tier(tmp_path / "root") as url:
        server = MemoryTierServer(tmp_path, token="x", capacity_bytes=1, port=urlsplit(url).port)
        with pytest.raises(ResourceError, match=r"the memory tier can't serve on 127\.0\.0\.1:"):
            asyncio.run(server.start())


def test_a_daemon_that_accepts_and_never_answers_costs_seconds_and_no_checkpoint(tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        peer = Tier("peer", open_store(f"memory-tier://127.0.0.1:{silent.getsockname()[1]}", SECRET))
        said: list[str] = []
        tiers = Tiers(RUN, [peer, Tier("disk", LocalStore(tmp_path / "disk"))], say=said.append, stall_s=0.5)
        for step in (1, 2):
            folder, manifest = make(tmp_path / "work", step)
            peer_outcome, disk = tiers.publish(folder, manifest)
            assert (peer_outcome.ok, disk.ok) == (False, True)
        assert "moved nothing for 0.5 s, which is its deadline" in said[0]
        assert "is not in tier peer: the tier peer is skipped and tried again in" in said[1], (
            "the second save waits for nothing"
        )
        found = tiers.fetch_newest(tmp_path / "in")
        assert (found.checkpoint.tier, found.checkpoint.manifest.step) == ("disk", 2)


def test_the_command_refuses_what_it_can_not_serve(monkeypatch, capsys):
    monkeypatch.delenv("POLYTURN_MEMORY_TIER_TOKEN", raising=False)
    assert main(["memory-tier", "serve", "--capacity-gib", "1"]) == 2
    assert "set POLYTURN_MEMORY_TIER_TOKEN" in capsys.readouterr().err
    assert main(["memory-tier", "serve", "--capacity-gib", "0"]) == 2


def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    environment = {**os.environ, "POLYTURN_MEMORY_TIER_TOKEN": "secret"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    command = [sys.executable, "-m", "polyturn", "memory-tier", "serve", "--port", "0", "--capacity-gib", "0.1"]
    process = subprocess.Popen([*command, "--root", str(tmp_path / "root")], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        url = line.split()[2]
        assert line == f"memory tier: {url} (this machine only), files in {tmp_path / 'root'}\n"
        assert open_store(url, SECRET).put_if_absent(b"x", "run/a")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()
    assert (tmp_path / "root" / "run" / "a").read_bytes() == b"x"


def shard(rank: int, step: int, body: bytes) -> tuple[str, bytes, dict[str, str]]:
    import base64

    import xxhash

    meta = {"checksum": base64.b64encode(xxhash.xxh3_128_digest(body)).decode(), "algorithm": "xxh3_128"}
    return f"/v1/cp/checkpoints/job/{rank}/{step}", body, {"Shard-Meta": json.dumps(meta)}


def test_the_protocol_of_hyperpod(tmp_path):
    with memory_tier(tmp_path / "root", hyperpod=True) as url:
        assert ask(url, "GET", "/v1/cp/namespaces/job", Authorization="")[0] == 404
        assert ask(url, "POST", "/v1/cp/namespaces/job?num_ranks=2&steps_retained=2")[0] == 200
        assert json.loads(ask(url, "GET", "/v1/cp/namespaces/job")[1]) == {"num_ranks": 2, "steps_retained": 2}
        status, said = ask(url, "POST", "/v1/cp/namespaces/job?num_ranks=3&steps_retained=2")
        assert (status, b"has 2 ranks, not 3" in said) == (409, True)

        for step in (0, 5, 9, 12):
            for rank in (0, 1) if step != 9 else (0,):
                path, body, headers = shard(rank, step, b"step %d rank %d" % (step, rank))
                assert ask(url, "POST", path, body, **headers)[0] == 200
        assert json.loads(ask(url, "GET", "/v1/cp/checkpoints/job/latest?limit=3")[1]) == [12, 5], "9 is not complete, 0 is old"
        assert ask(url, "GET", "/v1/cp/checkpoints/job/1/5") == (200, b"step 5 rank 1")
        assert ask(url, "GET", "/v1/cp/checkpoints/job/1/0")[0] == 404

        path, body, headers = shard(0, 20, b"right")
        assert ask(url, "POST", path, b"wrong", **headers) == (400, b"the shard does not fit its checksum")
        assert ask(url, "POST", path, body)[0] == 400
        assert ask(url, "POST", *shard(7, 20, b"x")[:2], **shard(7, 20, b"x")[2])[0] == 400
        assert ask(url, "DELETE", "/v1/cp/checkpoints/job/1/5")[0] == 200
        assert json.loads(ask(url, "GET", "/v1/cp/checkpoints/job/latest")[1]) == [12]
        assert ask(url, "POST", "/v1/cp/cluster/reset")[0] == 200
        assert ask(url, "GET", "/v1/cp/checkpoints/job/latest")[0] == 404
        assert ask(url, "GET", "/v1/list", Authorization="")[0] == 401, "the rest still asks for the token"


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_the_client_of_aws_saves_and_loads_here(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
        SageMakerTieredStorageReader,
        SageMakerTieredStorageWriter,
    )
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_base import _TieredStorageBase
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
    from torch.distributed import checkpoint as dcp

    with memory_tier(tmp_path / "root", hyperpod=True) as url:
        monkeypatch.setattr(
            InMemoryClientConfig.__init__, "__defaults__", (f"http://{urlsplit(url).netloc}", 30.0, 0, 1.5, False)
        )
        # Its log goes to /var/log, whatever one asks for.
        monkeypatch.setattr(_TieredStorageBase, "_setup_logger", staticmethod(lambda name, *_: logging.getLogger(name)))
        config = SageMakerCheckpointConfig(namespace="job", world_size=1)
        for step in (0, 7):
            state = {"weight": torch.full((64, 64), float(step)), "bias": torch.arange(5.0)}
            dcp.save(state, storage_writer=SageMakerTieredStorageWriter(config, step=step), no_dist=True)
        loaded = {"weight": torch.zeros(64, 64), "bias": torch.zeros(5)}
        dcp.load(loaded, storage_reader=SageMakerTieredStorageReader(config), no_dist=True)
        assert torch.equal(loaded["weight"], torch.full((64, 64), 7.0))
        assert torch.equal(loaded["bias"], torch.arange(5.0))
        assert json.loads(ask(url, "GET", "/v1/cp/checkpoints/job/latest")[1]) == [7, 0]
