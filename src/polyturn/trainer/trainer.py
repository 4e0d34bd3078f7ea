"""Runs the optimizer steps of a batch: score rows, sum their losses backward, step.

Every loss is a plain sum of weighted per-token losses, with weights fixed over the whole optimizer step, so the gradient
does not depend on how the tokens are cut into rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyturn.errors import NonFiniteError
from polyturn.losses.aggregation import token_weights
from polyturn.losses.base import LossInputs
from polyturn.losses.policy import policy_loss
from polyturn.losses.segments import BatchSegments, batch_segments, spans_rows
from polyturn.trainer.forward import RowTensors, to_tensors, trained_logprobs
from polyturn.trainer.metrics import Totals
from polyturn.trainer.optimizer import build_optimizer, learning_rate_at
from polyturn.trainer.settings import TrainerSettings
from polyturn.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A batch on the device, with what its loss needs from outside a row. Lists run over rows."""

    rows: list[RowTensors]
    token_weights: list[torch.Tensor]
    policy_age: float
    old_logprobs: list[torch.Tensor] | None


class Trainer:
    """Owns the policy being trained. `version` counts batches trained on: the version that a push would carry."""

    def __init__(self, model: torch.nn.Module, settings: TrainerSettings, *, version: int = 0) -> None:
        self.model = model
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
        start = time.perf_counter()
        # Dropout stays off: the policy that is trained is the one that sampled.
        self.model.eval()
        several = self.settings.num_iterations * len(batches) > 1
        prepared = [self._prepare(batch, keep_old=several) for batch in batches]
        totals = Totals()
        for _ in range(self.settings.num_iterations):
            for batch in prepared:
                self._forward_backward(batch, totals)
                self._optim_step(totals)
        self.version += 1
        tokens = sum(batch.num_tokens for batch in batches) * self.settings.num_iterations
        return {
            **totals.means(),
            "policy_age": float(np.mean([batch.policy_age for batch in prepared])),
            "train_tokens": float(tokens),
            "trained_tokens": float(sum(batch.num_trained_tokens for batch in batches)),
            "train_s": time.perf_counter() - start,
        }

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Add the gradient of `batch` to the parameters, as one optimizer step would see it. Raises NonFiniteError."""
        totals = Totals()
        self._forward_backward(self._prepare(batch, keep_old=False), totals)
        return totals.means()

    def optim_step(self) -> dict[str, float]:
        """Clip, step, clear the gradient. Raises NonFiniteError before it touches the weights."""
        totals = Totals()
        self._optim_step(totals)
        return totals.means()

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, batch: TrainBatch, *, keep_old: bool) -> _Prepared:
        loss = self.settings.loss
        assert loss.aggregation is not None
        assert loss.fixed_length is not None, "resolve_loss fills the axes"
        trajectory_index = np.concatenate([row.trajectory_index[row.loss_mask] for row in batch.rows])
        weights = token_weights(
            loss.aggregation,
            trajectory_index,
            planned_trajectories=batch.planned_trajectories,
            fixed_length=loss.fixed_length,
        )
        counts = [int(row.loss_mask.sum()) for row in batch.rows]
        rows = [to_tensors(row, self._device) for row in batch.rows]
        ages = np.concatenate([self.version - row.policy_version[row.loss_mask] for row in batch.rows])
        return _Prepared(
            rows=rows,
            token_weights=list(torch.from_numpy(weights).float().to(self._device).split(counts)),
            policy_age=float(ages.mean()),
            old_logprobs=self._score(rows) if keep_old else None,
        )

    @torch.no_grad()
    def _score(self, rows: Sequence[RowTensors]) -> list[torch.Tensor]:
        return [trained_logprobs(self.model, row)[0] for row in rows]

    def _segments(self, batch: _Prepared) -> BatchSegments | None:
        """Ratios and sampler weights over whole turns or trajectories, where those lie in several rows: an extra forward."""
        if not spans_rows(batch.rows, self.settings.loss):
            return None
        return batch_segments(self._score(batch.rows), batch.old_logprobs, batch.rows, self.settings.loss)

    def _forward_backward(self, batch: _Prepared, totals: Totals) -> None:
        segments = self._segments(batch)
        for index, row in enumerate(batch.rows):
            logprobs_N, entropy_N = trained_logprobs(self.model, row)
            inputs = LossInputs(
                trainer_logprobs_N=logprobs_N,
                old_logprobs_N=None if batch.old_logprobs is None else batch.old_logprobs[index],
                engine_logprobs_N=row.engine_logprobs_N,
                reference_logprobs_N=None,
                advantages_N=row.advantages_N,
                token_weights_N=batch.token_weights[index],
                trajectory_index_N=row.trajectory_index_N,
                turn_index_N=row.turn_index_N,
                segment_log_ratio_N=None if segments is None else segments.log_ratio[index],
                sampler_weight_N=None if segments is None else segments.sampler_weight[index],
            )
            result = policy_loss(inputs, self.settings.loss)
            if not torch.isfinite(result.loss):
                raise NonFiniteError(
                    f"the loss of row {index} of {len(batch.rows)} is {float(result.loss.detach())} in optimizer step "
                    f"{self.optimizer_step}; the weights are those of the step before, and the trajectories are in the run folder"
                )
            result.loss.backward()  # type: ignore[no-untyped-call]
            totals.add_sum("loss", result.loss)
            totals.add("entropy", entropy_N.sum(), entropy_N.numel())
            totals.add_all(result.metrics)

    def _optim_step(self, totals: Totals) -> None:
        learning_rate = learning_rate_at(self.optimizer_step, self.settings)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm: Any = torch.nn.utils.clip_grad_norm_(trainable, self.settings.max_grad_norm)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} in optimizer step {self.optimizer_step}; the weights are those of the step "
                "before, and the trajectories are in the run folder"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        totals.add("grad_norm", norm, 1)
        totals.add("learning_rate", torch.tensor(learning_rate), 1)
