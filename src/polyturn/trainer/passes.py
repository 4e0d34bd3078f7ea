"""Forward and backward passes over the rows of a batch: they add up what an optimizer step then takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyturn.losses.base import LossInputs, required
from polyturn.losses.policy import policy_loss
from polyturn.losses.ratio import segment_log_ratio
from polyturn.losses.sampler import sampler_weights
from polyturn.trainer.context import Context, own_part
from polyturn.trainer.device import to_device
from polyturn.trainer.parallel import Layout
from polyturn.trainer.ranks import Ranks
from polyturn.trainer.record import Record
from polyturn.trainer.reference import Reference, without_gradient
from polyturn.trainer.row import RowsOnDemand, RowTensors, to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shares import Share
from polyturn.types import PackedRow

_WHOLE = "the log-probabilities of whole segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A share on the device, with what its loss needs from outside a row. Lists run over rows."""

    rows: Sequence[RowTensors]
    token_weights: list[Tensor]
    old_logprobs: list[Tensor] | None
    """The policy's before the first optimizer step on this batch; None where this forward is that policy."""
    reference_logprobs: list[Tensor] | None
    whole_segments: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """Of every row, ratios and sampler weights of its tokens over whole turns or trajectories."""

    log_ratio: list[Tensor]
    sampler_weight: list[Tensor]


class Passes:
    """The passes of one rank, which `score`s rows with the policy. `context` are the ranks that share its rows.

    `speaks` says whether this rank's numbers count, of those that have the same.
    """

    def __init__(
        self,
        score: Scorer,
        settings: TrainerSettings,
        *,
        layout: Layout,
        ranks: Ranks,
        context: Context | None,
        reference: Reference | None,
        speaks: bool,
    ) -> None:
        self._score, self._settings = score, settings
        self._layout, self._ranks, self._context = layout, ranks, context
        self._reference = reference
        self._speaks = speaks
        self._device = next(score.model.parameters()).device

    def prepare(self, share: Share, record: Record, *, version: int, keep_old: bool) -> Prepared:
        """Bring a share to the device. `version` is the policy's; with `keep_old` its log-probabilities are kept."""
        rows = RowsOnDemand(share.rows, self._bring)
        for row in share.rows:
            ages = version - row.policy_version[row.loss_mask]
            record.ages.append((float(ages.sum()), len(ages)))
        return Prepared(
            rows=rows,
            token_weights=[to_device(weights, self._device) for weights in share.token_weights],
            old_logprobs=without_gradient(self._score, rows) if keep_old else None,
            reference_logprobs=None if self._reference is None else self._reference.logprobs(rows),
            whole_segments=share.whole_segments,
        )

    def forward_backward(self, batch: Prepared, record: Record, what: str) -> Tensor:
        """Add the gradient of all rows to the parameters. Returns the loss over all ranks, a scalar; they wait for `what`."""
        segments = self._whole_segments(batch) if batch.whole_segments else None
        losses: list[Tensor] = []
        for index in range(len(batch.rows)):
            with self._layout.row(last=index == len(batch.rows) - 1):
                self._one_row(batch, index, segments, record, losses)
        # One look per optimizer step: reading a number waits for the device. Of one type also on a rank without trained tokens.
        total = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64, device=self._device)
        record.losses.append(total.clone())
        self._ranks.sum_in_place([total], what)
        return total

    def _bring(self, row: PackedRow) -> RowTensors:
        """The tensors of a row, or of this rank's tokens of it."""
        return to_tensors(row, self._device) if self._context is None else own_part(row, self._device, self._context)

    def _whole_segments(self, batch: Prepared) -> _Segments:
        """Ratio and sampler weight over whole turns or trajectories, where their tokens lie in several rows.

        Costs an extra forward, since a mean over the tokens of one row would be another number.
        """
        loss, rows = self._settings.loss, batch.rows
        with self._layout.meeting(_WHOLE):
            now = without_gradient(self._score, rows)
        columns = (
            [now, now if batch.old_logprobs is None else batch.old_logprobs, [row.engine_logprobs_N for row in rows]],
            [[row.trajectory_index_N for row in rows], [row.turn_index_N for row in rows]],
        )
        (now_N, old_N, engine_N), (trajectory_N, turn_N) = (
            [self._whole_column(column, kind) for column in group]
            for group, kind in zip(columns, (torch.float32, torch.int64), strict=True)
        )
        indices = {"trajectory_index_N": trajectory_N[0], "turn_index_N": turn_N[0]}
        ratio_N = segment_log_ratio(now_N[0] - old_N[0], required(loss.ratio_level, "ratio_level"), **indices)
        weight_N = sampler_weights(old_N[0] - engine_N[0], loss, **indices)
        own = slice(now_N[1], now_N[1] + sum(len(row.targets_N) for row in rows))
        return _Segments(log_ratio=_cut(ratio_N[own], rows), sampler_weight=_cut(weight_N[own], rows))

    def _whole_column(self, of_rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, int]:
        """Values of this rank's rows between those of the other ranks', and where its own begin."""
        own_N = torch.cat(list(of_rows)) if of_rows else torch.zeros(0, dtype=dtype, device=self._device)
        if self._speaks:
            return self._ranks.concatenate(own_N, _WHOLE)
        whole_N, end = self._ranks.concatenate(own_N[:0], _WHOLE)
        return whole_N, end - len(own_N)  # after those of the neighbour that has the same

    def _one_row(self, batch: Prepared, index: int, segments: _Segments | None, record: Record, losses: list[Tensor]) -> None:
        """Add the gradient of one row, and note what it came to."""
        row = batch.rows[index]
        logprobs_N, entropy_N = self._score(row)
        if not len(row.targets_N):
            logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
            return  # a row that is there for the others' sake
        inputs = LossInputs(
            trainer_logprobs_N=logprobs_N,
            old_logprobs_N=None if batch.old_logprobs is None else batch.old_logprobs[index],
            engine_logprobs_N=row.engine_logprobs_N,
            reference_logprobs_N=None if batch.reference_logprobs is None else batch.reference_logprobs[index],
            advantages_N=row.advantages_N,
            token_weights_N=row.of(batch.token_weights[index]),
            trajectory_index_N=row.trajectory_index_N,
            turn_index_N=row.turn_index_N,
            segment_log_ratio_N=None if segments is None else segments.log_ratio[index],
            sampler_weight_N=None if segments is None else segments.sampler_weight[index],
        )
        result = policy_loss(inputs, self._settings.loss)
        result.loss.backward()  # type: ignore[no-untyped-call]
        record.results.append(result)
        losses.append(result.loss.detach())
        record.entropies.append(entropy_N)


def _cut(values_N: Tensor, rows: Sequence[RowTensors]) -> list[Tensor]:
    """Values of all rows, back into rows."""
    return list(torch.split(values_N, [len(row.targets_N) for row in rows]))
