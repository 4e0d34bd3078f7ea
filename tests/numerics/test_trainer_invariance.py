"""The gradient of an optimizer step does not depend on how its tokens are cut, ordered and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from parts.models import ARCHITECTURES, gradients, largest_gap, plain_logprobs, tiny_model
from parts.samples import alone, loss_options, make_sample, on_policy, packed, random_samples, trainer_settings
from polyturn.config.schema import LossOptions
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainBatch, TrainSample

CPU = torch.device("cpu")
EQUAL = 2e-5
"""Relative; float32 sums in another order."""

LOSSES = {
    "grpo": loss_options(),
    "token mean": loss_options(aggregation="token"),
    "sequence mean": loss_options(aggregation="sequence"),
    "turn ratio, turn tis": loss_options(ratio_level="turn", correction="tis", sampler_level="turn"),
    "sequence ratio, sequence icepop": loss_options(
        "gspo", correction="icepop", sampler_level="sequence", sampler_low=0.2, sampler_high=4.0
    ),
    "cispo, token mis": loss_options("cispo", correction="mis", sampler_low=0.7),
}


def gradient(model: torch.nn.Module, batch: TrainBatch, loss: LossOptions) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    metrics = Trainer(model, trainer_settings(loss)).forward_backward(batch)
    return metrics["loss"], gradients(model)


def agree(
    model: torch.nn.Module, batches: Sequence[TrainBatch], loss: LossOptions, *, tolerance: float = EQUAL
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    found = [gradient(model, batch, loss) for batch in batches]
    for value, grads in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-5, abs=1e-7)
        assert largest_gap(grads, found[0][1]) < tolerance
    return found


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_cut_order_and_budget_change_nothing(loss):
    model = tiny_model()
    samples = on_policy(random_samples(), model, gap=0.3)
    one = packed(samples, row_tokens=1000)
    many = packed(samples, row_tokens=max(map(len, samples)))
    assert len(one.rows) == 1
    assert len(many.rows) > 2
    shuffled = packed([samples[i] for i in (3, 0, 5, 1, 4, 2)], row_tokens=1000)
    found = agree(model, [one, many, shuffled, alone(samples)], loss)
    assert max(float(g.abs().max()) for g in found[0][1].values()) > 1e-4, "a gradient of nothing is equal to everything"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_architecture_packs(architecture, attention):
    model = tiny_model(architecture, attention=attention)
    samples = on_policy(random_samples(), model)
    agree(model, [packed(samples), alone(samples)], loss_options())


def cut_in_two(sample: TrainSample, at: int) -> list[TrainSample]:
    """The same tokens as two rows, as after an exact-prefix break: the second reads what the first sampled, untrained."""
    first = {
        name: getattr(sample, name)[:at]
        for name in ("input_ids", "loss_mask", "advantages", "engine_logprobs", "turn_index", "policy_version")
    }
    later = np.arange(len(sample)) >= at
    second = {
        "loss_mask": sample.loss_mask & later,
        "advantages": np.where(later, sample.advantages, 0).astype(np.float32),
        "engine_logprobs": np.where(later, sample.engine_logprobs, 0).astype(np.float32),
        "turn_index": np.where(later, sample.turn_index, -1),
        "policy_version": np.where(later, sample.policy_version, -1),
    }
    return [replace(sample, **first), replace(sample, **second)]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_trajectory_in_two_samples_is_still_one(loss):
    model, rng = tiny_model(), np.random.default_rng(3)
    long = make_sample(0, [(4, 3, 0.7), (3, 4, -1.1), (2, 2, 0.4)], rng=rng)
    other = make_sample(1, [(5, 4, -0.6)], rng=rng)
    whole = on_policy([long, other], model, gap=0.3)
    # Between the turns, so that both halves still hold whole turns.
    halves = [*cut_in_two(whole[0], 10), whole[1]]
    assert halves[0].loss_mask.sum() + halves[1].loss_mask.sum() == whole[0].loss_mask.sum()
    rows = alone(halves)
    assert len(rows.rows) == 3
    agree(model, [packed(whole), packed(halves), rows, alone(list(reversed(halves)))], loss)


def test_a_turn_in_two_samples_is_still_one():
    """Not how turns are cut today, but the ratio of a turn must not depend on it."""
    model, rng = tiny_model(), np.random.default_rng(4)
    whole = on_policy([make_sample(0, [(4, 6, 0.9)], rng=rng), make_sample(1, [(3, 2, -0.9)], rng=rng)], model, gap=0.4)
    loss = loss_options(ratio_level="turn", correction="tis", sampler_level="turn", sampler_high=50.0)
    halves = [*cut_in_two(whole[0], 7), whole[1]]
    agree(model, [packed(whole), alone(halves)], loss)


def test_off_policy_segments_over_rows():
    """With old log-probabilities from before the first step, a segment's ratio is over all its rows, in every step."""
    samples = on_policy(random_samples(5, count=4), tiny_model(), gap=0.2)
    loss = loss_options("gspo", correction="tis", sampler_level="sequence", clip_low=0.5, clip_high=0.5)
    ends = []
    for batch in (packed(samples), alone([half for s in samples for half in halves_of(s)])):
        model = tiny_model()
        metrics = Trainer(model, trainer_settings(loss, num_iterations=3, optimizer="sgd", max_grad_norm=100.0)).train([batch])
        assert metrics["ratio"] != 1
        ends.append(({name: p.detach() for name, p in model.named_parameters()}, metrics))
    assert largest_gap(ends[1][0], ends[0][0]) < 1e-5
    for name in ("loss", "ratio", "sampler_weight", "grad_norm", "clipped_low", "clipped_high", "mismatch"):
        assert ends[1][1][name] == pytest.approx(ends[0][1][name], rel=1e-4, abs=1e-6), name


def halves_of(sample: TrainSample) -> list[TrainSample]:
    """Two samples with trained tokens on both sides of the cut; one that has a single trained token stays whole."""
    trained = np.flatnonzero(sample.loss_mask)
    return cut_in_two(sample, int(trained[len(trained) // 2])) if len(trained) > 1 else [sample]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_samples_of_a_row_do_not_see_each_other(architecture):
    model, samples = tiny_model(architecture), random_samples(7, count=3)
    rng = np.random.default_rng(8)
    changed = replace(samples[0], input_ids=rng.integers(3, 48, len(samples[0])))
    for position in range(3):
        order = [samples[1], samples[2]]
        with_old, with_new = list(order), list(order)
        with_old.insert(position, samples[0])
        with_new.insert(position, changed)
        before, after = (_by_trajectory(model, packed(row)) for row in (with_old, with_new))
        for sample in order:
            assert torch.equal(before[sample.trajectory_id], after[sample.trajectory_id])
        assert not torch.equal(before[samples[0].trajectory_id], after[samples[0].trajectory_id])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_packed_logprobs_equal_a_plain_forward(architecture, temperature):
    model = tiny_model(architecture)
    samples = random_samples(9, temperature=temperature)
    found = _by_trajectory(model, packed(samples))
    for sample in samples:
        expected = plain_logprobs(model, sample.input_ids, temperature)[torch.from_numpy(sample.loss_mask[1:])]
        torch.testing.assert_close(found[sample.trajectory_id], expected, rtol=0, atol=1e-5)


def test_a_row_may_mix_temperatures():
    model = tiny_model()
    samples = [replace(s, temperature=0.5 + 0.4 * i) for i, s in enumerate(random_samples(10))]
    found = _by_trajectory(model, packed(samples))
    for sample in samples:
        expected = plain_logprobs(model, sample.input_ids, sample.temperature)[torch.from_numpy(sample.loss_mask[1:])]
        torch.testing.assert_close(found[sample.trajectory_id], expected, rtol=0, atol=1e-5)


def test_the_model_reads_what_it_is_not_trained_on():
    """The loss mask is no attention mask: other tool text, other log-probabilities of the next turn."""
    model, rng = tiny_model(), np.random.default_rng(11)
    sample = make_sample(0, [(4, 3, 1.0), (4, 3, 1.0)], rng=rng)
    ids = sample.input_ids.copy()
    ids[7:10] = rng.integers(3, 48, 3)  # the tool's answer between the turns
    (old,), (new,) = (_by_trajectory(model, packed([s])).values() for s in (sample, replace(sample, input_ids=ids)))
    assert torch.equal(old[:3], new[:3])
    assert float((old[3:] - new[3:]).abs().min()) > 1e-4


@torch.no_grad()
def _by_trajectory(model: torch.nn.Module, batch: TrainBatch) -> dict[str, torch.Tensor]:
    rows = [to_tensors(row, CPU) for row in batch.rows]
    logprobs = torch.cat([Scorer(model)(row)[0] for row in rows])
    numbers = torch.cat([row.trajectory_index_N for row in rows])
    return {name: logprobs[numbers == index] for index, name in enumerate(batch.trajectory_ids)}
