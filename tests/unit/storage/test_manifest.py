"""A checkpoint is whole to the last byte, or it says in one sentence why not."""

from __future__ import annotations

import contextlib
import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Place,
    Shard,
    hash_shards,
    read_manifest,
    seal,
    step_name,
    step_of,
    verify,
)
from polyturn.storage.publish import publish
from polyturn.storage.stores import LocalStore

CONTENT = {"__0_0.distcp": bytes(range(256)) * 40, "__1_0.distcp": b"rank 1" * 99, ".metadata": b"m", "a/b": b""}


def write(folder, content=CONTENT):
    for name, raw in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def sealed(tmp_path, step=42, **fields):
    folder = write(tmp_path / step_name(step))
    return folder, seal(folder, run_id="lookup", step=step, policy_version=7, **fields)


names = st.from_regex(r"[A-Za-z0-9_.\-äß ]{1,12}(/[A-Za-z0-9_\-]{1,8}){0,2}", fullmatch=True).filter(
    lambda name: not set(name.split("/")) & {".", "..", MANIFEST} and ".draft-" not in name
)
shards = st.builds(
    Shard, name=names, num_bytes=st.integers(0, 2**60), xxh3=st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
manifests = st.builds(
    Manifest,
    run_id=st.text(min_size=1),
    step=st.integers(0, 2**40),
    policy_version=st.integers(0, 2**40),
    created=st.text(),
    shards=st.lists(shards, min_size=1, max_size=5, unique_by=lambda shard: shard.name).map(tuple),
    meta=st.dictionaries(st.text(), json_values, max_size=3),
)


@settings(max_examples=40)
@given(manifests)
def test_what_is_written_is_read_back(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


@settings(max_examples=40)
@given(manifests, st.data())
def test_one_changed_byte_is_found_or_changes_nothing(manifest, data):
    content = bytearray(manifest.to_json())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(DamagedError):
        assert Manifest.from_json(bytes(content)) == manifest  # white space, or another spelling of the same


@settings(max_examples=40)
@given(manifests, st.floats(0, 1, exclude_max=True))
def test_a_torn_manifest_is_found(manifest, share):
    content = manifest.to_json()[:-2]  # the last byte before the closing brace and on are not needed to tell
    with pytest.raises(DamagedError, match="its manifest"):
        Manifest.from_json(content[: int(len(content) * share)])


@settings(max_examples=60)
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(content):
    with pytest.raises(DamagedError, match="its manifest"):
        Manifest.from_json(content)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a//b", "a/./b", "", "a\\b", "a\nb", MANIFEST, ".x.draft-1"])
def test_names_that_would_leave_the_folder_are_refused(name):
    manifest = Manifest("lookup", 1, 1, "", (Shard(name, 1, "0" * 32),))
    with pytest.raises(DamagedError, match="is not one of Polyturn"):
        Manifest.from_json(manifest.to_json())


def test_a_newer_format_says_so():
    manifest = Manifest("lookup", 1, 1, "", (Shard("a", 1, "0" * 32),), format=99)
    with pytest.raises(DamagedError, match="format 99 and this Polyturn reads 1"):
        Manifest.from_json(manifest.to_json())


def test_seal_and_verify(tmp_path):
    folder, manifest = sealed(tmp_path, meta={"modules": ["policy", "critic"]})
    assert {shard.name: shard.num_bytes for shard in manifest.shards} == {name: len(raw) for name, raw in CONTENT.items()}
    assert read_manifest(folder) == manifest
    assert verify(folder) is None
    assert manifest.num_bytes == sum(map(len, CONTENT.values()))
    assert [path.name for path in folder.iterdir() if "draft" in path.name] == []
    assert not (folder / ".metadata").stat().st_mode & 0o222


def test_shards_hashed_elsewhere_are_sealed_together(tmp_path):
    here, there = write(tmp_path / "here", {"rank_0": b"0"}), write(tmp_path / "there", {"rank_1": b"1"})
    manifest = seal(here, run_id="lookup", step=0, policy_version=0, shards=[*hash_shards(there), *hash_shards(here)])
    assert [shard.name for shard in manifest.shards] == ["rank_0", "rank_1"]
    assert verify(here) == "its shard rank_1 is missing"


def test_step_0_is_a_step(tmp_path):
    folder, _ = sealed(tmp_path, step=0)
    assert verify(folder) is None
    assert step_of(folder.name) == 0


def test_a_folder_without_files_is_no_checkpoint(tmp_path):
    with pytest.raises(StorageError, match="names no shard"):
        seal(tmp_path, run_id="lookup", step=1, policy_version=1)
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("meta", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}])
def test_meta_that_json_would_change_is_refused(tmp_path, meta):
    with pytest.raises(ValueError, match="JSON"):
        sealed(tmp_path, meta=meta)


@pytest.mark.parametrize("run_id", ["", "a/b", "..", ".hidden", "step_00000001", "a\n"])
def test_run_ids_are_plain_names(tmp_path, run_id):
    with pytest.raises(ConfigError, match="run id"):
        seal(write(tmp_path / "x"), run_id=run_id, step=1, policy_version=1)


def truncate(share):
    def damage(path):
        os.truncate(path, int(path.stat().st_size * share))

    damage.__name__ = f"truncate_{share}"
    return damage


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def remove(path):
    path.unlink()


DAMAGES = [
    *[(truncate(share), MANIFEST, "its manifest of .* bytes is torn") for share in (0, 0.25, 0.5, 0.9)],
    (remove, MANIFEST, "it has no manifest, so it was never completed"),
    *[(truncate(share), "__0_0.distcp", r"has [\d,]+ bytes and the manifest says 10,240") for share in (0, 0.25, 0.5, 0.9)],
    (flip, "__0_0.distcp", "its shard __0_0.distcp is damaged: its checksum is not the manifest's"),
    (remove, "__0_0.distcp", "its shard __0_0.distcp is missing"),
    (remove, "a/b", "its shard a/b is missing"),
]


@pytest.mark.parametrize("stored", [False, True], ids=["folder", "store"])
@pytest.mark.parametrize(("damage", "name", "sentence"), DAMAGES, ids=lambda value: getattr(value, "__name__", None))
def test_every_damage_is_found(tmp_path, damage, name, sentence, stored):
    folder, manifest = sealed(tmp_path)
    where = folder
    if stored:
        where = Place(LocalStore(tmp_path / "store"), "lookup/step_00000042")
        publish(folder, manifest, where, link=False)
        folder = tmp_path / "store" / where.key
        name = next((shard.stored for shard in manifest.shards if shard.name == name), name)
    assert verify(where) is None
    (folder / name).chmod(0o644)
    damage(folder / name)
    assert re.search(sentence, verify(where) or "")


def test_a_manifest_under_another_step_is_refused(tmp_path):
    folder, _ = sealed(tmp_path)
    folder.rename(tmp_path / "step_00000043")
    assert verify(tmp_path / "step_00000043") == "its manifest is of step 42 and stands in step_00000043"
