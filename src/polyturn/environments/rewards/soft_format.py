"""`soft_format`: how much of the form asked for a reply keeps, in parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.errors import EnvironmentSetupError
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftFormat:
    """Replies of the form `<think>...</think> <answer>...</answer>`, for the `tags` named.

    The parts, which weigh the same and add up to 1: each tag is opened once, closed once and not empty; all of them in the
    order given (`order`); nothing but white space outside (`only`). `turns` says whose form counts: the last reply's, or the
    mean over `every` reply.
    """

    tags: tuple[str, ...] = ("think", "answer")
    turns: Literal["last", "every"] = "last"

    def __post_init__(self) -> None:
        tags: object = self.tags
        if not isinstance(tags, tuple) or not tags or not all(re.fullmatch(r"[\w-]+", str(tag)) for tag in tags):
            raise EnvironmentSetupError(f"tags={self.tags!r} is no list of tag names; give such as [think, answer]")
        if self.turns not in ("last", "every"):
            raise EnvironmentSetupError(f"turns={self.turns!r} is neither last nor every; give one of them")

    def __call__(self, view: TrajectoryView, task: Task) -> dict[str, float]:
        """The parts by name."""
        texts = [turn.text for turn in view.scored] if self.turns == "every" else [view.text]
        parts: dict[str, float] = dict.fromkeys((*self.tags, "order", "only"), 0.0)
        for text in texts:
            for name, kept in self.parts(text).items():
                parts[name] += kept / len(parts) / len(texts)
        return parts

    def parts(self, text: str) -> dict[str, bool]:
        """Which parts one reply keeps."""
        found: dict[str, re.Match[str] | None] = {}
        for tag in self.tags:
            once = text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1
            match = re.search(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
            found[tag] = match if once and match is not None and match[1].strip() else None
        blocks = [match for match in found.values() if match is not None]
        whole = len(blocks) == len(self.tags)
        ordered = whole and all(left.end() <= right.start() for left, right in pairwise(blocks))
        outside = text
        for match in blocks:
            outside = outside.replace(match[0], "", 1)
        return {tag: match is not None for tag, match in found.items()} | {
            "order": ordered,
            "only": ordered and not outside.strip(),
        }
