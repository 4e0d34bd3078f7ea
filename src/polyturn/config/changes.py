"""What differs between two resolved recipes, and whether a run may go on from the one with the other.

A run that goes on must train what it trained before. How fast, where and with how much noise in the log it does so may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.errors import ConfigError

_HARMLESS = (
    "run.name run.steps run.epochs run.output_dir run.log_level checkpoint logging launch evaluation sandbox "
    "data.cache_dir data.num_workers environment.num_processes environment.start_deadline_s "
    "rollout.concurrency rollout.max_dropped_share rollout.dropped_window_steps "
    "engine.num_servers engine.urls engine.host engine.port engine.devices engine.tensor_parallel_size engine.device "
    "engine.gpu_memory_utilization engine.max_model_len engine.start_deadline_s engine.max_batch_size engine.kind "
    "trainer.num_ranks trainer.devices trainer.collective_deadline_s trainer.device trainer.step_deadline_s trainer.threads "
    "trainer.activations trainer.compile trainer.memory trainer.row_tokens trainer.reference_device trainer.parallel "
    "trainer.shard_ranks trainer.context_ranks trainer.tensor_ranks trainer.sync_every_row trainer.share_prefixes "
    "weight_sync.mode weight_sync.verify_every weight_sync.deadline_s weight_sync.max_mismatch model.attention"
).split()
"""Keys and whole sections that change nothing of what is trained."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key with its two values."""

    key: str
    before: Any
    after: Any
    harmless: bool

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """All keys that differ. A key that only one of two versions of Polyturn knows counts where its value is not None."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    schedule = old.get("trainer.schedule", "constant")
    found = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            # A schedule that ends with the run has another rate at every step of a longer one.
            bound = key in ("run.steps", "run.epochs") and schedule != "constant"
            harmless = not bound and any(key == name or key.startswith(f"{name}.") for name in _HARMLESS)
            found.append(Change(key, old.get(key), new.get(key), harmless))
    return found


def refuse_changes(found: list[Change]) -> None:
    """Raise ConfigError, with every change a line, when the run would not be the same any more."""
    grave = [change for change in found if not change.harmless]
    if grave:
        raise ConfigError(
            "\n".join(
                [
                    "the recipe is not the one that the checkpoint was trained with, and the run would become another one; "
                    "take these back, or start a new run from its weights with --resume PATH --load model:",
                    *(f"  {change}" for change in grave),
                ]
            )
        )


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        elif value not in (None, {}):
            yield f"{path}{name}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value}"
