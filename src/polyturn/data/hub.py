"""Reads rows of a data set on the hub, through the optional package `datasets`.

    hf:openai/gsm8k:main@train       hf:owner/name[:config][@split]

Without a split, training rows come from `train` and held-out rows from `test`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyturn.errors import DataError, MissingDependencyError

PREFIX = "hf:"
_FORM = re.compile(r"hf:(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """A data set on the hub; `config` is None for its only one."""

    id: str
    config: str | None
    split: str


def parse_hub_path(path: str, *, default_split: str) -> HubDataset:
    """What `hf:owner/name[:config][@split]` names. Raises DataError for another form."""
    match = _FORM.fullmatch(path)
    if match is None:
        raise DataError(f"{path} names no data set; the form is hf:owner/name[:config][@split], such as hf:openai/gsm8k:main")
    return HubDataset(id=match["id"], config=match["config"], split=match["split"] or default_split)


def with_split(path: str, split: str) -> str:
    """`path` with `split` named, where it is a hub data set that names none; other paths as they are."""
    return f"{path}@{split}" if path.startswith(PREFIX) and "@" not in path else path


def read_hub_rows(path: str, *, default_split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a split as (`path@split:number`, row), numbered from 1.

    Raises:
        DataError: not a data set's name, or one that `datasets` can't load; its own reason is in the sentence.
        MissingDependencyError: `datasets` is not installed.
    """
    wanted = parse_hub_path(path, default_split=default_split)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is a data set on the hub, which the package datasets reads; pip install 'polyturn[hub]'"
        ) from error
    try:
        rows = datasets.load_dataset(wanted.id, wanted.config, split=wanted.split)
    except Exception as error:  # it raises whatever its file formats and the network raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: datasets could not load split {wanted.split!r} ({type(error).__name__}: {reason}); "
            "check id, config and split, or give a JSONL file"
        ) from error
    name = path.partition("@")[0]
    for number, row in enumerate(rows, 1):
        yield f"{name}@{wanted.split}:{number}", dict(row)
