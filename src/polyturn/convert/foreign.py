"""Reads a file of another tool, YAML or JSON, with the line of every key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from polyturn.config.load import read_text
from polyturn.config.sentences import kind_words
from polyturn.config.yaml_lines import KeyPath, dotted, parse_yaml
from polyturn.errors import ConfigError

Kind: TypeAlias = Literal["accelerate", "deepspeed"]

_PATTERNS = ("*.yaml", "*.yml", "*.json")
_ACCELERATE = {"distributed_type", "compute_environment", "num_processes", "fsdp_config", "deepspeed_config", "mixed_precision"}
_DEEPSPEED = {
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16",
    "optimizer", "scheduler", "gradient_clipping",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What a file holds: plain values, and the line of every key."""

    source: str
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def place(self, path: KeyPath) -> str:
        """File and line of a key, or of the nearest one around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source

    def kind(self) -> Kind:
        """Whose file it is, by its keys. Raises ConfigError when it is nobody's."""
        keys = set(self.data)
        ours, theirs = len(keys & _ACCELERATE), len(keys & _DEEPSPEED)
        if not ours and not theirs:
            raise ConfigError(
                f"{self.source}: neither a YAML of accelerate, which has distributed_type and num_processes, nor a JSON of "
                "DeepSpeed, which has zero_optimization; give one of these"
            )
        return "accelerate" if ours >= theirs else "deepspeed"


def read_foreign(path: str | Path) -> Foreign:
    """The mapping in a YAML or JSON file. Raises ConfigError with a sentence for every mistake, one a line."""
    source = Path(path)
    text = read_text(source, _PATTERNS)
    looks_like_json = text.lstrip().startswith("{") or source.suffix == ".json"
    return _read_json(str(source), text) if looks_like_json else _read_yaml(str(source), text)


def _read_yaml(source: str, text: str) -> Foreign:
    document = parse_yaml(text)
    if document.problems:
        _refuse(
            *(
                f"{source}:{problem.line}: {f'{dotted(problem.path)}: ' if problem.path else ''}{problem.sentence}"
                for problem in document.problems
            )
        )
    return Foreign(source=source, data=_mapping(source, document.data), lines=document.lines)


def _read_json(source: str, text: str) -> Foreign:
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip()
        comment = "; JSON has no comments: remove it" if rest.startswith(("#", "//", "/*")) else ""
        _refuse(f"{source}:{error.lineno}: not valid JSON: {error.msg}{comment}")
    except ValueError as error:  # of the hooks, and of a number with thousands of digits
        _refuse(f"{source}: not valid JSON: {error}")
    except RecursionError:
        _refuse(f"{source}: not a configuration: values are nested hundreds of levels deep; flatten them")
    # JSON is YAML but for tabs, which it has between words only.
    lines = parse_yaml(text.replace("\t", " ")).lines
    return Foreign(source=source, data=_mapping(source, data), lines=lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given twice; keep one")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; give a finite one")


def _mapping(source: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        _refuse(f"{source}: the file holds {'nothing' if data is None else kind_words(data)}; a mapping of keys is needed")
    return dict(data)


def _refuse(*problems: str) -> NoReturn:
    raise ConfigError("\n".join(problems))
