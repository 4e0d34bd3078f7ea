"""Training does not depend on how many ranks share it, nor on how the rows are dealt to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics.test_trainer_invariance import LOSSES
from parts.models import largest_gap, same_bits, snapshot, tiny_model
from parts.samples import loss_options, on_policy, packed, random_samples, trainer_settings
from parts.thread_ranks import ThreadRanks, on_ranks
from polyturn.errors import NonFiniteError, RankError, TrainingError
from polyturn.trainer.ranks import Alone
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shares import from_bytes, share_out, to_bytes
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainBatch


def trained(size: int, settings: TrainerSettings, steps: list[list[TrainBatch]]) -> list[Any]:
    """Metrics of every step, and the weights in the end, of every rank."""
    models = [tiny_model() for _ in range(size)]
    references = [tiny_model(seed=7) if settings.loss.beta else None for _ in range(size)]

    def work(ranks: ThreadRanks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        model = models[ranks.rank]
        trainer = Trainer(model, settings, reference=references[ranks.rank], ranks=ranks)
        numbers: list[dict[str, float]] = []
        if ranks.rank == 0:
            numbers = [trainer.train(batches) for batches in steps]
            trainer.end()
        else:
            trainer.serve()
        assert trainer.version == len(steps)
        return numbers, snapshot(model)

    return on_ranks(size, work)


def batches(count: int = 1, *, rows: int | None = None) -> list[TrainBatch]:
    samples = on_policy(random_samples(), tiny_model(), gap=0.3)
    size = max(map(len, samples)) if rows is None else rows
    return [packed(samples[index::count], row_tokens=size) for index in range(count)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_same_policy_on_any_number_of_ranks(loss, size):
    # AdamW would make much of a rounding difference in a gradient near zero.
    settings, steps = trainer_settings(loss, optimizer="sgd", learning_rate=0.1), [batches(), batches(2)]
    ((alone, weights),) = trained(1, settings, steps)
    shared = trained(size, settings, steps)
    assert all(not isinstance(result, BaseException) for result in shared), shared
    assert all(same_bits(shared[0][1], other) for _, other in shared), "all ranks hold the same policy"
    assert largest_gap(shared[0][1], weights) < 1e-5
    for one, many in zip(alone, shared[0][0], strict=True):
        assert one.keys() == many.keys()
        for name, value in one.items():
            assert many[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name


def test_several_passes_with_a_reference():
    settings = trainer_settings(
        loss_options(beta=0.1, ratio_level="turn"), num_iterations=2, optimizer="sgd", learning_rate=0.1
    )
    ((alone, weights),) = trained(1, settings, [batches(2)])
    shared = trained(2, settings, [batches(2)])
    assert largest_gap(shared[1][1], weights) < 1e-5
    assert shared[0][0][0]["kl"] == pytest.approx(alone[0]["kl"], rel=1e-4)


def test_a_rank_without_rows_takes_part():
    settings, one_row = trainer_settings(loss_options()), [batches(rows=1000)]
    assert len(one_row[0][0].rows) == 1
    ((_, weights),) = trained(1, settings, one_row)
    shared = trained(3, settings, one_row)
    assert same_bits(shared[2][1], shared[0][1])
    assert largest_gap(shared[2][1], weights) < 1e-5


def test_a_loss_that_is_no_number_on_one_rank_ends_all_before_the_weights_change():
    (batch,) = batches()
    rows = list(batch.rows)
    rows[-1] = replace(rows[-1], advantages=np.full_like(rows[-1].advantages, np.nan))
    before = snapshot(tiny_model())
    models = [tiny_model(), tiny_model()]

    def work(ranks: ThreadRanks) -> None:
        trainer = Trainer(models[ranks.rank], trainer_settings(loss_options()), ranks=ranks)
        if ranks.rank == 0:
            trainer.train([replace(batch, rows=tuple(rows))])
        else:
            trainer.serve()

    ends = on_ranks(2, work)
    assert all(isinstance(end, NonFiniteError) for end in ends), ends
    assert all(same_bits(snapshot(model), before) for model in models)


def test_ranks_with_different_weights_do_not_start():
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    ends = on_ranks(2, lambda ranks: Trainer(models[ranks.rank], trainer_settings(loss_options()), ranks=ranks))
    assert all(isinstance(end, TrainingError) and "rank 1" in str(end) for end in ends), ends


def test_a_rank_that_ends_takes_the_others_with_it():
    models, data = [tiny_model(), tiny_model()], batches()

    def work(ranks: ThreadRanks) -> None:
        trainer = Trainer(models[ranks.rank], trainer_settings(loss_options()), ranks=ranks)
        if ranks.rank == 0:
            trainer.train(data)
        else:
            raise MemoryError

    lost, ended = on_ranks(2, work)
    assert isinstance(lost, RankError)
    assert isinstance(ended, MemoryError)


def test_an_unknown_word_is_refused():
    models = [tiny_model(), tiny_model()]

    def work(ranks: ThreadRanks) -> None:
        trainer = Trainer(models[ranks.rank], trainer_settings(loss_options()), ranks=ranks)
        if ranks.rank == 0:
            with ranks.tell("dance"):
                pass
        else:
            trainer.serve()

    _, refused = on_ranks(2, work)
    assert isinstance(refused, RankError)
    assert "'dance'" in str(refused)


def test_nobody_speaks_to_a_single_rank():
    with pytest.raises(RankError):
        Alone().hear()


@given(num_ranks=st.integers(1, 5), row_tokens=st.integers(12, 200))
def test_every_row_goes_to_one_rank_and_arrives_as_it_was(num_ranks: int, row_tokens: int):
    samples = random_samples()
    batch = packed(samples, row_tokens=max(row_tokens, *map(len, samples)))
    shares = share_out([batch], num_ranks, trainer_settings(loss_options(aggregation="sequence")), on_policy=True)
    assert len(shares) == num_ranks
    arrived = [from_bytes(to_bytes(share))[0] for share in shares]
    rows = [row for share in arrived for row in share.rows]
    assert sorted(row.input_ids.tobytes() for row in rows) == sorted(row.input_ids.tobytes() for row in batch.rows)
    assert sum(float(weights.sum()) for share in arrived for weights in share.token_weights) == pytest.approx(1.0, rel=1e-5)
    loads = [sum(len(row.input_ids) for row in share.rows) for share in arrived]
    assert max(loads) - min(loads) <= max(len(row.input_ids) for row in batch.rows)
    for share in arrived:
        for row, weights in zip(share.rows, share.token_weights, strict=True):
            assert len(weights) == row.loss_mask.sum()
            assert row.loss_mask.dtype == np.bool_


@pytest.mark.parametrize("data", [b"", b"x" * 100, to_bytes([])[:-30]])
def test_what_is_no_share_is_refused(data):
    with pytest.raises(ValueError, match="not the shares"):
        from_bytes(data)
