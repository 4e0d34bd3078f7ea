"""Adds up metrics over rows and optimizer steps without waiting for the device before the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Number = torch.Tensor | float


class Totals:
    """Sums and counts by name. Names that end in `_max` keep the largest value instead."""

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._counts: dict[str, Number] = {}

    def add(self, name: str, value: torch.Tensor, count: Number) -> None:
        """Add a sum over `count` things."""
        value = value.detach()
        if name.endswith("_max"):
            seen = self._sums.get(name)
            self._sums[name] = value if seen is None else torch.maximum(torch.as_tensor(seen), value)
            self._counts[name] = 1.0
            return
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0.0) + count

    def add_sum(self, name: str, value: torch.Tensor) -> None:
        """Add to a number that is a sum itself, such as a loss made of weighted terms."""
        self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        self._counts[name] = 1.0

    def add_all(self, metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add pairs of sum and count."""
        for name, (value, count) in metrics.items():
            self.add(name, value, count.detach())

    def means(self) -> dict[str, float]:
        """Each sum over its count; names nothing was counted for are left out."""
        return {name: float(total) / float(self._counts[name]) for name, total in self._sums.items() if float(self._counts[name])}
