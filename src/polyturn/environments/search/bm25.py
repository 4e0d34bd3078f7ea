"""`bm25`: a corpus file and its index in the cache. Scores come from the package bm25s, memory from the file system."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyturn.environments.search.base import Passage
from polyturn.environments.search.corpus import corpus_digest, corpus_file, read_corpus
from polyturn.environments.search.index import FORMAT, STARTS, TEXTS, Bm25Settings, best_of, build_index
from polyturn.environments.search.words import words_of
from polyturn.errors import EnvironmentSetupError, MissingDependencyError, ResourceError
from polyturn.models.cache import cache_folder, draft_of
from polyturn.processes.threads import in_thread

MANY = 50_000
"""Passages from which a search runs in a thread, so that a long one holds up nobody."""


class Bm25:
    """BM25 over `corpus`. The index is built at the first start and kept in the cache, under the file's hash.

    Raises:
        MissingDependencyError: bm25s is not installed.
        DataError: there is no such file.
    """

    def __init__(self, corpus: str | Path, *, settings: Bm25Settings | None = None, cache: Path | None = None) -> None:
        self.corpus = corpus_file(corpus)
        self.settings = settings or Bm25Settings()
        self._cache = cache
        self._version = _bm25s_version()
        self._index: _Index | None = None

    @property
    def num_passages(self) -> int:
        """Passages of the index; 0 before the start."""
        return 0 if self._index is None else len(self._index.starts) - 1

    async def start(self) -> None:
        """Build the index or find it, and map it. Raises DataError for a bad row, EnvironmentSetupError for a bad cache."""
        if self._index is None:
            self._index = await in_thread(lambda: _opened(self.build()))

    async def stop(self) -> None:
        """Let go of the maps."""
        index, self._index = self._index, None
        if index is not None:
            index.texts.close()

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Raises ResourceError before `start`."""
        if self.num_passages >= MANY:
            return await in_thread(self.search_now, query, k)
        return self.search_now(query, k)

    def search_now(self, query: str, k: int) -> list[Passage]:
        """The same without a loop; several threads may call it at once."""
        if self._index is None:
            raise ResourceError("the search index is not open; call start first")
        return self._index.search(query, k)

    def build(self) -> Path:
        """The folder of the index, made when the cache does not hold it. Blocks, an hour for 10 million passages."""
        key = {"format": FORMAT, "k1": self.settings.k1, "b": self.settings.b, "bm25s": self._version}
        key["corpus"] = corpus_digest(self.corpus)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        folder = (self._cache or cache_folder() / "search") / f"bm25-{name}"
        if folder.is_dir():
            return folder
        with draft_of(folder, what="search indexes", is_whole=Path.is_dir, error_class=EnvironmentSetupError) as draft:
            self._fill(draft)
        return folder

    def _fill(self, draft: Path) -> None:
        try:
            build_index(read_corpus(self.corpus), draft, self.settings, version=self._version)
        except OSError as error:
            raise ResourceError(f"the index of {self.corpus} could not be written to {draft.parent}: {error}") from error


@dataclass(slots=True)
class _Index:
    """An index that is open: read only, so that threads may share it."""

    scorer: Any
    starts: npt.NDArray[np.int64]
    texts: mmap.mmap

    def search(self, query: str, k: int) -> list[Passage]:
        vocabulary = self.scorer.vocab_dict
        numbers = [vocabulary[word] for word in words_of(query) if word in vocabulary]
        if not numbers or k < 1:
            return []
        return [self._passage(number) for number in best_of(self.scorer.get_scores_from_ids(numbers), k)]

    def _passage(self, number: int) -> Passage:
        row = json.loads(self.texts[int(self.starts[number]) : int(self.starts[number + 1])])
        return Passage(id=row[0], title=row[1], text=row[2])


def _opened(folder: Path) -> _Index:
    import bm25s

    try:
        scorer = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        starts = np.load(folder / STARTS, mmap_mode="r", allow_pickle=False)
        with (folder / TEXTS).open("rb") as file:
            texts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, KeyError) as error:
        raise ResourceError(f"the search index {folder} can't be read ({error}); remove it, to build it anew") from error
    return _Index(scorer=scorer, starts=starts, texts=texts)


def _bm25s_version() -> str:
    try:
        return importlib.metadata.version("bm25s")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "searching a corpus needs the package bm25s; pip install 'polyturn[search]', or use a server with backend: http"
        ) from None
