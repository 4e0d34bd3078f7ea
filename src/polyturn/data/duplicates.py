"""Rows that ask the same, or nearly: found in one pass, without comparing every row with every other.

Two questions are *the same* when their words are, apart from case, white space and the marks around a word. They are *nearly
the same* when, of all runs of three words that stand in either, at least 85 % stand in both (runs of four letters for a
question of fewer than five words).

The pass: each row gets 64 numbers (the least hash of its runs under 64 hash functions, which two rows share as often as they
share runs), in 16 buckets of four. Rows that meet in a bucket are compared exactly, with the first few rows of the bucket only,
so the time grows with the number of rows.
"""

from __future__ import annotations

import hashlib
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

THRESHOLD = 0.85
WORDS_PER_RUN = 3
LETTERS_PER_RUN = 4
FEW_WORDS = 5
BANDS, BAND_SIZE = 16, 4
MOST_IN_BUCKET = 4
"""Rows of a bucket that a new row is compared with."""
MOST_CHARACTERS = 20_000
"""Of a longer question, only its start is compared."""
_EDGES = "\"'`.,;:?()[]{}«»“”‘’…¿¡"  # noqa: RUF001
_RANDOM = np.random.default_rng(20240229)
_FACTORS = _RANDOM.integers(1, 2**63, BANDS * BAND_SIZE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _RANDOM.integers(0, 2**63, BANDS * BAND_SIZE, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Row `index` asks what the earlier row `earlier` asks; `share` of their runs of words is common, 1 for the same words."""

    index: int
    earlier: int
    share: float


def words(text: str) -> list[str]:
    """The words of a text as they are compared. Signs that carry meaning in a sum stay: `2+3` and `2-3` differ.

    >>> words("What is  (2+3)?")
    ['what', 'is', '2+3']
    """
    pieces = unicodedata.normalize("NFKC", text).casefold().split()
    return [piece.strip(_EDGES) or piece for piece in pieces]


def question_key(text: str) -> str:
    """Equal for texts that are the same; stable over runs and machines."""
    return hashlib.blake2b(" ".join(words(text)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def same(texts: Iterable[str]) -> list[Likeness]:
    """Every text that is the same as an earlier one."""
    first: dict[str, int] = {}
    found = []
    for index, text in enumerate(texts):
        earlier = first.setdefault(question_key(text), index)
        if earlier != index:
            found.append(Likeness(index=index, earlier=earlier, share=1.0))
    return found


def nearly_same(texts: Sequence[str], *, threshold: float = THRESHOLD) -> list[Likeness]:
    """Every text that is nearly the same as an earlier one, and not the same as any."""
    buckets: dict[tuple[int, bytes], list[int]] = {}
    runs: dict[int, npt.NDArray[np.uint32]] = {}
    keys: set[str] = set()
    found = []
    for index, text in enumerate(texts):
        key = question_key(text)
        if key in keys:
            continue
        keys.add(key)
        mine = _runs(text[:MOST_CHARACTERS])
        if not len(mine):
            continue
        names = _bucket_names(mine)
        met = dict.fromkeys(other for name in names for other in buckets.get(name, ()))
        best = max(((_share(mine, runs[other]), -other) for other in met), default=(0.0, 0))
        if best[0] >= threshold:
            found.append(Likeness(index=index, earlier=-best[1], share=best[0]))
            continue
        for name in names:
            bucket = buckets.setdefault(name, [])
            if len(bucket) < MOST_IN_BUCKET:
                bucket.append(index)
                runs[index] = mine
    return found


def _runs(text: str) -> npt.NDArray[np.uint32]:
    """Hashes of the runs of a text, each once, in order."""
    parts: Sequence[str] = words(text)
    size, joint = WORDS_PER_RUN, " "
    if len(parts) < FEW_WORDS:
        parts, size, joint = " ".join(parts), LETTERS_PER_RUN, ""
    pieces = {joint.join(parts[start : start + size]) for start in range(max(1, len(parts) - size + 1))}
    hashes = [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces if piece]
    return np.unique(np.array(hashes, dtype=np.uint32))


def _bucket_names(runs: npt.NDArray[np.uint32]) -> list[tuple[int, bytes]]:
    mixed = _FACTORS[:, None] * runs.astype(np.uint64)[None, :] + _OFFSETS[:, None]
    least = (mixed >> np.uint64(32)).min(axis=1).astype(np.uint32)
    return [(band, least[band * BAND_SIZE : (band + 1) * BAND_SIZE].tobytes()) for band in range(BANDS)]


def _share(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> float:
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)
