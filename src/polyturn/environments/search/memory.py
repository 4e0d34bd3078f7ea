"""BM25 over a few thousand passages in memory, in plain Python: needs no package and no disk."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from polyturn.environments.search.base import Passage
from polyturn.environments.search.words import words_of


class MemoryIndex:
    """Scores as the index on disk does (see `index.py`); equal scores in the order of the passages.

    >>> import asyncio
    >>> index = MemoryIndex([Passage(id="1", title="Zorland", text="capital Mirtak")])
    >>> [passage.id for passage in asyncio.run(index.search("capital of Zorland", 3))]
    ['1']
    """

    def __init__(self, passages: Iterable[Passage], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.passages = tuple(passages)
        counted = [Counter(words_of(f"{passage.title} {passage.text}")) for passage in self.passages]
        lengths = [counts.total() for counts in counted]
        mean = sum(lengths) / len(lengths) if sum(lengths) else 1.0
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (counts, length) in enumerate(zip(counted, lengths, strict=True)):
            for word, count in counts.items():
                found[word].append((number, count / (k1 * (1 - b + b * length / mean) + count)))
        self._weights = {word: _weighed(entries, len(counted)) for word, entries in found.items()}

    async def start(self) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to close."""

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Never fails."""
        return self.search_now(query, k)

    def search_now(self, query: str, k: int) -> list[Passage]:
        """The same without a loop."""
        scores: dict[int, float] = defaultdict(float)
        for word in words_of(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        best = sorted(scores, key=lambda number: (-scores[number], number))[:k]
        return [self.passages[number] for number in best]


def _weighed(entries: list[tuple[int, float]], num_passages: int) -> list[tuple[int, float]]:
    rarity = math.log(1 + (num_passages - len(entries) + 0.5) / (len(entries) + 0.5))
    return [(number, rarity * share) for number, share in entries]
