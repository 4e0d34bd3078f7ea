"""Runs the optimizer steps of a batch: score rows, sum their losses backward, step.

Every loss is a plain sum of weighted per-token losses, with weights fixed over the whole optimizer step, so the gradient
does not depend on how the tokens are cut into rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyturn.errors import NonFiniteError
from polyturn.losses.aggregation import token_weights
from polyturn.losses.base import LossInputs, LossResult, combined_metrics, required
from polyturn.losses.policy import needs_whole_segments, policy_loss
from polyturn.losses.ratio import segment_log_ratio
from polyturn.losses.sampler import sampler_weights
from polyturn.trainer.forward import RowTensors, refuse_mixed_samples, to_tensors, trained_logprobs
from polyturn.trainer.optimizer import build_optimizer, learning_rate_at
from polyturn.trainer.settings import TrainerSettings
from polyturn.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch on the device, with what its loss needs from outside a row. Lists run over rows."""

    rows: list[RowTensors]
    token_weights: list[Tensor]
    old_logprobs: list[Tensor] | None
    """The policy's before the first optimizer step on this batch; None where this forward is that policy."""
    reference_logprobs: list[Tensor] | None
    policy_age: float
    """Mean over the trained tokens."""
    num_trained_tokens: int


@dataclass(slots=True)
class _Record:
    """What happened in a step, kept as tensors so that nothing waits for the device before the end."""

    results: list[LossResult] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    learning_rate: float = 0.0

    def metrics(self) -> dict[str, float]:
        steps = max(1, len(self.grad_norms))
        return {
            "loss": float(torch.stack(self.losses).sum()) / steps,
            "entropy": float(torch.cat(self.entropies).mean()),
            "grad_norm": float(torch.stack(self.grad_norms).mean()) if self.grad_norms else float("nan"),
            "learning_rate": self.learning_rate,
            **combined_metrics(self.results),
        }


class Trainer:
    """Owns the policy being trained. `version` counts batches trained on: the version that a push would carry.

    `reference` is the frozen policy of the KL term; without one `settings.loss.beta` must be 0. Raises ModelError for an
    architecture that can't be trained on packed rows.
    """

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, *, reference: torch.nn.Module | None = None, version: int = 0
    ) -> None:
        assert reference is not None or settings.loss.beta == 0, "a KL term needs a reference"
        self.model = model.eval()
        refuse_mixed_samples(self.model)
        self._reference = reference.eval() if reference is not None else None
        self.settings = settings
        self.version = version
        self.optimizer_step = 0
        self._device = next(model.parameters()).device
        self._optimizer = build_optimizer(model, settings)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor an engine needs, by name."""
        return self.model.state_dict()

    def train(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """All optimizer steps of one training step: `num_iterations` passes over `batches`, one step each.

        With more than one optimizer step the old policy is the one from before the first: its log-probabilities are
        computed once, by an extra forward. With exactly one they are the forward's own, and every ratio is exactly 1.

        Raises:
            NonFiniteError: a loss, a log-probability or a gradient is nan or inf; the weights are those before the step.
        """
        # Dropout stays off: the policy that is trained is the one that sampled.
        self.model.eval()
        several = self.settings.num_iterations * len(batches) > 1
        prepared = [self._prepare(batch, keep_old=several) for batch in batches]
        record = _Record()
        for _ in range(self.settings.num_iterations):
            for batch in prepared:
                self._forward_backward(batch, record)
                self._optim_step(record)
        self.version += 1
        return {
            **record.metrics(),
            "policy_age": float(np.average([b.policy_age for b in prepared], weights=[b.num_trained_tokens for b in prepared])),
        }

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Add the gradient of `batch` to the parameters, as one on-policy optimizer step would. Raises NonFiniteError."""
        self.model.eval()
        record = _Record()
        self._forward_backward(self._prepare(batch, keep_old=False), record)
        return record.metrics()

    def optim_step(self) -> None:
        """Clip, step, clear the gradient. Raises NonFiniteError before it touches the weights."""
        self._optim_step(_Record())

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, batch: TrainBatch, *, keep_old: bool) -> _Prepared:
        weights = token_weights(
            required(self.settings.loss.aggregation, "aggregation"),
            np.concatenate([row.trajectory_index[row.loss_mask] for row in batch.rows]),
            planned_trajectories=batch.planned_trajectories,
            fixed_length=required(self.settings.loss.fixed_length, "fixed_length"),
        )
        rows = [to_tensors(row, self._device) for row in batch.rows]
        ages = np.concatenate([self.version - row.policy_version[row.loss_mask] for row in batch.rows])
        return _Prepared(
            rows=rows,
            token_weights=_cut(torch.from_numpy(weights).float().to(self._device), rows),
            old_logprobs=_score(self.model, rows) if keep_old else None,
            reference_logprobs=None if self._reference is None else _score(self._reference, rows),
            policy_age=float(ages.mean()),
            num_trained_tokens=len(ages),
        )

    def _whole_segments(self, batch: _Prepared) -> tuple[list[Tensor], list[Tensor]] | None:
        """Ratio and sampler weight over whole turns or trajectories, where their tokens lie in several rows.

        Costs an extra forward, since a mean over the tokens of one row would be another number.
        """
        loss = self.settings.loss
        trajectories = [set(row.trajectory_index_N.tolist()) for row in batch.rows]
        apart = len(set().union(*trajectories)) == sum(map(len, trajectories))
        if apart or not needs_whole_segments(loss, on_policy=batch.old_logprobs is None):
            return None
        now_N = torch.cat(_score(self.model, batch.rows))
        old_N = now_N if batch.old_logprobs is None else torch.cat(batch.old_logprobs)
        engine_N = torch.cat([row.engine_logprobs_N for row in batch.rows])
        indices = {
            "trajectory_index_N": torch.cat([row.trajectory_index_N for row in batch.rows]),
            "turn_index_N": torch.cat([row.turn_index_N for row in batch.rows]),
        }
        ratio_N = segment_log_ratio(now_N - old_N, required(loss.ratio_level, "ratio_level"), **indices)
        weight_N = sampler_weights(old_N - engine_N, loss, **indices)
        return _cut(ratio_N, batch.rows), _cut(weight_N, batch.rows)

    def _forward_backward(self, batch: _Prepared, record: _Record) -> None:
        segments = self._whole_segments(batch)
        for index, row in enumerate(batch.rows):
            logprobs_N, entropy_N = trained_logprobs(self.model, row)
            inputs = LossInputs(
                trainer_logprobs_N=logprobs_N,
                old_logprobs_N=None if batch.old_logprobs is None else batch.old_logprobs[index],
                engine_logprobs_N=row.engine_logprobs_N,
                reference_logprobs_N=None if batch.reference_logprobs is None else batch.reference_logprobs[index],
                advantages_N=row.advantages_N,
                token_weights_N=batch.token_weights[index],
                trajectory_index_N=row.trajectory_index_N,
                turn_index_N=row.turn_index_N,
                segment_log_ratio_N=None if segments is None else segments[0][index],
                sampler_weight_N=None if segments is None else segments[1][index],
            )
            result = policy_loss(inputs, self.settings.loss)
            result.loss.backward()  # type: ignore[no-untyped-call]
            record.results.append(result)
            record.losses.append(result.loss.detach())
            record.entropies.append(entropy_N)
        # One look per optimizer step: reading a number waits for the device.
        total = torch.stack(record.losses[-len(batch.rows) :]).sum()
        self._refuse_non_finite("loss", total)

    def _optim_step(self, record: _Record) -> None:
        record.learning_rate = learning_rate_at(self.optimizer_step, self.settings)
        for group in self._optimizer.param_groups:
            group["lr"] = record.learning_rate
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trainable, self.settings.max_grad_norm)
        self._refuse_non_finite("gradient norm", norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        record.grad_norms.append(norm.detach())

    def _refuse_non_finite(self, what: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"the {what} is {float(value)} in optimizer step {self.optimizer_step}, so training can't go on; the "
                "weights are those of the step before, and this step's trajectories are in the run folder"
            )


@torch.no_grad()
def _score(model: torch.nn.Module, rows: Sequence[RowTensors]) -> list[Tensor]:
    """Log-probabilities of the trained tokens, row by row, without gradient."""
    return [trained_logprobs(model, row)[0] for row in rows]


def _cut(values_N: Tensor, rows: Sequence[RowTensors]) -> list[Tensor]:
    """Values of all rows, back into rows."""
    return list(torch.split(values_N, [len(row.targets_N) for row in rows]))
