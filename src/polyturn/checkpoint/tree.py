"""A state as two parts: its tensors, by path, and all the rest as JSON that says where each of them belongs.

    {"rule": {"state": {0: {"step": tensor}}, "betas": (0.9, 0.95)}}
    ─> {"rule.state.0.step": tensor} and {"rule": {"state": {"dict": [[0, {"step": {"tensor": "rule.state.0.step"}}]]}, ...}}

Only tensors are kept in a format of torch's; nothing else of a state is ever pickled. Two names of one tensor (tied
embeddings) are kept once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"

_MARKS = ("tensor", "dict", "tuple", "number")
"""A mapping of one of these names alone stands for what JSON doesn't have."""


def split(state: Any) -> tuple[Tensors, Any]:
    """The tensors of `state` (the live ones, by path) and the rest.

    `state` is made of dictionaries, lists, tuples, tensors, text, numbers, booleans and None; keys are text or whole numbers.
    Raises TypeError, naming the path, for anything else.
    """
    tensors: Tensors = {}
    known: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            name, place = ".".join(path), _place_of(value)
            first = known.setdefault(place, name) if place is not None else name
            if first == name:
                if name in tensors:
                    raise TypeError(f"two tensors of a state are called {name}")
                tensors[name] = value
            return {"tensor": first}
        if isinstance(value, Mapping):
            if not all(type(key) in (str, int) for key in value):
                raise TypeError(f"{'.'.join(path)}: the keys of a state are text or whole numbers")
            items = [(key, walk(inner, (*path, str(key)))) for key, inner in value.items()]
            plain = all(isinstance(key, str) for key in value) and not (len(items) == 1 and items[0][0] in _MARKS)
            return dict(items) if plain else {"dict": [list(item) for item in items]}
        if isinstance(value, list | tuple):
            inner = [walk(one, (*path, str(index))) for index, one in enumerate(value)]
            return inner if isinstance(value, list) else {"tuple": inner}
        if isinstance(value, float) and not math.isfinite(value):
            return {"number": str(value)}
        if value is None or type(value) in (str, int, float, bool):
            return value
        raise TypeError(f"{'.'.join(path)}: a {type(value).__name__} can't be part of a state")

    rest = walk(state, ())
    return tensors, rest


def join(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `split` took apart. Raises KeyError for a tensor that is not there."""
    if isinstance(rest, dict):
        if len(rest) == 1:
            ((mark, inner),) = rest.items()
            if mark == "tensor":
                return tensors[inner]
            if mark == "dict":
                return {key: join(value, tensors) for key, value in inner}
            if mark == "tuple":
                return tuple(join(value, tensors) for value in inner)
            if mark == "number":
                return float(inner)
        return {key: join(value, tensors) for key, value in rest.items()}
    if isinstance(rest, list):
        return [join(value, tensors) for value in rest]
    return rest


def paths_in(rest: Any) -> set[str]:
    """The paths of all tensors that belong into `rest`."""
    if isinstance(rest, dict):
        if len(rest) == 1 and isinstance(name := rest.get("tensor"), str):
            return {name}
        return set().union(*map(paths_in, rest.values()))
    return set().union(*map(paths_in, rest)) if isinstance(rest, list) else set()


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What two names of one tensor have in common; None where that can't be said, as of an empty or distributed one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
