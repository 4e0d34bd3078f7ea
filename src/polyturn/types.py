"""The nouns that flow through a step. Everything here is frozen; nothing here knows torch.

    Task ──rollout──> Trajectory (of Turns) ──> TrajectoryGroup ──credit──> TrainSample ──pack──> TrainBatch

Shape letters, here and in every room: `T` tokens of a row, `K` turns of a trajectory, `G` siblings of a group, `S` samples of
a row. Numbers are named after who computed them: `engine_logprobs` by the engine while sampling, `trainer_logprobs` by the
trainer's forward pass, `reference_logprobs` by the frozen reference. An advantage never lives in a field called reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from polyturn.errors import SampleError

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
StopReason: TypeAlias = Literal["stop", "length"]
"""Why one completion ended: a stop token was sampled, or its token limit was reached."""
EndReason: TypeAlias = Literal["done", "max_turns", "max_tokens", "fault"]
"""Why a trajectory ended: the environment said so, one of its two limits, or a fault that was not the model's doing."""
Split: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, as environments and chat templates see it.

    An assistant message holds the raw sampled text, tool calls included, so that rendering it again gives the same text.
    """

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem: opening messages, reference answer, and whatever else its environment needs in `info`.

    >>> Task(id="train/7", environment="lookup", messages=(Message(role="user", content="find(alice)"),), answer="red").answer
    'red'
    """

    id: str
    environment: str
    messages: tuple[Message, ...]
    answer: str | None = None
    info: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a user's file in a built-in format, in these words whatever its own fields are called (`data.formats`).

    >>> Row(where="a.jsonl:3", format="question/answer", messages=(Message(role="user", content="2 + 2?"),), answer="4").answer
    '4'
    """

    where: str
    """`file:line`."""
    format: str
    """The built-in format, as it is shown to the user."""
    messages: tuple[Message, ...]
    """The opening messages; the last one asks."""
    answer: str | None = None
    """The reference answer."""
    aliases: tuple[str, ...] = ()
    """Other answers that count."""
    tests: tuple[str, ...] = ()
    """Python statements that a program must pass."""
    test_cases: tuple[Mapping[str, Json], ...] = ()
    """Input and expected output of a program, each with `input` and `output`."""
    difficulty: str | float | None = None
    tags: tuple[str, ...] = ()
    follow_up: str | None = None
    """What the user says after the first reply, in the same trajectory."""
    follow_up_response: str | None = None
    rest: Mapping[str, Json] = field(default_factory=dict)
    """Fields that no built-in format knows."""


class TaskSource(Protocol):
    """Tasks by index; the same index always gives the same task. `size` is None for a source without end."""

    @property
    def size(self) -> int | None:
        """Number of tasks, None without end."""

    def __getitem__(self, index: int) -> Task:
        """The task at `index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. `seed` belongs to the request, so that results don't depend on who shares its batch.

    `temperature` 0 is greedy; log-probabilities are then those at temperature 1. `stop_ids` end a completion and are kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request. Every sampled token is in `ids`, the stop token included. All `[T]`.

    `engine_logprobs` are of the sampled tokens under the temperature asked for; `policy_versions` says which weights
    sampled each token.
    """

    ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call and what came back.

    With `continues`, the context of this call was every earlier id of the trajectory followed by `prompt_ids`; without it
    (always on the first turn, later only when the chat template rewrote history) `prompt_ids` is the whole context and a new
    training sample starts here.

    Example, ids of a two-turn trajectory whose model says `look` (7), `answer` (8) and stops with 2:

        Turn(continues=False, prompt_ids=(1, 5, 6), completion_ids=(7, 2), ...)   context 1 5 6, sampled 7 2
        Turn(continues=True,  prompt_ids=(3, 9),    completion_ids=(8, 2), ...)   context 1 5 6 7 2 3 9, sampled 8 2
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason
    continues: bool
    text: str
    """The completion as text, stop token removed: what the environment saw."""
    reply: tuple[Message, ...] = ()
    """What the environment answered. The model has not read the answer to its last turn."""
    reward: float = 0.0
    """Reward of this turn alone, the outcome not included."""
    state_key: str | None = None
    """The state before the turn, where the environment names it: equal keys of a group are one decision point."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What the environment counted in this turn, such as `malformed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All turns of one attempt. With a `fault` it is not evidence about the policy: it is kept, counted and never trained on.

    `outcome` are the reward components the environment gave at the end, None where one could not be computed;
    `outcome_reward` is their weighted sum, None when nothing was scored. `success` is the environment's own verdict.
    """

    task: Task
    sibling: int
    turns: tuple[Turn, ...]
    end_reason: EndReason
    outcome: Mapping[str, float | None] = field(default_factory=dict)
    outcome_reward: float | None = None
    success: bool = False
    fault: str | None = None

    @property
    def id(self) -> str:
        """`task id/sibling`, unique in a step."""
        return f"{self.task.id}/{self.sibling}"

    @property
    def valid(self) -> bool:
        """Whether this trajectory may be compared with its siblings and trained on."""
        return self.fault is None and self.outcome_reward is not None and bool(self.turns)

    @property
    def truncated(self) -> bool:
        """Whether a limit, not the model or the environment, ended it."""
        return self.end_reason in ("max_turns", "max_tokens")

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """r_k of every turn, `[K]`, the outcome not included."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def total_reward(self) -> float:
        """Turn rewards plus outcome; nan without an outcome."""
        return sum(self.turn_rewards) + (float("nan") if self.outcome_reward is None else self.outcome_reward)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The siblings of one task, in sibling order, faults included."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The siblings that may be compared."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.valid)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One token row to train on, all arrays `[T]`.

    `loss_mask[t]` says that token t was sampled by the model and is trained; it is not the attention mask: the model reads
    every token. `advantages` and `engine_logprobs` are 0 and `turn_index`, `policy_version` -1 where the mask is False.

    The two turns of the example in `Turn`, as one sample with advantages +0.5 and -1.0:

        input_ids        1    5    6    7     2     3    9    8     2
        loss_mask        .    .    .    x     x     .    .    x     x
        advantages       0    0    0    0.5   0.5   0    0   -1.0  -1.0
        turn_index      -1   -1   -1    0     0    -1   -1    1     1

    Raises:
        SampleError: arrays of different lengths, a trained first token (nothing predicts it), nothing trained, or a
            trained token whose log-probability or advantage is not finite.
    """

    trajectory_id: str
    group_id: str
    temperature: float
    input_ids: Ints
    loss_mask: Bools
    advantages: Floats
    engine_logprobs: Floats
    turn_index: Ints
    policy_version: Ints

    def __post_init__(self) -> None:
        names = ("input_ids", "loss_mask", "advantages", "engine_logprobs", "turn_index", "policy_version")
        lengths = {name: len(getattr(self, name)) for name in names}
        if len(set(lengths.values())) != 1:
            raise SampleError(f"{self.trajectory_id}: arrays of one sample differ in length: {lengths}")
        if not self.loss_mask.any():
            raise SampleError(f"{self.trajectory_id}: no token to train")
        if self.loss_mask[0]:
            raise SampleError(f"{self.trajectory_id}: the first token is trained, but nothing predicts it")
        for name in ("advantages", "engine_logprobs"):
            if not np.isfinite(getattr(self, name)[self.loss_mask]).all():
                raise SampleError(f"{self.trajectory_id}: {name} has nan or inf on a trained token")

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """Samples laid end to end. Arrays `[T]`; segment s covers `cu_seqlens[s]:cu_seqlens[s + 1]` (`cu_seqlens` is `[S + 1]`).

    Without `parents` a segment is a sample: `position_ids` restart at each, and tokens never attend across. With them, `[S]`,
    the tokens of segment s follow those of segment `parents[s]`, an earlier one, where that is not -1: its positions go on from
    there, and its tokens see that segment and what that one follows. So samples of a group have their common beginning once.

    `trajectory_index` numbers the trajectories of the whole batch, so that a trajectory cut into several samples is still one;
    `turn_index` numbers the turns of a trajectory.
    """

    input_ids: Ints
    position_ids: Ints
    cu_seqlens: Ints
    loss_mask: Bools
    advantages: Floats
    engine_logprobs: Floats
    temperature: Floats
    trajectory_index: Ints
    turn_index: Ints
    policy_version: Ints
    parents: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """What one optimizer step eats.

    `planned_trajectories` counts those the step set out to make, dropped ones included: the `fixed` aggregation divides by
    it, so that losing a trajectory doesn't enlarge the others.
    """

    rows: tuple[PackedRow, ...]
    trajectory_ids: tuple[str, ...]
    planned_trajectories: int
    num_shared_tokens: int = 0
    """Tokens that samples have in common with others, and that the rows have once less for each."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens under the loss mask."""
        return int(sum(row.loss_mask.sum() for row in self.rows))
