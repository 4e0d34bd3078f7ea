"""Rows from gzip files and from the hub; the hub's package is replaced by a stand-in, or reads a folder here."""

from __future__ import annotations

import gzip
import json
import sys
import types

import pytest

from polyturn.data.hub import HubDataset, parse_hub_path, with_split
from polyturn.data.rows import read_rows
from polyturn.errors import DataError, MissingDependencyError

ROWS = [{"question": "é", "answer": "#### 1"}, {"question": "b", "answer": "#### 2"}]
LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


# ── gzip ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_packed_file_is_read_as_the_plain_one(tmp_path):
    plain, packed = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"
    plain.write_bytes(LINES)
    packed.write_bytes(gzip.compress(LINES))
    assert [row for _, row in read_rows(packed)] == [row for _, row in read_rows(plain)] == ROWS
    assert [where for where, _ in read_rows(packed)] == [f"{packed}:1", f"{packed}:3"]


def test_what_is_wrong_in_a_packed_file_is_said_with_its_line(tmp_path):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(LINES + b"\n[]"))
    with pytest.raises(DataError, match=r"rows.jsonl.gz:4: the line is a list; an object is needed"):
        list(read_rows(packed))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


# Named, since the bytes of a packed file hold the time it was made, and test processes must collect the same names.
@pytest.mark.parametrize(
    "broken", [cut(gzip.compress((LINES + b"\n") * 500)), LINES, b"\x1f\x8b" + b"x" * 40], ids=["cut", "plain", "nonsense"]
)
def test_a_broken_packed_file_is_a_sentence(tmp_path, broken):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(broken)
    with pytest.raises(DataError, match=r"gzip"):
        list(read_rows(packed))


# ── the hub ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("hf:owner/name", HubDataset(id="owner/name", config=None, split="train")),
        ("hf:openai/gsm8k:main", HubDataset(id="openai/gsm8k", config="main", split="train")),
        ("hf:openai/gsm8k:main@test", HubDataset(id="openai/gsm8k", config="main", split="test")),
        ("hf:a.b/c_d-e@train[:10]", None),
        ("hf:owner/name@validation", HubDataset(id="owner/name", config=None, split="validation")),
        ("hf:name", None),
        ("hf:", None),
        ("hf:a/b/c", None),
        ("hf:owner/name:", None),
        ("hf:owner/name@", None),
        ("hf:owner/../name", None),
    ],
)
def test_names_of_data_sets(path, wanted):
    if wanted is None:
        with pytest.raises(DataError, match=r"the form is hf:owner/name\[:config\]\[@split\]"):
            parse_hub_path(path, default_split="train")
    else:
        assert parse_hub_path(path, default_split="train") == wanted


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets`; returns the questions that it was asked."""
    asked: list[tuple[object, ...]] = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if name == "owner/gone":
            raise FileNotFoundError("Dataset 'owner/gone'\n doesn't exist")
        return [] if split == "empty" else ROWS

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_rows_of_a_data_set_say_where_they_are_from(hub):
    assert list(read_rows("hf:owner/name:main")) == [
        ("hf:owner/name:main@train:1", ROWS[0]),
        ("hf:owner/name:main@train:2", ROWS[1]),
    ]
    assert hub == [("owner/name", "main", "train")]


def test_the_split_is_the_named_one_or_the_one_asked_for(hub):
    list(read_rows(with_split("hf:owner/name", "test")))
    list(read_rows(with_split("hf:owner/name@validation", "test")))
    assert [split for _, _, split in hub] == ["test", "validation"]


def test_a_data_set_that_can_not_be_loaded_is_a_sentence(hub):
    with pytest.raises(DataError) as caught:
        list(read_rows("hf:owner/gone"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("hf:owner/gone: datasets could not load split 'train' (FileNotFoundError: Dataset ")
    with pytest.raises(DataError, match="hf:owner/name@empty: no rows"):
        list(read_rows("hf:owner/name@empty"))


def test_without_the_package_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"hf:owner/name is a data set on the hub.*pip install 'polyturn\[hub\]'"):
        list(read_rows("hf:owner/name"))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_the_package_itself_reads_a_folder_in_place_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.chdir(tmp_path)
    assert list(read_rows("hf:owner/name@test")) == [(f"hf:owner/name@test:{n}", row) for n, row in enumerate(ROWS, 1)]
