"""The object store against servers that are slow, broken, gone or refuse: seconds and a sentence, never a torn checkpoint."""

from __future__ import annotations

import pytest

from parts.checkpoints import RUN, holds, make
from parts.s3 import BUCKET, FaultyProxy, credentials, faulty_proxy
from polyturn.errors import ConfigError, DeadlineError, StorageError
from polyturn.storage.breaker import SkippedError
from polyturn.storage.guard import GuardedStore
from polyturn.storage.manifest import MANIFEST, verify
from polyturn.storage.stores import AccessError, Encryption, LocalStore, MissingKeyError, ObjectStore
from polyturn.storage.tiers import Tier, Tiers

MIB = 1024 * 1024


@pytest.fixture
def proxy(s3_servers):
    with faulty_proxy(s3_servers.url("moto")) as found:
        yield found


@pytest.fixture
def store(proxy, tmp_path) -> ObjectStore:
    return ObjectStore(BUCKET, f"faults/{tmp_path.name}", endpoint_url=proxy.url, part_bytes=5 * MIB, read_s=1.0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def tiers(store, tmp_path, said) -> Tiers:
    disk = Tier("disk", LocalStore(tmp_path / "disk"), every=10)
    return Tiers(RUN, [disk, Tier("s3", store)], say=said.append, stall_s=5)


def on(name: str, *, method: str = "", part: str = "", times: int | None = None):
    """A fault for requests of a method whose path has `part` in it, so many times."""
    left = [times]

    def fault(asked: str, path: str) -> str | None:
        if (method and asked != method) or part not in path or left[0] == 0:
            return None
        if left[0] is not None:
            left[0] -= 1
        return name

    return fault


def file_of(tmp_path, num_bytes: int):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (num_bytes // 256))
    return file


def test_encryption_is_consistent():
    assert Encryption("aws:kms", "key").arguments() == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key"}
    assert Encryption().arguments() == {}
    with pytest.raises(ConfigError, match="the KMS key key is for the encryption aws:kms, and it is AES256"):
        Encryption("AES256", "key")


@pytest.mark.real
@pytest.mark.parametrize("encryption", [Encryption("AES256"), Encryption("aws:kms", "alias/polyturn")])
def test_every_write_is_encrypted(proxy, tmp_path, encryption):
    store = ObjectStore(BUCKET, "sse", endpoint_url=proxy.url, part_bytes=5 * MIB, encryption=encryption)
    store.put(file_of(tmp_path, 6 * MIB), "run/parts")
    store.put(file_of(tmp_path, 256), "run/whole")
    store.put_if_absent(b"x", f"run/{tmp_path.name}")
    writes = [
        {name.lower(): value for name, value in headers.items()}
        for method, path, headers in proxy.asked
        if (method == "PUT" and "partNumber" not in path) or (method == "POST" and "uploads" in path)
    ]
    assert len(writes) == 3
    assert {headers["x-amz-server-side-encryption"] for headers in writes} == {encryption.kind}
    assert {headers.get("x-amz-server-side-encryption-aws-kms-key-id") for headers in writes} == {encryption.kms_key_id}
    conditional = [headers for headers in writes if "if-none-match" in headers]
    assert len(conditional) == 1


@pytest.mark.real
def test_large_files_go_in_parts_and_come_in_ranges(store, proxy, tmp_path):
    file = file_of(tmp_path, 23 * MIB)
    store.put(file, "run/a")
    store.get("run/a", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == file.read_bytes()
    assert len({path for method, path, _ in proxy.asked if method == "PUT" and "partNumber" in path}) == 5
    assert len({headers["Range"] for method, _, headers in proxy.asked if method == "GET" and "Range" in headers}) == 5


@pytest.mark.real
@pytest.mark.parametrize("fault", ["500", "503", "lost"])
def test_a_write_rides_out_one_fault(store, proxy, tmp_path, fault):
    file = file_of(tmp_path, 6 * MIB)
    proxy.fault = on(fault, method="PUT", times=1)
    store.put(file, "run/a")
    proxy.fault = on(fault, method="PUT", times=1)
    assert store.put_if_absent(b"commit", "run/commit")
    assert store.read("run/commit") == b"commit"
    store.get("run/a", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == file.read_bytes()


@pytest.mark.real
def test_a_download_rides_out_broken_connections(store, proxy, tmp_path):
    file = file_of(tmp_path, 6 * MIB)
    store.put(file, "run/a")
    proxy.fault = on("cut", method="GET", part="run/a", times=2)
    store.get("run/a", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == file.read_bytes()
    proxy.fault = on("cut", method="GET", part="run/a")
    with pytest.raises(StorageError, match="run/a failed"):
        store.get("run/a", tmp_path / "not got")
    assert not (tmp_path / "not got").exists()


@pytest.mark.real
def test_an_upload_that_fails_leaves_nothing_or_is_swept(s3_servers, tmp_path):
    """On SeaweedFS: moto says of every upload that it began in 2010."""
    with faulty_proxy(s3_servers.url("seaweedfs")) as proxy:
        store = ObjectStore(BUCKET, f"faults/{tmp_path.name}", endpoint_url=proxy.url, part_bytes=5 * MIB)
        proxy.fault = on("500", method="PUT", part="partNumber=2")
        with pytest.raises(StorageError, match="run/a failed: InternalError"):
            store.put(file_of(tmp_path, 11 * MIB), "run/a")
        assert store.list("run/") == []
        assert store.sweep("run/", -3600) == 0, "it was aborted"
        proxy.fault = lambda method, path: "500" if method == "DELETE" or "partNumber=2" in path else None
        with pytest.raises(StorageError):
            store.put(file_of(tmp_path, 11 * MIB), "run/a")
        proxy.fault = on("", times=0)
        assert store.sweep("run/", 3600) == 0, "it may still be under way"
        assert store.sweep("run/", -3600) == 1
        assert store.sweep("run/", -3600) == 0


@pytest.mark.real
@pytest.mark.parametrize("fault", ["hang", "slow"])
def test_one_that_hangs_costs_seconds_and_is_then_skipped(store, proxy, tmp_path, fault):
    store.put(file_of(tmp_path, 5 * MIB), "run/a")
    proxy.fault = on(fault)
    guarded = GuardedStore(store, "s3", stall_s=2)
    with pytest.raises((DeadlineError, StorageError)):
        guarded.get("run/a", tmp_path / "got")
    while not guarded.breaker.is_open:
        with pytest.raises((DeadlineError, StorageError)):
            guarded.get("run/a", tmp_path / "got")
    with pytest.raises(SkippedError, match="the tier s3 is skipped and tried again in"):
        guarded.list("run/")
    assert not (tmp_path / "got").exists()


@pytest.mark.real
def test_refusals_say_what_to_do_and_no_secret(store, proxy, tmp_path):
    proxy.fault = on("expired")
    with pytest.raises(AccessError, match=r"ExpiredToken.*renew the credentials") as caught:
        store.put(file_of(tmp_path, 256), "run/a")
    assert "testing" not in str(caught.value)
    proxy.fault = on("403")
    with pytest.raises(AccessError, match=r"AccessDenied.*s3:PutObject"):
        store.put_if_absent(b"x", "run/a")


@pytest.mark.real
def test_no_credentials(proxy, monkeypatch):
    with credentials():
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(AccessError, match="there are no credentials; set AWS_PROFILE"):
            ObjectStore(BUCKET, "x", endpoint_url=proxy.url).list("run/")


@pytest.mark.real
def test_a_bucket_that_is_gone(s3_servers, tmp_path):
    store = ObjectStore("no-such-bucket", "x", endpoint_url=s3_servers.url("moto"))
    for ask in (
        lambda: store.list("run/"),
        lambda: store.exists("run/a"),
        lambda: store.put(file_of(tmp_path, 256), "run/a"),
        lambda: store.put_if_absent(b"", "run/a"),
        lambda: store.read("run/a"),
    ):
        with pytest.raises(StorageError, match="there is no bucket no-such-bucket; make it") as caught:
            ask()
        assert not isinstance(caught.value, MissingKeyError)


@pytest.mark.real
def test_a_server_that_is_not_there():
    with credentials(), pytest.raises(StorageError, match="EndpointConnectionError"):
        ObjectStore("bucket", "x", endpoint_url="http://127.0.0.1:9").list("run/")


def only_s3(proxy: FaultyProxy, tiers: Tiers, tmp_path, step: int):
    folder, manifest = make(tmp_path / "work", step)
    return tiers.publish(folder, manifest, only=["s3"])[0]


@pytest.mark.real
@pytest.mark.parametrize("fault", ["500", "hang", "403", "expired"])
def test_a_broken_s3_never_costs_a_checkpoint_of_the_disk(tiers, proxy, tmp_path, fault, said):
    proxy.fault = on(fault)
    for step in (10, 20):
        folder, manifest = make(tmp_path / "work", step)
        disk, s3 = tiers.publish(folder, manifest)
        assert (disk.ok, s3.ok) == (True, False)
        assert "is not in tier s3: " in s3.sentence
    found = tiers.fetch_newest(tmp_path / "in")
    assert (found.checkpoint.tier, found.checkpoint.manifest.step) == ("disk", 20)
    assert "tier s3 could not be asked" in found.unreachable[0]
    assert holds(tmp_path / "in", 20)


@pytest.mark.real
def test_a_save_that_s3_cut_off_is_not_there_and_goes_on_later(tiers, proxy, tmp_path):
    assert only_s3(proxy, tiers, tmp_path, 10).ok
    proxy.fault = on("500", method="PUT", part=MANIFEST)
    assert not only_s3(proxy, tiers, tmp_path, 20).ok
    found = tiers.newest_verified()
    assert found.checkpoint.manifest.step == 10
    assert found.rejected == ("step_00000020 in tier s3 is not taken: it has no manifest, so it was never completed",)
    proxy.fault = on("", times=0)
    assert only_s3(proxy, tiers, tmp_path, 20).ok
    assert tiers.newest_verified().checkpoint.manifest.step == 20


@pytest.mark.real
def test_an_answer_with_a_flipped_bit_is_never_loaded(tiers, proxy, tmp_path):
    assert only_s3(proxy, tiers, tmp_path, 10).ok
    assert only_s3(proxy, tiers, tmp_path, 20).ok
    proxy.fault = on("flip", method="GET", part="step_00000020/__0_0.distcp")
    found = tiers.fetch_newest(tmp_path / "in")
    assert found.checkpoint.manifest.step == 10
    assert holds(tmp_path / "in", 10)
    assert "its shard __0_0.distcp is damaged" in found.rejected[0]


@pytest.mark.real
def test_two_processes_worth_of_writers(tiers, store, proxy, tmp_path):
    """The answer to the commit is lost: written once, and seen as ours."""
    proxy.fault = on("lost", method="PUT", part=MANIFEST, times=1)
    outcome = only_s3(proxy, tiers, tmp_path, 10)
    assert outcome.ok
    assert outcome.sentence == ""
    assert verify(tiers.place(tiers.tiers[1], 10)) is None


@pytest.mark.real
def test_siblings_of_the_prefix_are_not_ours(s3_servers, tmp_path):
    url = s3_servers.url("moto")
    ObjectStore(BUCKET, "jobs/lookup-2", endpoint_url=url).put_if_absent(b"x", "run/a")
    assert ObjectStore(BUCKET, "jobs/lookup", endpoint_url=url).list("") == []
    assert ObjectStore(BUCKET, "jobs/lookup-2/", endpoint_url=url).exists("run/a")
