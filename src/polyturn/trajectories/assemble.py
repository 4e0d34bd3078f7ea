"""From the turns of a trajectory to token rows, by exact prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polyturn.errors import SampleError
from polyturn.types import TrainSample, Trajectory, Turn


@dataclass(slots=True)
class _Row:
    """A sample being built. Lists grow together; the lengths are checked by TrainSample."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Tokens the model reads and is not trained on."""
        n = len(ids)
        self.input_ids.extend(ids)
        self.loss_mask.extend([False] * n)
        self.advantages.extend([0.0] * n)
        self.engine_logprobs.extend([0.0] * n)
        self.turn_index.extend([-1] * n)
        self.policy_version.extend([-1] * n)

    def sampled(self, turn: Turn, index: int, advantage: float) -> None:
        """Tokens the model sampled in one turn: all of them trained, the stop token included."""
        n = len(turn.completion_ids)
        self.input_ids.extend(turn.completion_ids)
        self.loss_mask.extend([True] * n)
        self.advantages.extend([advantage] * n)
        self.engine_logprobs.extend(turn.engine_logprobs)
        self.turn_index.extend([index] * n)
        self.policy_version.extend(turn.policy_versions)


def assemble(trajectory: Trajectory, turn_advantages: Sequence[float], *, temperature: float) -> list[TrainSample]:
    """The samples of one trajectory: one, or several where a prompt did not extend what came before.

    Args:
        trajectory: its turns give ids, masks, log-probabilities and versions.
        turn_advantages: `[K]`, one number for every trained token of a turn.
        temperature: what the policy was sampled at.

    Raises:
        SampleError: a broken sample; the caller drops the trajectory and counts it.
    """
    if len(turn_advantages) != len(trajectory.turns):
        raise SampleError(f"{trajectory.id}: {len(turn_advantages)} advantages for {len(trajectory.turns)} turns")
    rows: list[_Row] = []
    for index, (turn, advantage) in enumerate(zip(trajectory.turns, turn_advantages, strict=True)):
        lengths = (len(turn.completion_ids), len(turn.engine_logprobs), len(turn.policy_versions))
        if len(set(lengths)) != 1:
            # Checked by turn: one too few here and one too many there would leave a sample of the right length.
            raise SampleError(
                f"{trajectory.id}: turn {index} has {lengths[0]} sampled ids, {lengths[1]} log-probabilities and "
                f"{lengths[2]} policy versions; the engine must give one each a token"
            )
        if index == 0 or not turn.continues:
            rows.append(_Row())
        rows[-1].read(turn.prompt_ids)
        rows[-1].sampled(turn, index, float(advantage))
    return [
        TrainSample(
            trajectory_id=trajectory.id,
            group_id=trajectory.task.id,
            temperature=temperature,
            input_ids=np.array(row.input_ids, dtype=np.int64),
            loss_mask=np.array(row.loss_mask, dtype=np.bool_),
            advantages=np.array(row.advantages, dtype=np.float32),
            engine_logprobs=np.array(row.engine_logprobs, dtype=np.float32),
            turn_index=np.array(row.turn_index, dtype=np.int64),
            policy_version=np.array(row.policy_version, dtype=np.int64),
        )
        for row in rows
    ]
