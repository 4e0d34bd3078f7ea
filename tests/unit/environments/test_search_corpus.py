from __future__ import annotations

import gzip
import json

import pytest

from polyturn.environments.search.base import Passage
from polyturn.environments.search.corpus import corpus_digest, corpus_file, read_corpus
from polyturn.errors import DataError

GOOD = '{"id": "1", "title": "Hill", "text": "A hill."}\n'


@pytest.mark.parametrize("packed", [False, True])
def test_rows_plain_and_packed(tmp_path, packed):
    raw = (GOOD + "\n" + '{"id": "2", "title": "", "text": "é \\ud800", "more": 1}').encode()
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(gzip.compress(raw) if packed else raw)
    assert list(read_corpus(corpus_file(file))) == [
        Passage(id="1", title="Hill", text="A hill."),
        Passage(id="2", title="", text="é ?"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "1", "title": "Hill"', "not valid JSON"),
        ("[1]", "a list, not an object"),
        ('{"id": "1", "text": "x"}', "the field 'title' is missing; a row has id, title and text, and this one id, text"),
        ('{"id": 1, "title": "", "text": "x"}', "the field 'id' is '1'; it must be a text"),
        ('{"id": "", "title": "", "text": "x"}', "the field 'id' is ''"),
        ('{"id": "1", "title": "", "text": null}', "the field 'text' is 'None'"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, line, said):
    file = tmp_path / "corpus.jsonl"
    file.write_text(GOOD + "\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        list(read_corpus(file))
    assert str(caught.value).startswith(f"{file}:3: ")
    assert said in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(GOOD.encode() + b'{"id": "2", "title": "\xff", "text": ""}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: not valid UTF-8"):
        list(read_corpus(file))


def test_a_packed_file_that_is_cut_off(tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    with pytest.raises(DataError, match="the gzip data is cut off or damaged"):
        list(read_corpus(file))


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        corpus_file(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        corpus_file(tmp_path)


def test_the_digest_is_of_every_byte(tmp_path):
    file = tmp_path / "corpus.jsonl"
    rows = "".join(json.dumps({"id": str(n), "title": "t", "text": "x" * 1000}) + "\n" for n in range(2000))
    file.write_text(rows)
    first = corpus_digest(file)
    file.write_text(rows[:-2] + " \n")
    assert corpus_digest(file) != first
