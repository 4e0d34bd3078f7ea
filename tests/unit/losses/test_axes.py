"""Every axis of the loss against numbers worked out by hand. Weights are 1 and sums are plain unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch

from numerics.builders import loss_options, make_inputs
from polyturn.config.schema import LossOptions
from polyturn.errors import ConfigError
from polyturn.losses import (
    LossInputs,
    LossResult,
    Totals,
    needs_whole_segments,
    policy_loss,
    sampler_weights,
    segment_log_ratio,
    token_weights,
)


def run(inputs: LossInputs, options: LossOptions) -> tuple[float, list[float], LossResult]:
    """Loss, gradient with respect to the trainer's log-probabilities, and the whole result."""
    result = policy_loss(inputs, options)
    result.loss.backward()
    return result.loss.item(), inputs.trainer_logprobs_N.grad.tolist(), result


def logs(*values: float) -> list[float]:
    return [log(value) for value in values]


# --- ratio ------------------------------------------------------------------------------------------------------------


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_minus_the_advantage() -> None:
    for level in ("token", "turn", "sequence"):
        inputs = make_inputs([-0.3, -2.7, -11.0], [2.0, -1.0, 0.5], turns=[0, 0, 1])
        loss, grad, result = run(inputs, loss_options(ratio_level=level))
        assert loss == -(2.0 - 1.0 + 0.5)
        assert grad == [-2.0, 1.0, -0.5]
        assert result.metrics["ratio"][0].item() == 3.0


def test_token_ratio() -> None:
    # r = .55/.5 = 1.1, .18/.2 = .9; loss -(1.1 x 2 + .9 x -1) = -1.3; d r/d log pi = r, gradient -1.1 x 2, -.9 x -1
    inputs = make_inputs(logs(0.55, 0.18), [2.0, -1.0], old=logs(0.5, 0.2))
    loss, grad, _ = run(inputs, loss_options())
    assert loss == pytest.approx(-1.3)
    assert grad == pytest.approx([-2.2, 0.9])


def test_turn_ratio_is_the_geometric_mean_of_the_turn_and_keeps_each_tokens_advantage() -> None:
    # Turn 0: ratios 1.1 and 1, s = sqrt(1.1). Turn 1: ratio .9. Trajectory 1, turn 0: ratio 1.05.
    # Loss -(s x 1 + s x -1 + .9 x 2 + 1.05 x 1) = -2.85; the +1/-1 pair keeps its gradient.
    s = 1.1**0.5
    inputs = make_inputs(
        logs(0.55, 0.5, 0.45, 0.525), [1.0, -1.0, 2.0, 1.0], old=logs(*[0.5] * 4), trajectories=[0, 0, 0, 1], turns=[0, 0, 1, 0]
    )
    loss, grad, _ = run(inputs, loss_options(ratio_level="turn"))
    assert loss == pytest.approx(-2.85)
    assert grad == pytest.approx([-s, s, -1.8, -1.05])


def test_sequence_ratio_covers_all_turns_of_a_trajectory() -> None:
    # Trajectory 0: ratios 1.1, 1, .9: s = .99^(1/3). Its tokens need not lie next to each other.
    s = 0.99 ** (1 / 3)
    inputs = make_inputs(
        logs(0.55, 0.6, 0.5, 0.45), [1.0, 1.0, -1.0, 2.0], old=logs(*[0.5] * 4), trajectories=[0, 7, 0, 0], turns=[0, 0, 1, 2]
    )
    loss, grad, _ = run(inputs, loss_options(ratio_level="sequence"))
    assert loss == pytest.approx(-(s - s + 2 * s + 1.2))
    assert grad == pytest.approx([-s, -1.2, s, -2 * s])


def test_a_given_segment_ratio_wins_over_the_tokens_at_hand() -> None:
    inputs = make_inputs(logs(0.55), [1.0], old=logs(0.5))
    inputs = replace(inputs, segment_log_ratio_N=torch.tensor([log(1.05)], dtype=torch.float64))
    loss, grad, _ = run(inputs, loss_options(ratio_level="sequence"))
    assert loss == pytest.approx(-1.05)
    assert grad == pytest.approx([-1.05])


def test_segment_log_ratio_is_a_mean_per_segment() -> None:
    indices = {"trajectory_index_N": torch.tensor([3, 3, 3, 5]), "turn_index_N": torch.tensor([0, 1, 1, 1])}
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    assert segment_log_ratio(values, "turn", **indices).tolist() == [1.0, 3.0, 3.0, 8.0]
    assert segment_log_ratio(values, "sequence", **indices).tolist() == pytest.approx([7 / 3, 7 / 3, 7 / 3, 8.0])
    assert segment_log_ratio(values, "token", **indices).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert not segment_log_ratio(values, "turn", **indices).requires_grad


# --- clip -------------------------------------------------------------------------------------------------------------

RATIOS = [1.5, 1.5, 0.5, 0.5, 3.0]
SIGNS = [1.0, -1.0, 1.0, -1.0, -1.0]


def off_policy(advantages: list[float] = SIGNS) -> LossInputs:
    """Tokens with the ratios above."""
    return make_inputs(logs(*(0.1 * r for r in RATIOS)), advantages, old=logs(*[0.1] * 5))


def test_two_sided_clips_what_moved_far_enough() -> None:
    # A > 0: min(r, 1.28) = 1.28, .5.  A < 0: max(r, .8) = 1.5, .8, 3.  Loss -(1.28 + .5) + 1.5 + .8 + 3 = 3.52
    loss, grad, result = run(off_policy(), loss_options(clip_low=0.2, clip_high=0.28))
    assert loss == pytest.approx(3.52)
    assert grad == pytest.approx([0.0, 1.5, -0.5, 0.0, 3.0])
    numbers = Totals.of([result]).metrics()
    assert numbers["clipped_low"] == pytest.approx(1 / 5)
    assert numbers["clipped_high"] == pytest.approx(1 / 5)


def test_delta_caps_the_ratio_of_negative_advantages() -> None:
    # As above with 3 capped to 2: 3.52 - 1, no gradient there; one more token counts as clipped high.
    loss, grad, result = run(off_policy(), loss_options(clip_low=0.2, clip_high=0.28, delta=2.0))
    assert loss == pytest.approx(2.52)
    assert grad == pytest.approx([0.0, 1.5, -0.5, 0.0, 0.0])
    assert Totals.of([result]).metrics()["clipped_high"] == pytest.approx(2 / 5)


def test_cispo_caps_the_weight_and_keeps_every_gradient() -> None:
    # w = min(r, 2) = 1.5 1.5 .5 .5 2; loss -sum w A log pi, gradient -w A
    loss, grad, result = run(off_policy(), loss_options("cispo", clip_high=2.0))
    weighted = [-1.5, 1.5, -0.5, 0.5, 2.0]
    assert loss == pytest.approx(sum(w * log(0.1 * r) for w, r in zip(weighted, RATIOS, strict=True)))
    assert grad == pytest.approx(weighted)
    assert Totals.of([result]).metrics()["clipped_high"] == pytest.approx(1 / 5)
    assert Totals.of([result]).metrics()["clipped_low"] == 0.0


def test_sapo_gates_softly_by_the_sign_of_the_advantage() -> None:
    # -(4/tau) sigmoid(tau (r - 1)) A; gradient -4 sigmoid (1 - sigmoid) r A; tau 2 for A > 0, 3 for A < 0
    def sigmoid(x: float) -> float:
        return 1 / (1 + exp(-x))

    losses, gradients = [], []
    for r, a in zip(RATIOS, SIGNS, strict=True):
        tau = 2.0 if a > 0 else 3.0
        gate = sigmoid(tau * (r - 1))
        losses.append(-4 / tau * gate * a)
        gradients.append(-4 * gate * (1 - gate) * r * a)
    options = loss_options("sapo", sapo_temperature_positive=2.0, sapo_temperature_negative=3.0)
    loss, grad, _ = run(off_policy(), options)
    assert loss == pytest.approx(sum(losses))
    assert grad == pytest.approx(gradients)
    # At r = 1 the gate is 1/2 and 4 x 1/2 x 1/2 = 1: the plain policy gradient.
    assert run(make_inputs([-1.0], [2.0]), options)[1] == pytest.approx([-2.0])


# --- aggregation ------------------------------------------------------------------------------------------------------


def test_token_weights_by_hand() -> None:
    index = np.array([4, 4, 4, 9], dtype=np.int64)
    options = {"planned_trajectories": 3, "fixed_length": 10}
    assert token_weights("token", index, **options).tolist() == [0.25] * 4
    # 2 trajectories, of 3 tokens and of 1
    assert token_weights("sequence", index, **options).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert token_weights("fixed", index, **options).tolist() == pytest.approx([1 / 30] * 4)


def test_a_trajectory_in_several_samples_is_one_sequence() -> None:
    # Trajectory 0 lies in two places; 2 trajectories, of 3 tokens and of 1.
    weights = token_weights("sequence", np.array([0, 1, 0, 0]), planned_trajectories=2, fixed_length=None)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6])


def test_token_weights_of_nothing_and_of_too_much() -> None:
    nothing = np.empty(0, dtype=np.int64)
    for aggregation in ("token", "sequence", "fixed"):
        assert token_weights(aggregation, nothing, planned_trajectories=2, fixed_length=3).tolist() == []
    with pytest.raises(AssertionError, match="2 trajectories, 1 were planned"):
        token_weights("fixed", np.array([0, 1]), planned_trajectories=1, fixed_length=3)
    with pytest.raises(ConfigError, match="fixed_length is not set"):
        token_weights("fixed", np.array([0]), planned_trajectories=1, fixed_length=None)


def test_token_weights_multiply_the_loss() -> None:
    loss, grad, _ = run(make_inputs([-1.0, -1.0], [1.0, 3.0], weights=[0.5, 0.25]), loss_options())
    assert loss == pytest.approx(-(0.5 + 0.75))
    assert grad == pytest.approx([-0.5, -0.75])


# --- sampler correction -----------------------------------------------------------------------------------------------

# rho = .6/.5 .2/.5 .5/.1: 1.2, .4, 5; as turns (first two together): .48, 5; as a sequence: 2.4
RHO = {"logprobs": logs(0.6, 0.2, 0.5), "engine": logs(0.5, 0.5, 0.1), "turns": [0, 0, 1]}


@pytest.mark.parametrize(
    ("correction", "level", "bounds", "weights"),
    [
        ("none", "token", {}, [1.0, 1.0, 1.0]),
        ("tis", "token", {}, [1.2, 0.4, 2.0]),
        ("tis", "turn", {}, [0.48, 0.48, 2.0]),
        ("tis", "sequence", {}, [2.0, 2.0, 2.0]),
        ("mis", "token", {}, [1.2, 0.4, 0.0]),
        ("mis", "sequence", {"sampler_high": 3.0}, [2.4, 2.4, 2.4]),
        ("mis", "sequence", {}, [0.0, 0.0, 0.0]),
        ("icepop", "token", {"sampler_high": 6.0}, [1.2, 0.0, 5.0]),
        ("icepop", "turn", {"sampler_high": 4.0}, [0.0, 0.0, 0.0]),
        ("icepop", "turn", {"sampler_low": 0.4, "sampler_high": 4.0}, [0.48, 0.48, 0.0]),
    ],
)
def test_sampler_weights_by_hand(correction: str, level: str, bounds: dict[str, float], weights: list[float]) -> None:
    inputs = make_inputs(advantages=[1.0, 1.0, 1.0], **RHO)
    loss, grad, result = run(inputs, loss_options(sampler_correction=correction, sampler_level=level, **bounds))
    assert grad == pytest.approx([-w for w in weights])
    assert loss == pytest.approx(-sum(weights))
    numbers = Totals.of([result]).metrics()
    assert numbers["sampler_masked"] == pytest.approx(weights.count(0.0) / 3)
    assert numbers["sampler_weight"] == pytest.approx(sum(weights) / 3)
    assert numbers["sampler_weight_max"] == pytest.approx(max(weights))


def test_with_old_logprobs_the_two_ratios_share_the_way_and_do_not_overlap() -> None:
    # pi .6, old .55, engine .5: ratio .6/.55, rho .55/.5 (not .6/.5), product .6/.5
    inputs = make_inputs(logs(0.6), [1.0], old=logs(0.55), engine=logs(0.5))
    loss, _, _ = run(inputs, loss_options(sampler_correction="tis"))
    assert loss == pytest.approx(-0.6 / 0.5)


def test_sampler_weights_carry_no_gradient() -> None:
    inputs = make_inputs(advantages=[1.0] * 3, **RHO)
    options = loss_options(sampler_correction="tis")
    indices = {"trajectory_index_N": inputs.trajectory_index_N, "turn_index_N": inputs.turn_index_N}
    assert not sampler_weights(inputs.trainer_logprobs_N - inputs.engine_logprobs_N, options, **indices).requires_grad


def test_a_given_sampler_weight_is_used_as_it_is() -> None:
    inputs = replace(make_inputs(advantages=[1.0] * 3, **RHO), sampler_weight_N=torch.tensor([0.0, 0.5, 3.0]).double())
    _, grad, result = run(inputs, loss_options(sampler_correction="tis", sampler_level="sequence"))
    assert grad == pytest.approx([0.0, -0.5, -3.0])
    assert Totals.of([result]).metrics()["sampler_masked"] == pytest.approx(1 / 3)


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    # pi .4, reference .2, old .5: k3 = .5 - log .5 - 1 = log 2 - .5; ratio .8
    # Without the ratio d k3/d log pi = 1 - .5; with it .8 x (log 2 - .5) + .8 x .5 = .8 log 2
    inputs = make_inputs(logs(0.4), [0.0], old=logs(0.5), reference=logs(0.2))
    loss, grad, result = run(inputs, loss_options(beta=0.1, kl_times_ratio=False))
    assert loss == pytest.approx(0.1 * (log(2) - 0.5))
    assert grad == pytest.approx([0.05])
    assert Totals.of([result]).metrics()["kl"] == pytest.approx(log(2) - 0.5)
    inputs = make_inputs(logs(0.4), [0.0], old=logs(0.5), reference=logs(0.2))
    loss, grad, _ = run(inputs, loss_options(beta=0.1))
    assert loss == pytest.approx(0.08 * (log(2) - 0.5))
    assert grad == pytest.approx([0.08 * log(2)])


def test_kl_gets_neither_sampler_weight_nor_segment_ratio() -> None:
    # Engine .1 masks the token under mis; old = pi, so its own ratio is 1 and the gradient on-policy log 2.
    for level in ("token", "sequence"):
        inputs = make_inputs(logs(0.4, 0.3), [1.0, 1.0], old=logs(0.4, 0.2), engine=logs(0.1, 0.05), reference=logs(0.2, 0.3))
        _, grad, _ = run(inputs, loss_options(beta=1.0, sampler_correction="mis", ratio_level=level))
        assert grad == pytest.approx([log(2), 0.0])


def test_the_gradient_with_the_ratio_is_that_of_the_kl() -> None:
    """Averaged over the policy, against KL(pi || reference) differentiated whole, for a policy over four words."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, -0.7, 0.2], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    for times_ratio in (True, False):
        logprobs = torch.log_softmax(logits, 0)
        inputs = make_inputs(logprobs.tolist(), [0.0] * 4, reference=reference.tolist(), weights=logprobs.exp().tolist())
        loss = policy_loss(
            replace(inputs, trainer_logprobs_N=logprobs), loss_options(beta=1.0, kl_times_ratio=times_ratio)
        ).loss
        (ours,) = torch.autograd.grad(loss, logits)
        assert torch.allclose(ours, true) is times_ratio


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_mismatch_metrics() -> None:
    # log gaps log 1.2, log .4, log 5; k3 = x - 1 - log x
    _, _, result = run(make_inputs(advantages=[0.0] * 3, **RHO), loss_options())
    numbers = Totals.of([result]).metrics()
    assert numbers["mismatch"] == pytest.approx((log(1.2) - log(0.4) + log(5)) / 3)
    assert numbers["mismatch_max"] == pytest.approx(log(5))
    assert numbers["mismatch_kl"] == pytest.approx((1.2 + 0.4 + 5 - 3 - log(1.2 * 0.4 * 5)) / 3)
    assert numbers["logprob"] == pytest.approx(log(0.6 * 0.2 * 0.5) / 3)
    assert "kl" not in numbers


def test_metrics_of_micro_batches_add_up() -> None:
    one = policy_loss(make_inputs([-1.0], [1.0], engine=[-1.5]), loss_options(sampler_correction="tis"))
    three = policy_loss(make_inputs([-2.0] * 3, [1.0] * 3, engine=[-2.1] * 3), loss_options(sampler_correction="tis"))
    none = policy_loss(make_inputs([], []), loss_options(sampler_correction="tis"))
    numbers = Totals.of([one, three, none]).metrics()
    assert numbers["logprob"] == pytest.approx((-1.0 - 6.0) / 4)
    assert numbers["mismatch_max"] == pytest.approx(0.5)
    assert numbers["sampler_weight_max"] == pytest.approx(exp(0.5))
    assert Totals.of([none]).metrics() == {}
    assert not any(tensor.requires_grad for pair in one.metrics.values() for tensor in pair)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("gap", [-300.0, 300.0])
def test_log_probabilities_far_apart_stay_finite(preset: str, gap: float) -> None:
    start = -400.0
    for advantage in (1.0, -1.0, 0.0):
        inputs = make_inputs(
            [start] * 2, [advantage] * 2, old=[start - gap] * 2, engine=[start - gap] * 2, reference=[start + gap] * 2,
            dtype=torch.float32,
        )  # fmt: skip
        loss, grad, result = run(inputs, loss_options(preset, beta=0.1, sampler_correction="tis", sampler_level="sequence"))
        assert np.isfinite([loss, *grad, *Totals.of([result]).metrics().values()]).all()


def test_a_given_segment_ratio_far_out_stays_finite() -> None:
    far = torch.tensor([300.0, -300.0], dtype=torch.float32)
    inputs = make_inputs([-1.0, -1.0], [0.0, -1.0], old=[-1.0, -1.0], dtype=torch.float32)
    loss, grad, _ = run(replace(inputs, segment_log_ratio_N=far), loss_options(ratio_level="turn"))
    assert np.isfinite([loss, *grad]).all()


def test_nan_is_not_hidden() -> None:
    assert np.isnan(run(make_inputs([float("nan"), -1.0], [1.0, 1.0]), loss_options())[0])


def test_an_empty_micro_batch_has_loss_zero() -> None:
    for level in ("token", "turn", "sequence"):
        options = loss_options(ratio_level=level, sampler_correction="mis", sampler_level=level)
        assert run(make_inputs([], []), options)[0] == 0.0


def test_inputs_that_do_not_fit_are_named() -> None:
    good = make_inputs([-1.0, -2.0], [1.0, 1.0])
    with pytest.raises(AssertionError, match=r"advantages_N is \(3,\)"):
        replace(good, advantages_N=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(AssertionError, match=r"flat over trained tokens"):
        replace(good, trainer_logprobs_N=torch.zeros(2, 1))
    with pytest.raises(AssertionError, match=r"engine_logprobs_N is torch.bfloat16"):
        replace(good, engine_logprobs_N=torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match=r"turn_index_N is torch.int32"):
        replace(good, turn_index_N=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match=r"beta=0.5 needs reference_logprobs_N"):
        policy_loss(good, loss_options(beta=0.5))
    with pytest.raises(ConfigError, match="ratio_level is not set; fill the options with resolve_loss"):
        policy_loss(good, LossOptions())


def test_which_options_need_whole_segments() -> None:
    for on_policy in (True, False):
        assert not needs_whole_segments(loss_options(), on_policy=on_policy)
        # On-policy every ratio is 1, whatever it covers.
        assert needs_whole_segments(loss_options(ratio_level="turn"), on_policy=on_policy) is not on_policy
        assert needs_whole_segments(loss_options("gspo"), on_policy=on_policy) is not on_policy
        given = {"sampler_level": "sequence"}
        assert needs_whole_segments(loss_options(sampler_correction="tis", **given), on_policy=on_policy)
        assert not needs_whole_segments(loss_options(sampler_correction="none", **given), on_policy=on_policy)
