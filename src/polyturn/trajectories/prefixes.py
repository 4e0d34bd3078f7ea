"""Finds what the samples of a group have in common at their beginning, and lays them out as a tree that has it once.

    sample 1   p p p p a a          row       p p p p  a a  b b b  c
    sample 2   p p p p b b b   ─>   segment   0 0 0 0  1 1  2 2 2  3
    sample 3   p p p p c            parent    -        0    0      0

A token sees its own segment up to itself, and all of the segments above. So its hidden state is what it would be in its own
sample, and the gradients add up to the same. A token may be common to several samples as long as at most one of them trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyturn.types import TrainSample

SHORTEST = 16
"""Fewer common tokens are not worth a segment of their own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start:end` of `sample`, which stands for all samples below; `parent` is the place of the one before, or -1."""

    sample: int
    start: int
    end: int
    parent: int
    owners: tuple[int, ...] = field(default=())
    """Samples that train a token of it, besides `sample`: each token is trained by one at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Segments, parents before their children. `samples` are those that it holds, by their number."""

    segments: tuple[Segment, ...]
    samples: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments, each once."""
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def num_keys(self) -> int:
        """Tokens that each segment sees, its own and those above, summed over segments."""
        return sum(self._through)

    @property
    def num_pairs(self) -> float:
        """Pairs of a token and one that it sees."""
        total = 0.0
        for segment, through in zip(self.segments, self._through, strict=True):
            length = segment.end - segment.start
            total += length * (through - length + (length + 1) / 2)
        return total

    @property
    def _through(self) -> list[int]:
        """The length of each segment with those above it."""
        found: list[int] = []
        for segment in self.segments:
            above = 0 if segment.parent < 0 else found[segment.parent]
            found.append(above + segment.end - segment.start)
        return found


def alone(number: int, sample: TrainSample) -> Tree:
    """A tree of one sample."""
    return Tree(segments=(Segment(number, 0, len(sample), -1),), samples=(number,))


def tree_of(samples: Sequence[TrainSample], numbers: Sequence[int]) -> Tree:
    """The samples with these numbers, with what they have in common once."""
    segments: list[Segment] = []
    _grow(samples, list(numbers), 0, -1, segments)
    return Tree(segments=tuple(segments), samples=tuple(numbers))


def trees(samples: Sequence[TrainSample], *, most_tokens: int, room: Callable[[Tree], int]) -> list[Tree]:
    """Trees that take at most `most_tokens` by `room`, of samples of one group each; every sample is in one.

    Equal input gives equal trees.
    """
    groups: dict[tuple[str, float], list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault((sample.group_id, sample.temperature), []).append(number)
    found: list[Tree] = []
    for members in groups.values():
        # Neighbours in this order have the longest common beginnings. Bytes, the highest first, are ordered as numbers.
        members.sort(key=lambda number: (samples[number].input_ids.astype(">u4").tobytes(), number))
        whole = tree_of(samples, members)
        if room(whole) <= most_tokens:
            found.append(whole)
            continue
        chunk: list[int] = []
        for number in members:
            if chunk and room(tree_of(samples, [*chunk, number])) > most_tokens:
                found.append(tree_of(samples, chunk))
                chunk = []
            chunk.append(number)
        found.append(tree_of(samples, chunk))
    return found


def _grow(samples: Sequence[TrainSample], members: list[int], start: int, parent: int, segments: list[Segment]) -> None:
    """Lay out `members`, which are the same up to `start`, below `parent`."""
    branches: dict[int, list[int]] = {}
    for number in members:
        if start < len(samples[number]):
            branches.setdefault(int(samples[number].input_ids[start]), []).append(number)
    for branch in branches.values():
        end = _common(samples, branch, start) if len(branch) > 1 else start
        if end - start < SHORTEST:
            segments.extend(Segment(number, start, len(samples[number]), parent) for number in branch)
            continue
        trained = tuple(number for number in branch[1:] if samples[number].loss_mask[start:end].any())
        segments.append(Segment(branch[0], start, end, parent, trained))
        _grow(samples, branch, end, len(segments) - 1, segments)


def _common(samples: Sequence[TrainSample], members: Sequence[int], start: int) -> int:
    """Up to where the members are the same, and no token is trained by two of them."""
    shortest = min(len(samples[number]) for number in members)
    ids = np.stack([samples[number].input_ids[start:shortest] for number in members])
    trained = np.stack([samples[number].loss_mask[start:shortest] for number in members]).sum(0)
    differs = (ids != ids[0]).any(0) | (trained > 1)
    return start + (int(differs.argmax()) if differs.any() else shortest - start)
