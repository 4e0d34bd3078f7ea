"""Our losses, gradients, advantages and sampler weights against numbers recorded from TRL 1.16.0.

Every recorded case is either matched or named in one of the tables of what we don't offer, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numerics.builders import make_group, make_trajectory
from polyturn.advantages.grpo import Grpo
from polyturn.config.schema import LossOptions
from polyturn.losses import LossInputs, policy_loss, sampler_weights, token_weights

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
LOSSES = json.loads((ORACLE / "losses.json").read_text())
ADVANTAGES = json.loads((ORACLE / "advantages.json").read_text())
SAMPLER = json.loads((ORACLE / "sampler_weights.json").read_text())
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}

TOP_ENTROPY = "no entropy mask: it drops tokens by the policy's own uncertainty, which no axis of ours does"
VESPO = "no VESPO: its gamma-shaped weight is no clip rule of ours"
LOSSES_NOT_OFFERED = {
    "grpo/top_entropy": TOP_ENTROPY,
    "bnpo/top_entropy": TOP_ENTROPY,
    "dr_grpo/top_entropy": TOP_ENTROPY,
    "dapo/top_entropy": TOP_ENTROPY,
    "cispo/top_entropy": TOP_ENTROPY,
    "sapo/top_entropy": TOP_ENTROPY,
    "luspo/top_entropy": TOP_ENTROPY,
    "vespo/default": VESPO,
}
SAMPLER_NOT_OFFERED = {
    "token_truncate/1.2/0.9": "tis truncates from above only: raising a weight favours tokens the trainer finds unlikely",
    "sequence_truncate/1.2/0.9": "as above",
}
ADVANTAGES_NOT_OFFERED: dict[str, str] = {}

# loss_type there -> our clip rule, our aggregation, and the fixed length where it isn't the recorded one. `luspo` sums the
# tokens of a trajectory: the fixed aggregation of length 1.
OURS: dict[str, tuple[str, str, int | None]] = {
    "grpo": ("two_sided", "sequence", None),
    "bnpo": ("two_sided", "token", None),
    "dr_grpo": ("two_sided", "fixed", None),
    "dapo": ("two_sided", "token", None),
    "cispo": ("cispo", "token", None),
    "sapo": ("sapo", "sequence", None),
    "luspo": ("two_sided", "fixed", 1),
}


def sampler_name(case: dict[str, Any]) -> str:
    return f"{case['mode']}/{case['clip_max']}/{case['clip_min']}"


def offered(cases: list[dict[str, Any]], not_offered: dict[str, str], name: Any) -> list[Any]:
    return [pytest.param(case, id=name(case)) for case in cases if name(case) not in not_offered]


def test_the_tables_of_what_is_not_offered_are_exact() -> None:
    assert set(LOSSES_NOT_OFFERED) <= {case["name"] for case in LOSSES["cases"]}
    assert set(LOSSES_NOT_OFFERED) == {
        case["name"]
        for case in LOSSES["cases"]
        if case["loss_type"] not in OURS
        or case["settings"]["top_entropy_quantile"] != 1.0
        or case["settings"]["off_policy_threshold"] is not None
    }
    assert set(SAMPLER_NOT_OFFERED) == {
        sampler_name(case) for case in SAMPLER["cases"] if "truncate" in case["mode"] and case["clip_min"] is not None
    }
    assert set(ADVANTAGES_NOT_OFFERED) <= {case["name"] for case in ADVANTAGES["cases"]}
    # Counted by hand, so that a case can't vanish: 11 cases for each of 5 two-sided types, 10 for cispo and sapo, 1 vespo.
    assert (len(LOSSES["cases"]), len(ADVANTAGES["cases"]), len(SAMPLER["cases"])) == (5 * 11 + 2 * 10 + 1, 20, 8)


def float32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def step_weights(case: dict[str, Any], trajectory_index: np.ndarray) -> np.ndarray:
    """Token weights of the recorded micro-batch as part of a step of several like it."""
    settings = case["settings"]
    _, aggregation, length = OURS[case["loss_type"]]
    copies = settings["gradient_accumulation"]
    if case["loss_type"] in ("dapo", "cispo"):
        # These divide by the tokens of the generation batch x accumulation / steps per generation.
        copies //= settings["steps_per_generation"]
    num_trajectories = int(trajectory_index.max()) + 1
    step = np.concatenate([trajectory_index + copy * num_trajectories for copy in range(copies)])
    weights = token_weights(
        aggregation, step, planned_trajectories=num_trajectories * copies, fixed_length=length or settings["fixed_length"]
    )
    return weights[: len(trajectory_index)]


def options_of(case: dict[str, Any]) -> LossOptions:
    settings = case["settings"]
    rule, aggregation, _ = OURS[case["loss_type"]]
    return LossOptions(
        ratio_level=settings["ratio_level"],
        clip_rule=rule,
        clip_low=settings["clip_low"],
        clip_high=settings["clip_high"],
        delta=settings["delta"],
        sapo_temperature_positive=1.0,
        sapo_temperature_negative=1.05,
        aggregation=aggregation,
        sampler_correction="none",
        sampler_level="token",
        beta=settings["beta"],
        kl_times_ratio=settings["kl_times_ratio"],
    )


@pytest.mark.parametrize("case", offered(LOSSES["cases"], LOSSES_NOT_OFFERED, lambda case: case["name"]))
def test_losses_and_gradients(case: dict[str, Any]) -> None:
    mask = (float32(LOSSES["completion_mask"]) * float32(LOSSES["not_tool_mask"])).bool()
    rows = torch.arange(mask.shape[0])[:, None].expand(mask.shape)[mask]

    def flat(values: Any) -> torch.Tensor:
        table = float32(values)
        return (table if table.dim() == 2 else table[:, None]).expand(mask.shape)[mask]

    logprobs = float32(LOSSES["trainer_logprobs"]).requires_grad_(True)
    inputs = LossInputs(
        trainer_logprobs_N=logprobs[mask],
        old_logprobs_N=flat(LOSSES["old_logprobs"]),
        engine_logprobs_N=flat(LOSSES["old_logprobs"]),
        reference_logprobs_N=flat(LOSSES["reference_logprobs"]),
        advantages_N=flat(case["advantages"]),
        token_weights_N=float32(step_weights(case, rows.numpy())),
        trajectory_index_N=rows,
        turn_index_N=torch.zeros_like(rows),
        sampler_weight_N=None if case["sampler_weight"] is None else flat(case["sampler_weight"]),
    )
    loss = policy_loss(inputs, options_of(case)).loss
    loss.backward()
    np.testing.assert_allclose(loss.item(), case["loss"], **TOLERANCE)
    np.testing.assert_allclose(logprobs.grad, case["grad"], **TOLERANCE)


@pytest.mark.parametrize("case", offered(ADVANTAGES["cases"], ADVANTAGES_NOT_OFFERED, lambda case: case["name"]))
def test_advantages(case: dict[str, Any]) -> None:
    weights = case["weights"]

    def trajectory(rewards: Any) -> Any:
        rewards = rewards if isinstance(rewards, list) else [rewards]
        components = {f"component_{c}": value for c, value in enumerate(rewards)}
        present = [(value, 1.0 if weights is None else weights[c]) for c, value in enumerate(rewards) if value is not None]
        summed = sum(value * weight for value, weight in present) if present else None
        return make_trajectory((0.0,), summed, components=components)

    trajectories = [trajectory(rewards) for rewards in case["rewards"]]
    size = case["group_size"]
    groups = [make_group(*trajectories[start : start + size]) for start in range(0, len(trajectories), size)]
    apart = case["aggregation"] == "normalize_then_sum"
    named = {f"component_{c}": weight for c, weight in enumerate(weights or [])}
    estimator = Grpo(scale=case["scale"], rewards="outcome", normalise_then_sum=apart, weights=named if apart else {})
    ours = [0.0 if turns is None else turns[0] for group in estimator(groups) for turns in group.per_turn]
    np.testing.assert_allclose(ours, case["advantages"], **TOLERANCE)


@pytest.mark.parametrize("case", offered(SAMPLER["cases"], SAMPLER_NOT_OFFERED, sampler_name))
def test_sampler_weights(case: dict[str, Any]) -> None:
    old = float32(SAMPLER["old_logprobs"])
    # One engine log-probability is missing and counts as equal there; a sample of ours with a missing one is dropped.
    engine = float32([[float("nan") if x is None else x for x in row] for row in SAMPLER["engine_logprobs"]])
    gap = torch.nan_to_num(old - engine, nan=0.0)
    level, kind = case["mode"].split("_")
    options = LossOptions(
        sampler_correction={"truncate": "tis", "mask": "mis"}[kind],
        sampler_level=level,
        sampler_low=0.0 if case["clip_min"] is None else case["clip_min"],
        sampler_high=case["clip_max"],
    )
    rows = torch.arange(old.shape[0])[:, None].expand(old.shape).flatten()
    ours = sampler_weights(gap.flatten(), options, trajectory_index_N=rows, turn_index_N=torch.zeros_like(rows))
    expected = float32(case["weights"]).expand(old.shape)
    np.testing.assert_allclose(ours.reshape(old.shape), expected, **TOLERANCE)
