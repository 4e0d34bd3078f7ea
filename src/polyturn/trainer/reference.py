"""The frozen policy of the KL term: a model of its own, on the device or in CPU memory, or the policy without adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from polyturn.models.adapters import adapters_off
from polyturn.trainer.row import RowTensors
from polyturn.trainer.scorer import Scorer

ScorerOf: TypeAlias = Callable[[torch.nn.Module], Scorer]


class Reference(Protocol):
    """What the trainer asks of it."""

    def present(self) -> AbstractContextManager[None]:
        """Within it `logprobs` may be called."""

    def logprobs(self, rows: Sequence[RowTensors]) -> list[Tensor]:
        """Log-probabilities of the trained tokens, row by row, without gradient."""


def reference_of(
    model: torch.nn.Module | None, policy: torch.nn.Module, score: Scorer, scorer_of: ScorerOf
) -> Reference | None:
    """What `model` is to `policy`, which `score` scores: nothing, the policy itself without its adapters, or another model."""
    if model is None:
        return None
    if model is policy:
        return WithoutAdapters(score)
    return FrozenModel(model.eval(), next(policy.parameters()).device, scorer_of)


def present(reference: Reference | None) -> AbstractContextManager[None]:
    """Within it `reference` may be asked, where there is one."""
    return nullcontext() if reference is None else reference.present()


class WithoutAdapters:
    """The policy with its adapters off, which is the policy from before the first step: no second model is held."""

    def __init__(self, score: Scorer) -> None:
        self._score = score

    def present(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def logprobs(self, rows: Sequence[RowTensors]) -> list[Tensor]:
        """See `Reference.logprobs`."""
        with adapters_off(self._score.model):
            return without_gradient(self._score, rows)


class FrozenModel:
    """A model that scores on `device`. Where it lies in CPU memory instead, its weights are on `device` while it is present.

    They go there once for all rows of a training step, before the first of them is trained on: then neither gradients nor
    activations are there, and the weights take room that they need later. Nothing travels back.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, scorer_of: ScorerOf) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._device = device
        self._away = next(model.parameters()).device != device
        if self._away and device.type == "cuda":
            for tensor in self._tensors:
                tensor.data = tensor.data.pin_memory()
        with self.present():
            self._score = scorer_of(model)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Bring its weights to the device, where they are not there."""
        if not self._away:
            yield
            return
        at_home = [tensor.data for tensor in self._tensors]
        try:
            for tensor, home in zip(self._tensors, at_home, strict=True):
                tensor.data = home.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, home in zip(self._tensors, at_home, strict=True):
                tensor.data = home

    def logprobs(self, rows: Sequence[RowTensors]) -> list[Tensor]:
        """See `Reference.logprobs`."""
        return without_gradient(self._score, rows)


@torch.no_grad()
def without_gradient(score: Scorer, rows: Sequence[RowTensors]) -> list[Tensor]:
    """Log-probabilities of the trained tokens, row by row."""
    return [score(row)[0] for row in rows]
