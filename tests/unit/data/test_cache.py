"""Tokenised rows on disk: never stale, never half, the same with any number of workers."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data import cache as cache_module
from polyturn.data.cache import TokenCache, file_hash, tokenise
from polyturn.errors import DataError, ResourceError
from polyturn.types import Message


def opening(text):
    return (Message(role="user", content=text),)


class Encoder:
    def __init__(self):
        self.calls = 0

    def __call__(self, messages):
        self.calls += 1
        if "zzz" in messages[0].content:
            raise DataError("no such word")
        return [ord(letter) for message in messages for letter in message.content]


def plain(tokenised):
    return [tokenised[index].tolist() for index in range(len(tokenised))]


@given(texts=st.lists(st.text(max_size=8).filter(lambda text: "zzz" not in text), max_size=8))
def test_ids_of_every_row_in_order(texts):
    made = tokenise([opening(text) for text in texts], Encoder())
    assert plain(made) == [[ord(letter) for letter in text] for text in texts]
    assert made.lengths.tolist() == [len(text) for text in texts]


def test_what_a_tokenizer_refuses_is_a_problem_of_its_row():
    made = tokenise([opening("ab"), opening("zzz"), opening("c")], Encoder())
    assert made.problems == {1: "no such word"}
    assert plain(made) == [[97, 98], [], [99]]


def test_processes_give_what_one_gives(monkeypatch):
    monkeypatch.setattr(cache_module, "FEW_ROWS", 10)
    rows = [opening("zzz" if n == 7 else "x" * (n % 5)) for n in range(450)]
    encode = Encoder()
    made = tokenise(rows, encode, num_workers=2, again=Encoder)
    assert encode.calls == 0, "the workers did it"
    alone = tokenise(rows, Encoder())
    assert plain(made) == plain(alone)
    assert made.problems == alone.problems == {7: "no such word"}
    assert tokenise(rows[:9], encode, num_workers=2, again=Encoder).ids.tolist() == alone.ids[: alone.offsets[9]].tolist()
    assert encode.calls == 9, "so few rows need no workers"


def dies():
    os._exit(3)


def test_a_worker_that_dies_is_a_sentence(monkeypatch):
    monkeypatch.setattr(cache_module, "FEW_ROWS", 1)
    with pytest.raises(ResourceError, match=r"a process that tokenised rows died .*; set data\.num_workers=1"):
        tokenise([opening("a")], Encoder(), num_workers=2, again=dies)


@pytest.fixture
def cache(tmp_path):
    return TokenCache(tmp_path / "cache")


def entry(cache, **changed):
    return cache.entry(**({"file": "f", "transform": "t", "tokenizer": "k"} | changed))


def test_a_second_time_nothing_is_encoded(cache):
    rows = [opening("ab"), opening("c")]
    encode = Encoder()
    first = cache.tokenised(entry(cache), rows, encode)
    again = cache.tokenised(entry(cache), rows, encode)
    assert encode.calls == 2
    assert (first.from_cache, again.from_cache) == (False, True)
    assert plain(again) == plain(first)
    assert again.ids.dtype == np.int32


def test_file_transform_and_tokenizer_are_the_key(cache):
    names = {entry(cache), *(entry(cache, **{part: "other"}) for part in ("file", "transform", "tokenizer"))}
    assert len(names) == 4


def test_an_entry_of_other_messages_is_made_again(cache):
    """As when the environment writes another system message: file, transform and tokenizer are the same."""
    encode = Encoder()
    cache.tokenised(entry(cache), [opening("ab")], encode)
    assert plain(cache.tokenised(entry(cache), [opening("xy")], encode)) == [[120, 121]]
    assert plain(cache.tokenised(entry(cache), [(*opening("x"), *opening("y"))], encode)) == [[120, 121]]
    assert encode.calls == 3


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 half", b"nonsense"])
def test_a_damaged_entry_is_made_again(cache, damage):
    encode = Encoder()
    cache.tokenised(entry(cache), [opening("ab")], encode)
    entry(cache).write_bytes(damage)
    assert plain(cache.tokenised(entry(cache), [opening("ab")], encode)) == [[97, 98]]
    assert cache.tokenised(entry(cache), [opening("ab")], encode).from_cache


def test_rows_with_problems_are_not_kept(cache):
    cache.tokenised(entry(cache), [opening("zzz")], Encoder())
    assert not entry(cache).exists()


def test_nothing_is_left_behind(cache):
    cache.tokenised(entry(cache), [opening("ab")], Encoder())
    assert [path.name for path in entry(cache).parent.iterdir()] == [entry(cache).name]


def test_the_hash_of_a_file_follows_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert file_hash(tmp_path / "a") == file_hash(tmp_path / "b")
    (tmp_path / "a").write_bytes(b"2")
    assert file_hash(tmp_path / "a") != file_hash(tmp_path / "b")
    assert file_hash("hf:owner/name") == file_hash("hf:owner/name")
