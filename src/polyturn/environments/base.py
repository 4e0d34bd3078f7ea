"""What an environment is: it makes tasks, opens them, answers the model and scores the end. It speaks messages, never ids.

An author writes one class:

    class Countdown(Environment):
        name = "countdown"

        def tasks(self, split, seed): ...            # a TaskSource: endless, or a list
        async def setup(self, task): ...             # the state of one trajectory, any object
        async def step(self, state, reply): ...      # StepResult: messages back, reward of the turn, done
        async def rewards(self, state): ...          # outcome components by name
        def gold(self, task): ...                    # replies that solve the task with full marks

An exception in any of these is a fault: the trajectory is masked and counted, it is not a reward. A limit that the
environment sets on the model's own action (a malformed call, a program that runs too long) is an observation: answer it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json, Message, Row, Split, Task, TaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said. `truncated` when its token limit cut it, so that half a call is not taken for a whole one."""

    text: str
    truncated: bool = False
    num_tokens: int = field(default=0, compare=False)
    """Sampled tokens; 0 where nobody counted, as in a reply typed in by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the environment answers to one reply.

    `state_key` names the state *before* this reply, where the environment can: two visits with equal keys are one decision
    point. `counts` are numbers to add up in the metrics, such as `{"malformed": 1}`.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    state_key: str | None = None
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The words an environment's text is made of, for the word-level tokenizer of `builtin:tiny`.

    `pattern` is a regular expression that cuts text into words; `copied` are the words a policy must copy from its
    context rather than know by heart, which is what its warm start is measured on.
    """

    words: tuple[str, ...]
    pattern: str
    copied: frozenset[str]


class TaskList:
    """A `TaskSource` of tasks held in memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


class Environment(ABC):
    """One kind of task. Instances hold settings only; the state of a trajectory is whatever `setup` returns."""

    name: ClassVar[str]
    full_marks: ClassVar[float] = 1.0
    """Sum of the outcome components of a solved task: reaching it is success."""
    names_states: ClassVar[bool] = False
    """Whether every step gives a `state_key`, which `gigpo` compares turns by."""
    reads_formats: ClassVar[bool] = False
    """Whether rows of a file must be in a built-in format, and come through `task_from_example`."""
    needs_answer: bool = True
    """Whether such a row must have a reference answer or tests."""
    scores: bool = True
    """Whether `rewards` gives anything; an environment without it needs `environment.rewards` in the recipe."""

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> TaskSource:
        """The tasks of a split. The held-out split must not depend on `seed`, so that runs can be compared."""

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """A task from one row of the user's file. Raises DataError with the field and the rule when the row is wrong."""
        raise DataError(f"environment {self.name} makes its own tasks and reads no data file; remove data.path")

    def task_from_example(self, row: Row) -> Task:
        """A task from a row in a built-in format, for an environment that `reads_formats`. Its options lie in `info`."""
        options: dict[str, Json] = {
            "aliases": list(row.aliases),
            "tests": list(row.tests),
            "test_cases": list(row.test_cases),
            "difficulty": row.difficulty,
            "tags": list(row.tags),
            "follow_up": row.follow_up,
            "follow_up_response": row.follow_up_response,
        }
        info = dict(row.rest) | {name: value for name, value in options.items() if value not in (None, [])}
        return Task(id=row.where, environment=self.name, messages=row.messages, answer=row.answer, info=info)

    def knows_row(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row of a file goes to `task_from_row`. Others are read in a built-in format, for `task_from_example`."""
        return not self.reads_formats

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """Tools that the chat template announces to the model; none where the opening messages say what there is.

        Asked once for all siblings, after the first one's `setup`.
        """
        return ()

    async def start(self) -> None:
        """Open what all trajectories of a run share: a client, an index, a server. Called once, before the first `setup`.

        Raises UserError or ResourceError, which ends the run before it costs anything.
        """
        return

    async def stop(self) -> None:
        """Close it. Called once, after the last `close`, however the run ended, also when `start` raised."""
        return

    @abstractmethod
    async def setup(self, task: Task) -> Any:
        """The state of one trajectory. Its messages are `task.messages`."""

    @abstractmethod
    async def step(self, state: Any, reply: Reply) -> StepResult:
        """Answer one reply, updating `state`."""

    @abstractmethod
    async def rewards(self, state: Any) -> Mapping[str, float | None]:
        """Outcome components by name, None for one that can't be computed. Also called when a limit ended the trajectory."""

    def succeeded(self, task: Task, outcome: Mapping[str, float | None]) -> bool:
        """Whether a trajectory of `task` with this outcome solved it."""
        return sum(value for value in outcome.values() if value is not None) >= self.full_marks - 1e-6

    async def close(self, state: Any) -> None:
        """Free what `setup` took. Called once per trajectory, however it ended."""
        return

    @abstractmethod
    def gold(self, task: Task) -> Sequence[str]:
        """Replies that solve `task` with full marks, in order."""

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """Replies of one demonstration for a supervised start; the gold ones unless the environment has better."""
        return self.gold(task)

    def vocabulary(self) -> Vocabulary:
        """The words of this environment. Raises EnvironmentSetupError where its text is open, as natural language is."""
        raise EnvironmentSetupError(
            f"environment {self.name} has no closed vocabulary, so builtin:tiny can't speak it; choose another model.path"
        )


def info_of(task: Task, key: str) -> Json:
    """`task.info[key]`, or a DataError that names the task and the key."""
    if key not in task.info:
        raise DataError(f"task {task.id} has no info field {key!r}; its environment needs it")
    return task.info[key]
