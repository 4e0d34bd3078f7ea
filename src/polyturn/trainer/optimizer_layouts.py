"""The state of one optimizer in two layouts: by number, as whole copies of the weights keep it, and by name, as shards do.

    {"masters": [tensor, ...], "rule": {"state": {0: {"exp_avg": tensor, ...}}, "param_groups": [...]}}
    {"parameters": {name: {"exp_avg": tensor, ..., "master": tensor}}, "steps": N}

Nothing here looks into a tensor, so a place that stands for one will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MASTER = "master"


def in_layout_of(
    live: Mapping[str, Any], saved: Mapping[str, Any], dimensions: Mapping[str, int], *, steps: int
) -> Mapping[str, Any] | None:
    """`saved` in the layout of `live`; None where it can't be had, as of rounded weights, whose noise is each rank's own.

    `dimensions`: of every trained parameter by name, in the order of the model. `steps` were made.
    """
    if _has_masters(live) != _has_masters(saved):
        return None
    if live.keys() == saved.keys():
        return saved
    if "parameters" in live and "rule" in saved:
        return _by_name(saved, dimensions, steps)
    if "rule" in live and "parameters" in saved:
        return _by_number(live, saved, dimensions)
    return None


def masters_of(saved: Mapping[str, Any], trained: list[str]) -> list[Any] | None:
    """The float32 copies of the trained parameters in their order, if there are any."""
    if "masters" in saved:
        return list(saved["masters"])
    parameters = saved.get("parameters", {})
    return [parameters[name][_MASTER] for name in trained] if all(_MASTER in parameters.get(n, ()) for n in trained) else None


def _has_masters(state: Mapping[str, Any]) -> bool:
    return "masters" in state or any(_MASTER in kept for kept in state.get("parameters", {}).values())


def _by_name(saved: Mapping[str, Any], dimensions: Mapping[str, int], steps: int) -> dict[str, Any]:
    kept = saved["rule"]["state"]
    found = {name: dict(kept.get(place, {})) for place, name in enumerate(_numbered(dimensions))}
    for name, master in zip(dimensions, saved.get("masters", ()), strict=False):
        found[name][_MASTER] = master
    return {"parameters": found, "steps": steps}


def _by_number(live: Mapping[str, Any], saved: Mapping[str, Any], dimensions: Mapping[str, int]) -> dict[str, Any]:
    kept = [
        {kind: value for kind, value in saved["parameters"][name].items() if kind != _MASTER} for name in _numbered(dimensions)
    ]
    rule = {**live["rule"], "state": {place: values for place, values in enumerate(kept) if values}}
    masters = masters_of(saved, list(dimensions))
    return {"rule": rule} if masters is None else {"masters": masters, "rule": rule}


def _numbered(dimensions: Mapping[str, int]) -> list[str]:
    """Names in the order in which a rule numbers its parameters: see `update_rules.numbered`."""
    return sorted(dimensions, key=lambda name: dimensions[name] < 2)
