"""Cuts a file into training and validation rows, by what each row asks and nothing else.

A row's side follows from the seed and from the words of its question. So appending rows, sorting the file or changing an
answer moves no row to the other side, and two rows that ask the same are always together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.data.duplicates import nearly_same, question_key
from polyturn.data.formats import Format, recognise
from polyturn.data.load import Loaded
from polyturn.errors import DataError

_SEEDS_TRIED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The rows of both sides, in the order of the file."""

    train: tuple[Mapping[str, Any], ...]
    val: tuple[Mapping[str, Any], ...]
    near_pairs: int = 0
    """Validation rows that ask nearly what a training row asks."""


def side(question: str, *, val: float, seed: int) -> str:
    """`train` or `val`; a share `val` of all questions is `val`, whatever the others are.

    >>> side("2 + 2?", val=0.5, seed=0) == side("  2 + 2 ", val=0.5, seed=0)
    True
    """
    digest = hashlib.blake2b(f"{seed}\0{question_key(question)}".encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < val * 2**64 else "train"


def split_rows(loaded: Loaded, *, val: float, seed: int) -> Sides:
    """Both sides of a file.

    Raises:
        DataError: `val` is no share, a row is bad, or one side would be empty.
    """
    if not 0 < val < 1:
        raise DataError(f"--val={val:g} is no share; give a number between 0 and 1, such as 0.1")
    if loaded.problems:
        bad = "\n".join(f"{loaded.place(line)}: {reason}" for line, reason in loaded.problems)
        raise DataError(f"{bad}\nnothing was split; mend these lines first")
    fallback = loaded.format
    questions = [question_of(fields, fallback) for _, fields in loaded.rows]
    sides = [side(question, val=val, seed=seed) for question in questions]
    made = {
        name: tuple(fields for (_, fields), on in zip(loaded.rows, sides, strict=True) if on == name)
        for name in ("train", "val")
    }
    for name, rows in made.items():
        if not rows:
            raise DataError(
                f"{loaded.source.path}: none of {len(sides)} rows falls on the {name} side with --val {val:g} --seed {seed}; "
                f"{_way_out(questions, val)}"
            )
    return Sides(train=made["train"], val=made["val"], near_pairs=_near_pairs(questions, sides))


def question_of(fields: Mapping[str, Any], fallback: Format | None) -> str:
    """What a row asks, as one text; of a row in no built-in format, all of it."""
    found = recognise(fields, need_answer=False)
    form = found[0] if len(found) == 1 else fallback
    if form is None or form.prompt not in fields:
        return json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str)
    asked = [fields[form.prompt], *([fields[form.context]] if form.context and fields.get(form.context) else [])]
    if isinstance(asked[0], list):
        messages = [item for item in asked[0] if isinstance(item, Mapping) and item.get("role") != "system"]
        if len(messages) > 1 and messages[-1].get("role") == "assistant":
            messages.pop()
        asked = [item.get("content") for item in messages]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, sort_keys=True, default=str) for part in asked)


def side_paths(path: str, folder: str | None = None) -> tuple[Path, Path]:
    """Where the sides of a file go: `rows.jsonl` becomes `rows.train.jsonl` and `rows.val.jsonl`, beside it or in `folder`."""
    file = Path(path)
    suffixes = "".join(file.suffixes[-2:] if file.suffix == ".gz" else file.suffixes[-1:])
    stem = file.name.removesuffix(suffixes)
    home = file.parent if folder is None else Path(folder)
    train, val = (home / f"{stem}.{name}{suffixes or '.jsonl'}" for name in ("train", "val"))
    return train, val


def _way_out(questions: Sequence[str], val: float) -> str:
    """End of a sentence: the first seed that gives both sides rows."""
    for seed in range(_SEEDS_TRIED):
        if len({side(question, val=val, seed=seed) for question in questions}) == 2:
            return f"--seed {seed} gives both sides rows"
    return "give more rows, or another share"


def _near_pairs(questions: Sequence[str], sides: Sequence[str]) -> int:
    return sum(sides[found.index] != sides[found.earlier] for found in nearly_same(questions))
