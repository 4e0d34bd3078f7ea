"""`polyturn checkpoint`: what is there, what of it is whole, what is deleted and copied."""

from __future__ import annotations

import json

import pytest

from parts.checkpoints import RUN, holds, make
from parts.s3 import BUCKET
from polyturn.cli.main import main
from polyturn.storage.manifest import MANIFEST, Place, step_name, verify
from polyturn.storage.publish import publish
from polyturn.storage.stores import LocalStore, open_store
from polyturn.storage.tiers import Tier, Tiers


@pytest.fixture
def store(tmp_path) -> LocalStore:
    """A run folder with three checkpoints: the newest is damaged, the second was never completed."""
    found = LocalStore(tmp_path / "runs" / RUN / "checkpoints")
    for step in (10, 20, 30):
        folder, manifest = make(tmp_path / "work", step)
        publish(folder, manifest, Place(found, f"{RUN}/{step_name(step)}"), link=False)
    shard = next((found.root / RUN / step_name(30)).glob("__0_0*"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1] + b"X")
    (found.root / RUN / step_name(20) / MANIFEST).unlink()
    return found


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("place", ["runs/lookup", "runs/lookup/checkpoints", "runs/lookup/checkpoints/lookup/"])
def test_list(store, tmp_path, capsys, place):
    assert main(["checkpoint", "list", str(tmp_path / place)]) == 0
    newest, middle, oldest = lines(capsys)
    assert newest.startswith("step       30    37.6 KiB  policy version 30, 20")
    assert "whole" in newest
    assert "NOT WHOLE: it has no manifest, so it was never completed" in middle
    assert "whole" in oldest


def test_list_deep_as_json(store, tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path / "runs" / RUN), "--deep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["step"], entry["policy_version"]) for entry in found] == [(30, 30), (20, None), (10, 10)]
    assert "damaged" in found[0]["fault"]
    assert found[2]["fault"] is None


def test_verify(store, tmp_path, capsys):
    root = tmp_path / "runs" / RUN / "checkpoints" / RUN
    assert main(["checkpoint", "verify", str(root / step_name(10))]) == 0
    assert "verified" in lines(capsys)[0]
    assert main(["checkpoint", "verify", str(root / step_name(30))]) == 3
    assert "NOT WHOLE: its shard __0_0.distcp is damaged: its checksum is not the manifest's" in lines(capsys)[0]
    assert main(["checkpoint", "verify", str(tmp_path / "work" / step_name(20))]) == 0, "a sealed folder in no store"
    assert "verified" in lines(capsys)[0]


def test_prune(store, tmp_path, capsys):
    place = str(tmp_path / "runs" / RUN)
    assert main(["checkpoint", "prune", place, "--keep", "2"]) == 0
    assert lines(capsys) == ["there is nothing to delete"]
    assert main(["checkpoint", "prune", place, "--keep", "1", "--grace-h", "0"]) == 0
    assert [line.split(": ")[-1] for line in lines(capsys)] == ["keep=1", "remains of a save that was never completed"]
    assert {path.name for path in (store.root / RUN).iterdir()} == {step_name(30)}


def test_copy_takes_the_newest_that_is_whole(store, tmp_path, capsys):
    assert main(["checkpoint", "copy", str(tmp_path / "runs" / RUN), str(tmp_path / "elsewhere")]) == 0
    captured = capsys.readouterr()
    assert "is not taken: its shard __0_0.distcp is damaged" in captured.err
    assert "step_00000010: 37.1 KiB, policy version 10" in captured.out
    found = Tiers(RUN, [Tier("copy", LocalStore(tmp_path / "elsewhere"))]).fetch_newest(tmp_path / "in")
    assert found.checkpoint.manifest.step == 10
    assert holds(tmp_path / "in", 10)


def test_copy_of_a_sealed_folder(store, tmp_path, capsys):
    assert main(["checkpoint", "copy", str(tmp_path / "work" / step_name(30)), str(tmp_path / "elsewhere")]) == 0
    assert verify(Place(LocalStore(tmp_path / "elsewhere"), f"{RUN}/{step_name(30)}")) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list", "{tmp}/nowhere"], "there are no checkpoints; give a run folder, a store or a checkpoint in one"),
        (["list", "{tmp}/runs/lookup/checkpoints/lookup/step_00000099"], "there is no such checkpoint"),
        (["list", "s3://"], "give a longer place"),
        (["list", "gopher2://x/y"], "gopher2"),
        (["prune", "{tmp}/runs/lookup", "--keep", "0"], "--keep=0"),
        (["prune", "{tmp}/runs/lookup/checkpoints/lookup/step_00000010", "--keep", "1"], "is one checkpoint"),
        (["copy", "{tmp}/runs/lookup", "{tmp}/x", "--kms-key-id", "k"], "the KMS key k is for the encryption aws:kms"),
    ],
)
def test_mistakes_are_one_sentence(store, tmp_path, capsys, arguments, sentence):
    assert main(["checkpoint", *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_run_folder_shows_all_its_tiers(store, tmp_path, capsys):
    folder = tmp_path / "runs" / RUN
    remote = tmp_path / "remote"
    recipe = "model: {path: 'builtin:tiny'}\nenvironment: {id: lookup}\nrun: {steps: 1}\n"
    (folder / "recipe.yaml").write_text(f"{recipe}checkpoint: {{url: {remote}, every: {{disk: 10, s3: 10}}}}\n")
    assert main(["checkpoint", "copy", str(folder), str(remote)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "list", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in found] == [30, 20, 10, 10]
    assert [entry["tier"] for entry in found] == ["disk", "disk", "disk", "s3"]
    assert found[-1]["place"] == f"{remote}/{RUN}/{step_name(10)}"
    assert main(["checkpoint", "prune", str(folder), "--keep", "1"]) == 0

    (folder / "recipe.yaml").write_text(f"{recipe}checkpoint: {{url: 'memory-tier://127.0.0.1:9', every: {{disk: 10}}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
        assert main(["checkpoint", "list", str(folder)]) == 0
    captured = capsys.readouterr()
    assert "polyturn: a tier could not be asked: memory-tier://127.0.0.1:9: " in captured.err
    assert "step       30  disk  " in captured.out


@pytest.mark.real
def test_s3(store, tmp_path, capsys, s3_servers):
    endpoint = ["--endpoint-url", s3_servers.url("moto")]
    place = f"s3://{BUCKET}/cli/{tmp_path.name}"
    assert main(["checkpoint", "copy", str(tmp_path / "runs" / RUN), place, *endpoint, "--sse", "AES256"]) == 0
    capsys.readouterr()
    for deeper in ("", f"/{RUN}", f"/{RUN}/{step_name(10)}"):
        assert main(["checkpoint", "verify", place + deeper, *endpoint]) == 0
        assert "verified" in lines(capsys)[0]
    assert main(["checkpoint", "copy", place, str(tmp_path / "back"), *endpoint]) == 0
    assert verify(Place(open_store(str(tmp_path / "back")), f"{RUN}/{step_name(10)}")) is None
    assert main(["checkpoint", "list", "s3://no-such-bucket/x", *endpoint]) == 3
    assert "there is no bucket no-such-bucket" in capsys.readouterr().err
