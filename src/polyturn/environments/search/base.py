"""What a search back end is: a query in, passages out, best first.

    backend = Bm25("corpus.jsonl.gz")
    await backend.start()
    passages = await backend.search("highest hill of the Cotswolds", 3)

Whatever breaks raises, so that the trajectory is masked: an empty result means that nothing was found, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One paragraph of a corpus. `id` is the same whenever the passage is found."""

    id: str
    title: str
    text: str


class SearchBackend(Protocol):
    """A place to search in. One instance serves all trajectories of a run, many at once."""

    async def start(self) -> None:
        """Open it. Called once, in the loop that searches.

        Raises UserError for a corpus or an address that can't be used, ResourceError for a place that is out of reach.
        """

    async def stop(self) -> None:
        """Close it. May be called without a start."""

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """The `k` best passages, fewer when fewer fit. Raises ResourceError when it can't be said what fits."""
