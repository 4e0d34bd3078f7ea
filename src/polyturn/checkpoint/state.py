"""What a full state is: everything that a later process needs, so that it goes on as this one would have.

modules     by name (`policy`; a critic would be another): weights, optimizer, both counters
loop        the last whole step, the data's cursor, what guard and estimator remember, the evaluations before training
random      where the generators of every rank stand
groups      trajectories that are under way or wait for the trainer; the synchronous loop has none between two steps
recipe      resolved; and the versions of the code and the packages it ran with
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("polyturn", "torch", "transformers", "numpy", "tokenizers", "peft", "bitsandbytes", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where the loop stands between two steps. All values are JSON."""

    step: int = 0
    """Steps that are done; the next one is `step + 1`."""
    cursor: int = 0
    """Tasks taken from the stream."""
    policy_version: int = 0
    """What the engine served."""
    guard: Sequence[Sequence[int]] = ()
    """Trajectories lost and planned, of the last steps."""
    estimator: Any = None
    """What the estimator remembers, if anything."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """The evaluations before training, by mode."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoopState:
        """From what `full_state` wrote; names that a later version added are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def full_state(
    modules: Mapping[str, Any],
    loop: LoopState,
    *,
    randomness: Sequence[Any],
    recipe: Mapping[str, Any],
    in_flight: Sequence[Any] = (),
    buffered: Sequence[Any] = (),
) -> dict[str, Any]:
    """The whole of it. `in_flight` and `buffered` are groups as JSON, each with the versions that sampled its tokens."""
    return {
        "modules": dict(modules),
        "loop": _plain(asdict(loop)),
        "random": list(randomness),
        "groups": {"in_flight": list(in_flight), "buffered": list(buffered)},
        "recipe": dict(recipe),
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Of Python and the packages that a run computes with, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
