"""Gradients: against finite differences where the loss is smooth, and in closed form where it holds something still.

The turn and sequence ratios and CISPO stop gradients on purpose, so that finite differences of the value are not their
gradient; what it must be instead is written out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from numerics.builders import loss_options, make_inputs
from polyturn.losses import policy_loss

RNG = np.random.default_rng(0)
NUM_TOKENS = 12
LOGPROBS = RNG.uniform(-3.0, -0.1, NUM_TOKENS)
ADVANTAGES = RNG.normal(size=NUM_TOKENS)
WEIGHTS = RNG.uniform(0.1, 1.0, NUM_TOKENS)
REFERENCE = LOGPROBS + RNG.normal(0, 0.5, NUM_TOKENS)
ENGINE = LOGPROBS + RNG.normal(0, 0.3, NUM_TOKENS)
TRAJECTORIES, TURNS = [0] * 7 + [1] * 5, [0, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 1]
# Far enough from the kinks at .8, 1.2 and 1.6 for a finite difference: some tokens inside, some beyond each.
RATIOS = np.array([0.5, 0.7, 0.85, 0.9, 1.0, 1.1, 1.15, 1.3, 1.5, 1.7, 2.0, 0.95])


def inputs(*, on_policy: bool = False):
    return make_inputs(
        LOGPROBS, ADVANTAGES, old=None if on_policy else LOGPROBS - np.log(RATIOS), engine=ENGINE, reference=REFERENCE,
        weights=WEIGHTS, trajectories=TRAJECTORIES, turns=TURNS,
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["grpo", "sapo"])
@pytest.mark.parametrize("given", [{}, {"beta": 0.3}, {"beta": 0.3, "kl_times_ratio": False}, {"delta": 1.6}], ids=str)
def test_finite_differences(preset: str, given: dict) -> None:
    if preset == "sapo" and "delta" in given:
        given = {"sapo_temperature_positive": 2.0}
    options = loss_options(preset, **given)

    def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss(replace(inputs(), trainer_logprobs_N=logprobs), options).loss

    assert torch.autograd.gradcheck(loss_of, (inputs().trainer_logprobs_N,), eps=1e-7, atol=1e-6)


def gradient(preset: str, *, on_policy: bool = False, **given: object) -> np.ndarray:
    batch = inputs(on_policy=on_policy)
    policy_loss(batch, loss_options(preset, **given)).loss.backward()
    return batch.trainer_logprobs_N.grad.numpy()


def geometric_means(segments: list[object]) -> np.ndarray:
    return np.array(
        [np.exp(np.mean([np.log(r) for r, s in zip(RATIOS, segments, strict=True) if s == own])) for own in segments]
    )


@pytest.mark.parametrize("preset", ["grpo", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_on_policy_every_loss_is_the_plain_policy_gradient(preset: str, level: str) -> None:
    np.testing.assert_allclose(gradient(preset, on_policy=True, ratio_level=level), -WEIGHTS * ADVANTAGES, rtol=1e-12)


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_segment_ratios_scale_each_tokens_own_gradient(level: str) -> None:
    s = geometric_means(list(zip(TRAJECTORIES, TURNS, strict=True)) if level == "turn" else TRAJECTORIES)
    clipped = ((ADVANTAGES > 0) & (s > 1.2)) | ((ADVANTAGES < 0) & (s < 0.8))
    expected = np.where(clipped, 0.0, -WEIGHTS * s * ADVANTAGES)
    np.testing.assert_allclose(gradient("grpo", ratio_level=level), expected, rtol=1e-12)
    if level == "turn":
        assert 0 < clipped.sum() < NUM_TOKENS


def test_cispo_holds_its_weight_still() -> None:
    expected = -WEIGHTS * np.minimum(RATIOS, 1.25) * ADVANTAGES
    np.testing.assert_allclose(gradient("cispo", clip_high=1.25), expected, rtol=1e-12)


def test_the_sampler_weight_has_no_gradient_of_its_own() -> None:
    rho = np.minimum(np.exp(LOGPROBS - ENGINE), 1.1)
    expected = -WEIGHTS * rho * ADVANTAGES
    np.testing.assert_allclose(
        gradient("grpo", on_policy=True, sampler_correction="tis", sampler_high=1.1), expected, rtol=1e-12
    )


def test_a_pair_of_opposite_turns_keeps_its_credit_under_a_sequence_ratio() -> None:
    """Letting the gradient flow through the mean would share +1 and -1 out evenly: 0 on both tokens."""
    pair = make_inputs([-1.0, -1.0], [1.0, -1.0], turns=[0, 1])
    policy_loss(pair, loss_options("gspo")).loss.backward()
    assert pair.trainer_logprobs_N.grad.tolist() == [-1.0, 1.0]
