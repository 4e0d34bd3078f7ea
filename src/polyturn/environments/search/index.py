"""A BM25 index on disk: built in one stream over the corpus, used from memory maps.

    passages.bin, passages.npy            rows as JSON, end to end, and where each starts
    data, indices, indptr .csc.index.npy  the score of every word in every passage, word by word: bm25s's own files
    vocab.index.json, params.index.json   so that `bm25s.BM25.load` opens the folder

The library's own builder holds every word of the corpus in Python lists. This one keeps the vocabulary and one number per
word and passage, spills the rest to disk, and gives the same scores.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyturn.environments.search.base import Passage
from polyturn.environments.search.words import words_of
from polyturn.errors import DataError

FORMAT = 1
"""Part of an index's name: raised when its files, or the way words are cut, change."""
CHUNK = 4096
"""Passages that are turned into arrays together."""
TEXTS, STARTS = "passages.bin", "passages.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bm25Settings:
    """`k1`: how soon more of the same word stops counting; `b`: how much long passages are held back."""

    k1: float = 1.2
    b: float = 0.75


class _Vocabulary(dict[str, int]):
    """Numbers words in the order of their first use."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


@dataclass(slots=True)
class _Spill:
    """Counts of one chunk: words `[P]` and how often `[P]`, passage by passage; `distinct` `[D]` says how many each has."""

    words: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    distinct: npt.NDArray[np.int32]

    def write(self, file: Any) -> None:
        np.array([len(self.words), len(self.distinct)], np.int64).tofile(file)
        for part in (self.words, self.counts, self.distinct):
            part.tofile(file)

    @staticmethod
    def read(file: Any) -> Iterator[_Spill]:
        while len(head := np.fromfile(file, np.int64, 2)):
            num_words, num_passages = map(int, head)
            yield _Spill(*(np.fromfile(file, np.int32, size) for size in (num_words, num_words, num_passages)))


def build_index(passages: Iterable[Passage], folder: Path, settings: Bm25Settings, *, version: str) -> int:
    """Write the index of `passages` into `folder`. Returns how many there are. Raises DataError without any.

    `version` is that of bm25s, which wants to read it back.
    """
    vocabulary = _Vocabulary()
    lengths = array("i")
    spilled = folder / "spill.bin"
    with spilled.open("wb") as spill:
        for chunk in _chunks(_stored(passages, folder)):
            _count(chunk, vocabulary, lengths).write(spill)
    if not lengths:
        raise DataError("the corpus has no passages; give rows with id, title and text")
    with spilled.open("rb") as spill:
        frequencies = np.zeros(len(vocabulary), np.int64)
        for part in _Spill.read(spill):
            frequencies += np.bincount(part.words, minlength=len(vocabulary))
    with spilled.open("rb") as spill:
        _score(_Spill.read(spill), folder, np.frombuffer(lengths, np.int32), frequencies, settings)
    spilled.unlink()
    _write_json(folder / "vocab.index.json", vocabulary)
    parameters = {"k1": settings.k1, "b": settings.b, "delta": 0.5, "method": "lucene", "idf_method": "lucene"}
    types = {"dtype": "float32", "int_dtype": "int32", "backend": "numpy"}
    _write_json(folder / "params.index.json", {**parameters, **types, "num_docs": len(lengths), "version": version})
    return len(lengths)


def _stored(passages: Iterable[Passage], folder: Path) -> Iterator[Passage]:
    """The passages as they come, each written away on its way. Raises DataError for an id that comes twice."""
    starts = array("q", [0])
    seen: set[int] = set()
    with (folder / TEXTS).open("wb") as texts:
        for passage in passages:
            # Of the ids only hashes are kept: 64 bits, so that a false alarm takes billions of passages.
            if (mark := hash(passage.id)) in seen:
                raise DataError(f"the corpus has two passages with the id {passage.id!r}; give each its own")
            seen.add(mark)
            row = json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False).encode("utf-8", "replace")
            starts.append(starts[-1] + texts.write(row))
            yield passage
    np.save(folder / STARTS, np.frombuffer(starts, np.int64))


def _chunks(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    stream = iter(passages)
    while chunk := list(islice(stream, CHUNK)):
        yield chunk


def _count(chunk: list[Passage], vocabulary: _Vocabulary, lengths: array[int]) -> _Spill:
    words = array("q")
    sizes = array("i")
    for passage in chunk:
        numbers = [vocabulary[word] for word in words_of(f"{passage.title} {passage.text}")]
        words.extend(numbers)
        sizes.append(len(numbers))
    lengths.extend(sizes)
    passage_of = np.repeat(np.arange(len(chunk), dtype=np.int64), np.frombuffer(sizes, np.int32))
    pairs, counts = np.unique(passage_of << 32 | np.frombuffer(words, np.int64), return_counts=True)
    return _Spill(
        words=(pairs & 0xFFFFFFFF).astype(np.int32),
        counts=counts.astype(np.int32),
        distinct=np.bincount(pairs >> 32, minlength=len(chunk)).astype(np.int32),
    )


def _score(
    parts: Iterable[_Spill],
    folder: Path,
    lengths: npt.NDArray[np.int32],
    frequencies: npt.NDArray[np.int64],
    settings: Bm25Settings,
) -> None:
    """Write the scores, word by word; within a word, passages stand in the order of the corpus."""
    num_passages = len(lengths)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequencies)])
    np.save(folder / "indptr.csc.index.npy", ends)
    size = max(int(ends[-1]), 1)
    scores = np.lib.format.open_memmap(folder / "data.csc.index.npy", "w+", np.float32, (size,))
    indices = np.lib.format.open_memmap(folder / "indices.csc.index.npy", "w+", np.int32, (size,))
    rarity = np.log(1 + (num_passages - frequencies + 0.5) / (frequencies + 0.5))
    held_back = settings.k1 * (1 - settings.b + settings.b * lengths / (lengths.mean() or 1.0))
    free, first = ends[:-1].copy(), 0
    for part in parts:
        passage = np.repeat(np.arange(first, first + len(part.distinct), dtype=np.int32), part.distinct)
        order = np.argsort(part.words, kind="stable")
        words, passage, counts = part.words[order], passage[order], part.counts[order]
        starts = np.flatnonzero(np.diff(words, prepend=-1))
        runs = np.diff(starts, append=len(words))
        places = free[words] + np.arange(len(words)) - np.repeat(starts, runs)
        indices[places] = passage
        scores[places] = rarity[words] * (counts / (held_back[passage] + counts))
        free[words[starts]] += runs
        first += len(part.distinct)
    scores.flush()
    indices.flush()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def best_of(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """Numbers of the `k` highest scores above 0; of equal ones the first passages of the corpus.

    >>> best_of(np.array([0, 2, 1, 2, 1], np.float32), 3)
    [1, 3, 2]
    """
    k = min(k, len(scores))
    least = float(np.partition(scores, len(scores) - k)[len(scores) - k])
    above = np.flatnonzero(scores > max(least, 0.0))
    equal = np.flatnonzero(scores == least)[: k - len(above)] if least > 0 else above[:0]
    chosen = np.concatenate([above, equal])
    return [int(number) for number in chosen[np.lexsort((chosen, -scores[chosen]))]]
