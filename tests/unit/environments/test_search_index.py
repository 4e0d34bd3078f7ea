"""The index on disk: its numbers by hand, and against the slow index in memory. bm25s reads it in the tests marked real."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.environments.search import bm25 as bm25_module
from polyturn.environments.search import index as index_module
from polyturn.environments.search.base import Passage
from polyturn.environments.search.bm25 import Bm25
from polyturn.environments.search.index import Bm25Settings, best_of, build_index
from polyturn.environments.search.memory import MemoryIndex
from polyturn.environments.search.words import words_of
from polyturn.errors import DataError, EnvironmentSetupError, ResourceError

WORDS = [f"w{number}" for number in range(40)]


def passages(count: int, seed: int = 0) -> list[Passage]:
    """Rare and common words, some passages of none, some equal."""
    rng = random.Random(seed)
    weights = [1 / (1 + rank) for rank in range(len(WORDS))]
    texts = [" ".join(rng.choices(WORDS, weights, k=rng.choice((0, 3, 8, 20)))) for _ in range(count)]
    return [Passage(id=str(n), title=rng.choice(WORDS), text=texts[n // 2 * 2]) for n in range(count)]


def saved(folder, **more):
    arrays = {name: np.load(folder / f"{name}.csc.index.npy") for name in ("data", "indices", "indptr")}
    return arrays | {"vocabulary": json.loads((folder / "vocab.index.json").read_text())} | more


def test_a_score_by_hand(tmp_path):
    """Two passages, of 2 and 4 words; `hill` in both, twice in the second: idf ln 1.2, tf 2 / (1.2 (.25 + .75 4/3) + 2)."""
    corpus = [Passage(id="a", title="Hill", text="green"), Passage(id="b", title="Hill", text="the hill, red sky")]
    assert build_index(corpus, tmp_path, Bm25Settings(), version="0") == 2
    found = saved(tmp_path)
    word = found["vocabulary"]["hill"]
    start, end = found["indptr"][word : word + 2]
    assert found["indices"][start:end].tolist() == [0, 1]
    expected = [math.log(1.2) * 1 / (1.2 * (0.25 + 0.75 * 2 / 3) + 1), math.log(1.2) * 2 / (1.2 * (0.25 + 0.75 * 4 / 3) + 2)]
    assert found["data"][start:end] == pytest.approx(expected, rel=1e-6)
    assert set(found["vocabulary"]) == {"hill", "green", "red", "sky"}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("spill")) == []


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_every_score_is_that_of_the_index_in_memory(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(index_module, "CHUNK", chunk)
    corpus = passages(60)
    build_index(corpus, tmp_path, Bm25Settings(k1=0.9, b=0.4), version="0")
    found = saved(tmp_path)
    slow = MemoryIndex(corpus, k1=0.9, b=0.4)._weights
    assert set(found["vocabulary"]) == set(slow)
    for word, number in found["vocabulary"].items():
        start, end = found["indptr"][number : number + 2]
        assert found["indices"][start:end].tolist() == [passage for passage, _ in slow[word]], "in the order of the corpus"
        assert found["data"][start:end] == pytest.approx([weight for _, weight in slow[word]], rel=1e-6)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=30), st.integers(1, 40))
def test_the_best_are_those_of_a_sort(scores, k):
    order = sorted((number for number, score in enumerate(scores) if score > 0), key=lambda number: (-scores[number], number))
    assert best_of(np.array(scores, np.float32), k) == order[:k]


def test_words_of_a_query_are_cut_as_those_of_a_passage():
    assert words_of("The COTSWOLD-Hills' 2nd_hill, naïve — Ünï 数!") == [
        "cotswold",
        "hills",
        "2nd",
        "hill",
        "naïve",
        "ünï",
        "数",
    ]
    assert words_of("who was the of") == []


@pytest.mark.parametrize("corpus", [[], [Passage(id="a", title="", text="x"), Passage(id="a", title="", text="y")]])
def test_a_corpus_that_makes_no_index(tmp_path, corpus):
    with pytest.raises(DataError, match="no passages" if not corpus else "two passages with the id 'a'"):
        build_index(corpus, tmp_path, Bm25Settings(), version="0")


# ── with bm25s ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def corpus_path(tmp_path):
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in passages(200)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.real
def test_bm25s_makes_the_same_scores_itself(tmp_path):
    """The library's own builder, given the same words, is the oracle."""
    import bm25s

    corpus = passages(200)
    build_index(corpus, tmp_path, Bm25Settings(), version=bm25s.__version__)
    ours = bm25s.BM25.load(tmp_path, mmap=True, show_progress=False)
    theirs = bm25s.BM25(k1=1.2, b=0.75, method="lucene", backend="numpy")
    theirs.index([words_of(f"{p.title} {p.text}") for p in corpus], show_progress=False)
    for query in (["w0"], ["w1", "w7", "w39"], WORDS):
        assert ours.get_scores(query) == pytest.approx(theirs.get_scores(query), rel=1e-5, abs=1e-6)


@pytest.mark.real
async def test_it_is_built_once_and_found_again(tmp_path, corpus_path, monkeypatch):
    first = Bm25(corpus_path, cache=tmp_path / "cache")
    await first.start()
    found = await first.search("w3 w9", 10)
    assert [p.id for p in found] == [p.id for p in await MemoryIndex(passages(200)).search("w3 w9", 10)]
    await first.stop()
    with pytest.raises(ResourceError, match="not open"):
        await first.search("w3", 1)
    monkeypatch.setattr(bm25_module, "build_index", None)
    again = Bm25(corpus_path, cache=tmp_path / "cache")
    await again.start()
    assert await again.search("w3 w9", 10) == found
    await again.stop()
    assert [path.name.startswith("bm25-") for path in (tmp_path / "cache").iterdir()] == [True], "one index and no draft"


@pytest.mark.real
async def test_settings_and_content_make_another_index(tmp_path, corpus_path):
    folders = {
        Bm25(corpus_path, cache=tmp_path).build(),
        Bm25(corpus_path, settings=Bm25Settings(b=0.5), cache=tmp_path).build(),
    }
    with corpus_path.open("a") as file:
        file.write(json.dumps({"id": "x", "title": "", "text": "w1"}) + "\n")
    folders.add(Bm25(corpus_path, cache=tmp_path).build())
    assert len(folders) == 3


def _build(path, cache, barrier, names) -> None:
    barrier.wait(30)
    names.put(str(Bm25(path, cache=cache).build()))


@pytest.mark.real
def test_two_processes_may_build_the_same_one_at_once(tmp_path, corpus_path):
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(2), context.Queue()
    builders = [context.Process(target=_build, args=(corpus_path, tmp_path / "cache", barrier, names)) for _ in range(2)]
    for builder in builders:
        builder.start()
    found = Counter(names.get(timeout=60) for _ in builders)
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert len(found) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.real
async def test_a_bad_row_leaves_no_index(tmp_path, corpus_path):
    with corpus_path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:201: the field 'id' is missing"):
        await Bm25(corpus_path, cache=tmp_path / "cache").start()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.real
async def test_a_damaged_index_is_said(tmp_path, corpus_path):
    backend = Bm25(corpus_path, cache=tmp_path / "cache")
    (backend.build() / "params.index.json").write_text("{")
    with pytest.raises(ResourceError, match="remove it, to build it anew"):
        await backend.start()


@pytest.mark.real
def test_a_cache_that_can_not_be_written_to(tmp_path, corpus_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EnvironmentSetupError, match="set POLYTURN_CACHE"):
        Bm25(corpus_path, cache=tmp_path / "cache").build()


@pytest.mark.real
async def test_a_large_index_searches_in_threads(tmp_path, corpus_path, monkeypatch):
    monkeypatch.setattr(bm25_module, "MANY", 1)
    backend = Bm25(corpus_path, cache=tmp_path / "cache")
    await backend.start()
    queries = [f"w{n % 40} w{n % 7}" for n in range(50)]
    slow = MemoryIndex(passages(200))
    for query, found in zip(queries, await asyncio.gather(*(backend.search(query, 5) for query in queries)), strict=True):
        assert found == await slow.search(query, 5)
    await backend.stop()
