"""The fast loss against the slow one, and against itself with the batch cut, ordered and padded in other ways."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.builders import loss_options
from polyturn.config.schema import LossOptions
from polyturn.losses import LossInputs, Totals, policy_loss, sampler_weights, segment_log_ratio, token_weights
from polyturn.losses.ratio import token_log_ratio
from polyturn.losses.reference import PaddedBatch, reference_loss
from polyturn.losses.sampler import behaviour_log_gap

PLANNED = 5
QUICK = settings(max_examples=60, deadline=None, derandomize=True)

axes = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(["grpo", "dapo", "cispo", "sapo"]),
        "ratio_level": st.sampled_from(["token", "turn", "sequence"]),
        "aggregation": st.sampled_from(["fixed", "token", "sequence"]),
        "sampler_correction": st.sampled_from(["none", "tis", "mis", "icepop"]),
        "sampler_level": st.sampled_from(["token", "turn", "sequence"]),
        "beta": st.sampled_from([0.0, 0.3]),
        "kl_times_ratio": st.booleans(),
        "delta": st.sampled_from([None, 1.6]),
    }
)
ONE_CLIPPED: dict[str, Any] = {
    "preset": "grpo",
    "ratio_level": "token",
    "aggregation": "fixed",
    "sampler_correction": "none",
    "sampler_level": "token",
    "beta": 0.0,
    "kl_times_ratio": False,
    "delta": None,
}
seeds = st.integers(0, 2**32 - 1)


def options_of(axis: dict[str, Any]) -> LossOptions:
    given = dict(axis)
    if given["preset"] in ("cispo", "sapo"):
        del given["delta"]
    return loss_options(**given)


def random_batch(seed: int, *, on_policy: bool, padding: int = 0) -> PaddedBatch:
    """A few rows of up to six positions; some trajectories lie in two rows. `padding` adds positions that no mask covers."""
    rng = np.random.default_rng(seed)
    num_rows, num_positions = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    shape = (num_rows, num_positions)
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    trajectory_of_row = sorted(int(x) for x in rng.integers(0, 3, num_rows))

    def table(values: np.ndarray) -> torch.Tensor:
        # What lies under padding must not matter, so it is something absurd.
        return torch.nn.functional.pad(torch.tensor(values), (0, padding), value=1e6)

    logprobs = -rng.exponential(1.0, shape) - 0.01
    return PaddedBatch(
        trainer_logprobs_BT=table(logprobs).requires_grad_(True),
        old_logprobs_BT=None if on_policy else table(logprobs + rng.normal(0, 0.4, shape)),
        engine_logprobs_BT=table(logprobs + rng.normal(0, 0.4, shape)),
        reference_logprobs_BT=table(logprobs + rng.normal(0, 0.5, shape)),
        advantages_BT=table(rng.normal(0, 1, shape) * (rng.random(shape) < 0.9)),
        loss_mask_BT=torch.nn.functional.pad(torch.tensor(mask), (0, padding), value=False),
        turn_index_BT=torch.nn.functional.pad(torch.tensor(np.sort(rng.integers(0, 3, shape), axis=1)), (0, padding), value=-1),
        trajectory_of_row=trajectory_of_row,
    )


def flatten(batch: PaddedBatch, options: LossOptions) -> LossInputs:
    """The trained tokens of a step, laid end to end."""
    mask = batch.loss_mask_BT
    trajectories = torch.tensor(batch.trajectory_of_row)[:, None].expand(mask.shape)[mask]
    weights = token_weights(
        options.aggregation or "fixed", trajectories.numpy(), planned_trajectories=PLANNED, fixed_length=options.fixed_length
    )
    return LossInputs(
        trainer_logprobs_N=batch.trainer_logprobs_BT[mask],
        old_logprobs_N=None if batch.old_logprobs_BT is None else batch.old_logprobs_BT[mask],
        engine_logprobs_N=batch.engine_logprobs_BT[mask],
        reference_logprobs_N=None if batch.reference_logprobs_BT is None else batch.reference_logprobs_BT[mask],
        advantages_N=batch.advantages_BT[mask],
        token_weights_N=torch.tensor(weights),
        trajectory_index_N=trajectories,
        turn_index_N=batch.turn_index_BT[mask],
    )


def gradient(loss: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
    if not loss.requires_grad:  # the slow loss takes the smaller of two numbers, and a clipped one depends on nothing
        return torch.zeros_like(batch.trainer_logprobs_BT)
    return torch.autograd.grad(loss, batch.trainer_logprobs_BT, retain_graph=True)[0]


@QUICK
@given(axis=axes, seed=seeds, on_policy=st.booleans(), padding=st.integers(0, 2))
def test_policy_loss_is_the_reference_loss(axis: dict[str, Any], seed: int, on_policy: bool, padding: int) -> None:
    options, batch = options_of(axis), random_batch(seed, on_policy=on_policy, padding=padding)
    slow = reference_loss(batch, options, planned_trajectories=PLANNED)
    fast = policy_loss(flatten(batch, options), options).loss
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(fast, batch), gradient(slow, batch), rtol=1e-9, atol=1e-9)


def test_a_batch_of_one_clipped_token_has_no_gradient() -> None:
    options, batch = options_of(ONE_CLIPPED), random_batch(19129, on_policy=False)
    fast = policy_loss(flatten(batch, options), options).loss
    assert fast.requires_grad
    slow = reference_loss(batch, options, planned_trajectories=PLANNED)
    assert not slow.requires_grad
    assert gradient(fast, batch).tolist() == gradient(slow, batch).tolist() == [[0.0]]


@QUICK
@given(axis=axes, seed=seeds, on_policy=st.booleans())
def test_padding_changes_nothing(axis: dict[str, Any], seed: int, on_policy: bool) -> None:
    options = options_of(axis)
    bare, padded = (random_batch(seed, on_policy=on_policy, padding=padding) for padding in (0, 3))
    losses = [policy_loss(flatten(batch, options), options).loss for batch in (bare, padded)]
    assert losses[0].item() == losses[1].item()
    bare_gradient, padded_gradient = gradient(losses[0], bare), gradient(losses[1], padded)
    assert torch.equal(padded_gradient[:, : bare_gradient.shape[1]], bare_gradient)
    assert not padded_gradient[:, bare_gradient.shape[1] :].any()


def select(inputs: LossInputs, tokens: torch.Tensor) -> LossInputs:
    taken = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: value[tokens] for name, value in taken.items() if value is not None})


def with_segments(inputs: LossInputs, options: LossOptions) -> LossInputs:
    """What the trainer adds over the whole step before cutting it."""
    indices = {"trajectory_index_N": inputs.trajectory_index_N, "turn_index_N": inputs.turn_index_N}
    return replace(
        inputs,
        segment_log_ratio_N=segment_log_ratio(token_log_ratio(inputs), options.ratio_level or "token", **indices),
        sampler_weight_N=sampler_weights(behaviour_log_gap(inputs), options, **indices),
    )


@QUICK
@given(axis=axes, seed=seeds, on_policy=st.booleans(), num_cuts=st.integers(1, 4))
def test_cutting_the_step_into_micro_batches_changes_nothing(
    axis: dict[str, Any], seed: int, on_policy: bool, num_cuts: int
) -> None:
    options, batch = options_of(axis), random_batch(seed, on_policy=on_policy)
    whole = flatten(batch, options)
    rng = np.random.default_rng(seed)
    order = torch.tensor(rng.permutation(len(whole.advantages_N)))
    prepared = with_segments(whole, options)
    # Cuts at random places of a random order; some micro-batches are empty.
    parts = torch.tensor_split(order, sorted(int(x) for x in rng.integers(0, len(order) + 1, num_cuts)))
    results = [policy_loss(select(prepared, part), options) for part in parts]
    together = policy_loss(whole, options)
    cut_loss = torch.stack([result.loss for result in results]).sum()
    torch.testing.assert_close(cut_loss, together.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(cut_loss, batch), gradient(together.loss, batch), rtol=1e-12, atol=1e-12)
    assert Totals.of(results).metrics() == pytest.approx(Totals.of([together]).metrics(), abs=1e-12)


def test_a_cut_turn_without_its_numbers_would_be_wrong() -> None:
    """Why `segment_log_ratio_N` exists: the same cut, without it, gives another loss."""
    options, batch = loss_options(ratio_level="sequence", clip_low=5.0, clip_high=5.0), random_batch(1, on_policy=False)
    whole = flatten(batch, options)
    halves = [select(whole, part) for part in torch.tensor_split(torch.arange(len(whole.advantages_N)), 2)]
    naive = sum(policy_loss(half, options).loss.item() for half in halves)
    assert abs(naive - policy_loss(whole, options).loss.item()) > 1e-3
