"""Short ways to make what the estimators and losses eat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.losses import LossInputs
from polyturn.types import Message, Role, Task, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="train/0", environment="bandit", messages=(Message(role="user", content="go"),))


def make_turn(reward: float = 0.0, *, key: str | None = None, reply: Role | None = None) -> Turn:
    """A one-token turn; `reply` is the role of the message that answers it."""
    return Turn(
        continues=False,
        prompt_ids=(1,),
        completion_ids=(2,),
        engine_logprobs=(-0.5,),
        policy_versions=(0,),
        stop_reason="stop",
        text="",
        reply=() if reply is None else (Message(role=reply, content=""),),
        reward=reward,
        state_key=key,
    )


def make_trajectory(
    rewards: Sequence[float] = (0.0,),
    outcome: float | None = 0.0,
    *,
    components: Mapping[str, float | None] | None = None,
    keys: Sequence[str | None] | None = None,
    replies: Sequence[Role | None] | None = None,
    fault: str | None = None,
    sibling: int = 0,
) -> Trajectory:
    keys, replies = keys or [None] * len(rewards), replies or [None] * len(rewards)
    return Trajectory(
        task=TASK,
        sibling=sibling,
        turns=tuple(make_turn(r, key=k, reply=m) for r, k, m in zip(rewards, keys, replies, strict=True)),
        end_reason="done" if fault is None else "fault",
        outcome={} if components is None else components,
        outcome_reward=outcome,
        fault=fault,
    )


def make_group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(task=TASK, trajectories=trajectories)


def outcomes_group(*outcomes: float | None) -> TrajectoryGroup:
    """One turn per sibling, None for a missing reward."""
    return make_group(*(make_trajectory((0.0,), outcome, sibling=i) for i, outcome in enumerate(outcomes)))


def loss_options(preset: str = "grpo", *, correction: str = "none", fixed_length: int = 4, **given: Any) -> LossOptions:
    return resolve_loss(preset, LossOptions(**given), fixed_length=fixed_length, default_correction=correction)


def make_inputs(
    logprobs: Sequence[float],
    advantages: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    engine: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    trajectories: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Inputs of a micro-batch; engine as trainer, weights 1 and one trajectory of one turn where nothing else is said."""
    n = len(logprobs)

    def floats(values: Sequence[float] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(np.asarray(values, dtype=np.float64), dtype=dtype)

    def required_floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(np.asarray(values, dtype=np.float64), dtype=dtype)

    return LossInputs(
        trainer_logprobs_N=required_floats(logprobs).requires_grad_(True),
        old_logprobs_N=floats(old),
        engine_logprobs_N=required_floats(logprobs if engine is None else engine),
        reference_logprobs_N=floats(reference),
        advantages_N=required_floats(advantages),
        token_weights_N=required_floats([1.0] * n if weights is None else weights),
        trajectory_index_N=torch.tensor([0] * n if trajectories is None else list(trajectories), dtype=torch.int64),
        turn_index_N=torch.tensor([0] * n if turns is None else list(turns), dtype=torch.int64),
    )
