"""What happened in a training step, on one rank, and the metrics that all ranks' records come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyturn.losses.base import LossResult, Totals

_LOSS, _ENTROPY, _AGE = "loss", "entropy", "policy_age"


@dataclass(slots=True)
class Record:
    """Kept as tensors, so that nothing waits for the device before the end of the step."""

    results: list[LossResult] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    ages: list[tuple[float, int]] = field(default_factory=list)
    """Sum of the policy ages of a share's trained tokens, and how many there are."""
    learning_rate: float = 0.0

    def note(self) -> dict[str, Any]:
        """The numbers of one rank, as JSON."""
        totals = Totals.of(self.results)
        entropy = torch.cat(self.entropies) if self.entropies else torch.zeros(0)
        own = {
            _LOSS: (float(torch.stack(self.losses).sum()) if self.losses else 0.0, 0.0),
            _ENTROPY: (float(entropy.sum()), float(len(entropy))),
            _AGE: (sum(age for age, _ in self.ages), float(sum(count for _, count in self.ages))),
        }
        return {"sums": {**totals.sums, **own}, "maxima": dict(totals.maxima)}

    def metrics(self, notes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The step's metrics from the notes of all ranks; what is the same on all is this rank's own."""
        totals = Totals.merged([Totals(sums=note["sums"], maxima=note["maxima"]) for note in notes])
        sums = dict(totals.sums)
        loss, _ = sums.pop(_LOSS)
        return {
            "loss": loss / max(1, len(self.grad_norms)),
            "grad_norm": float(torch.stack(self.grad_norms).mean()) if self.grad_norms else float("nan"),
            "learning_rate": self.learning_rate,
            **Totals(sums=sums, maxima=totals.maxima).metrics(),
        }
