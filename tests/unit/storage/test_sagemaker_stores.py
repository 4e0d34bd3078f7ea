"""Places that Amazon's library writes to, seen as stores under our names."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from parts.checkpoints import RUN, make
from parts.memory_tier import memory_tier
from polyturn.errors import ConfigError, StorageError
from polyturn.storage.manifest import MANIFEST, Place, step_name, verify
from polyturn.storage.retention import stored_steps
from polyturn.storage.stores import LocalStore, MissingKeyError, Store
from polyturn.storage.stores.hyperpod import HyperPodStore
from polyturn.storage.stores.sagemaker_names import stored_names
from polyturn.storage.stores.sagemaker_s3 import SagemakerS3Store
from polyturn.storage.tiers import Tier, Tiers


def content(step: int) -> dict[str, bytes]:
    return {"checkpoint.pt": b"weights of step %d" % step, "metadata.metadata": b"where", "state.json": b"{}"}


def save(store: Store, tmp_path: Path, step: int) -> None:
    """As the library and what is around it do: by name, and the manifest last."""
    folder, manifest = make(tmp_path / "work", step, content(step))
    for shard in manifest.shards:
        store.put(folder / shard.name, f"{RUN}/{step_name(step)}/{shard.name}")
    assert store.put_if_absent(manifest.to_json(), f"{RUN}/{step_name(step)}/{MANIFEST}")


@pytest.fixture(params=["memory", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        yield SagemakerS3Store(LocalStore(tmp_path / "bucket"))
        return
    with memory_tier(tmp_path / "daemon", hyperpod=True) as url:
        yield HyperPodStore(url.replace("memory-tier", "http"))


def test_a_checkpoint_is_published_found_fetched_and_pruned(store, tmp_path):
    assert isinstance(store, Store)
    tiers = Tiers(RUN, [Tier("there", store, keep=2)])
    for step in (0, 7, 100_000_000):
        save(store, tmp_path, step)
    assert [stored.step for stored in stored_steps(store, RUN)] == [100_000_000, 7, 0]
    found = tiers.fetch_newest(tmp_path / "in")
    assert found.checkpoint.manifest.step == 100_000_000
    assert all((tmp_path / "in" / name).read_bytes() == raw for name, raw in content(100_000_000).items())
    assert verify(tmp_path / "in") is None
    assert [sentence.split(" deleted")[0].rpartition("/")[2] for sentence in tiers.prune()] == [step_name(0)]
    assert [stored.step for stored in stored_steps(store, RUN)] == [100_000_000, 7]


@pytest.mark.parametrize("name", ["checkpoint.pt", "metadata.metadata", "state.json", MANIFEST])
def test_a_file_that_is_gone_is_walked_past(store, tmp_path, name):
    tiers = Tiers(RUN, [Tier("there", store)])
    for step in (5, 6):
        save(store, tmp_path, step)
    store.delete(f"{RUN}/{step_name(6)}/{name}")
    found = tiers.fetch_newest(tmp_path / "in")
    assert found.checkpoint.manifest.step == 5
    (sentence,) = found.rejected
    assert ("it has no manifest" if name == MANIFEST else f"its shard {name} is missing") in sentence


def test_a_manifest_that_is_none_names_nothing(store, tmp_path):
    save(store, tmp_path, 3)
    place = Place(store, f"{RUN}/{step_name(3)}")
    store.delete(f"{place.key}/{MANIFEST}")
    store.put_if_absent(b"[1", f"{place.key}/{MANIFEST}")
    assert "is torn" in verify(place)
    assert not store.put_if_absent(b"x", f"{place.key}/{MANIFEST}")
    for torn in (b"", b"{}", b'{"shards": [{"name": 1}]}', b"[" * 100_000):
        assert stored_names(torn) == {}


def test_what_the_daemon_does_not_keep(tmp_path):
    with memory_tier(tmp_path / "daemon", hyperpod=True) as url:
        store = HyperPodStore(url.replace("memory-tier", "http"))
        assert (store.list("nobody/"), store.list("nobody/leases/"), store.list("")) == ([], [], [])
        with pytest.raises(MissingKeyError):
            store.read(f"{RUN}/{step_name(1)}/{MANIFEST}")
        with pytest.raises(StorageError, match="is no file that HyperPod's daemon keeps"):
            store.put_if_absent(b"x", f"{RUN}/leases/{step_name(1)}/me")


def test_what_was_damaged_in_memory_is_noticed(tmp_path):
    with memory_tier(tmp_path / "daemon", hyperpod=True) as url:
        store = HyperPodStore(url.replace("memory-tier", "http"))
        tiers = Tiers(RUN, [Tier("there", store)])
        save(store, tmp_path, 1)
        (shard,) = (tmp_path / "daemon").rglob(f"hyperpod/{RUN}/1/0")
        raw = shard.read_bytes()
        shard.chmod(0o644)
        shard.write_bytes(raw[:-1] + b"X")
        with pytest.raises(StorageError, match="did not arrive as it was sent"):
            store.read(f"{RUN}/{step_name(1)}/checkpoint.pt")
        found = tiers.fetch_newest(tmp_path / "in")
        assert (found.checkpoint, len(found.unreachable)) == (None, 1)


def test_files_of_others_in_the_bucket_are_left_alone(tmp_path):
    bucket = LocalStore(tmp_path / "bucket")
    for key in ("lookup/rank_1/step_4/checkpoint.pt", "lookup/rank_0/step_x/state.json", "lookup-2/rank_0/step_4/state.json"):
        bucket.put_if_absent(b"x", key)
    store = SagemakerS3Store(bucket)
    assert stored_steps(store, RUN) == []
    assert [stored.step for stored in stored_steps(store, f"{RUN}-2")] == [4]
    assert len(store.list("")) == 3


def test_a_daemon_that_never_answers_and_bad_addresses():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = HyperPodStore(f"http://127.0.0.1:{silent.getsockname()[1]}", wait_s=0.2)
        with pytest.raises(StorageError, match="timed out; is the daemon running there"):
            store.exists(f"{RUN}/{step_name(1)}/{MANIFEST}")
    for url in ("127.0.0.1:9200", "https://host:9200", "http://host:9200/v1"):
        with pytest.raises(ConfigError, match="give http://HOST:PORT"):
            HyperPodStore(url)
