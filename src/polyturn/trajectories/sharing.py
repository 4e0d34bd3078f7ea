"""Whether laying down common beginnings once pays: an estimate of what rows cost with and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.trajectories.prefixes import Segment, Tree

LEAST_GAIN = 1.1
"""Below this the estimate is not good enough to tell a gain from a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What tokens, pairs of tokens, and keys that are laid out once more cost the model, in operations or any other unit.

    `dense`: attention computes every pair of a row and masks, with or without sharing, but for a row of one sample. Else it
    computes the pairs that count, and lays out keys in rows with common beginnings; one of those takes the memory of
    `room_per_key` tokens. A row costs no less than `least`: however short it is, its kernels are launched. `always` skips the
    estimate.
    """

    per_token: float
    per_pair: float
    per_key: float = 0.0
    room_per_key: float = 0.0
    least: float = 0.0
    dense: bool = True
    always: bool = False

    def room(self, tree: Tree) -> int:
        """How many tokens of a row `tree` takes the place of, with the keys that are there more often than its tokens."""
        return tree.num_tokens + math.ceil(self.room_per_key * (tree.num_keys - tree.num_tokens))

    def gain(self, plain: Sequence[Sequence[Tree]], shared: Sequence[Sequence[Tree]]) -> float:
        """How many times as fast the rows `shared` are as the rows `plain`, by the estimate."""
        return self._cost(plain) / self._cost(shared)

    def pays(self, plain: Sequence[Sequence[Tree]], shared: Sequence[Sequence[Tree]]) -> bool:
        """Whether the rows `shared` are to be taken."""
        return self.always or self.gain(plain, shared) >= LEAST_GAIN

    def _cost(self, rows: Sequence[Sequence[Tree]]) -> float:
        return sum(max(self.least, self._of_row(row)) for row in rows)

    def _of_row(self, row: Sequence[Tree]) -> float:
        tokens = sum(tree.num_tokens for tree in row)
        if self.dense:
            return tokens * self.per_token + _dense_pairs(row) * self.per_pair
        pairs = sum(tree.num_pairs for tree in row)
        anew = any(len(tree.segments) > 1 for tree in row)
        keys = sum(tree.num_keys for tree in row) if anew else 0
        return tokens * self.per_token + pairs * self.per_pair + keys * self.per_key


def _dense_pairs(row: Sequence[Tree]) -> float:
    """Of a row with a mask all pairs; a row of one sample needs none, and half of them."""
    tokens = sum(tree.num_tokens for tree in row)
    return tokens**2 / 2 if len(row) == 1 and len(row[0].segments) == 1 else tokens**2


def gain_of(prompt: int, completion: int, group_size: int, sharing: Sharing) -> float:
    """The gain of one group whose completions are as long, each alone in a row or all in one.

    >>> round(gain_of(1000, 250, 8, Sharing(per_token=1.0, per_pair=0.0)), 2)
    3.33
    """
    plain = [[Tree(segments=(Segment(n, 0, prompt + completion, -1),), samples=(n,))] for n in range(group_size)]
    own = tuple(Segment(n, prompt, prompt + completion, 0) for n in range(group_size))
    shared = Tree(segments=(Segment(0, 0, prompt, -1), *own), samples=tuple(range(group_size)))
    return sharing.gain(plain, [[shared]])
