"""An environment whose rewards a random model earns now and then, and ones that misbehave, for recipes by dotted path.

user:   say red
model:  red                reward 0.5; starting with `red` 0.2; any other colour first 0.1
tool:   again
model:  red                outcome 1 when the last reply was right
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary
from polyturn.errors import DataError
from polyturn.types import Message, Split, Task, TaskSource

COLOURS = ("red", "blue", "green")
WORDS = ("say", " ", "again", *COLOURS)
PATTERN = "[a-z]+| "


@dataclass
class State:
    task: Task
    sibling: int
    """Number of this attempt at its task, in the order they were opened."""
    replies: list[str] = field(default_factory=list)


class Colours(Environment):
    """Say the colour you are told, `rounds` times."""

    name: ClassVar[str] = "colours"

    def __init__(self, *, rounds: int = 2, held_out: int = 8, colours: int = 3) -> None:
        self.rounds = rounds
        self.held_out = held_out
        self.colours = COLOURS[:colours]
        self.opened: Counter[str] = Counter()
        self.closed = 0

    def tasks(self, split: Split, seed: int) -> TaskSource:
        if split == "eval":
            return TaskList([self._task(f"eval/{i}", self.colours[i % len(self.colours)]) for i in range(self.held_out)])
        return _Endless(self, seed)

    def _task(self, task_id: str, colour: str) -> Task:
        opening = (Message(role="user", content=f"say {colour}"),)
        return Task(id=task_id, environment=self.name, messages=opening, answer=colour)

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        if not row.get("answer"):
            raise DataError("field 'answer' is missing or empty; a colour is needed")
        return self._task(task_id, row["answer"].lower())

    async def setup(self, task: Task) -> State:
        state = State(task=task, sibling=self.opened[task.id])
        self.opened[task.id] += 1
        return state

    async def step(self, state: State, reply: Reply) -> StepResult:
        state.replies.append("" if reply.truncated else reply.text)
        answer = str(state.task.answer)
        if state.replies[-1] == answer:
            reward = 0.5
        elif reply.text.startswith(answer):
            reward = 0.2
        else:
            reward = 0.1 * reply.text.startswith(COLOURS)
        done = len(state.replies) >= self.rounds
        messages = () if done else (Message(role="tool", content="again"),)
        return StepResult(
            messages=messages,
            reward=reward,
            done=done,
            state_key=str(len(state.replies)),
            counts={"cut": 1.0} if reply.truncated else {},
        )

    async def rewards(self, state: State) -> Mapping[str, float | None]:
        return {"answer": float(bool(state.replies) and state.replies[-1] == state.task.answer)}

    async def close(self, state: State) -> None:
        self.closed += 1

    def gold(self, task: Task) -> Sequence[str]:
        return [str(task.answer)] * self.rounds

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(words=WORDS, pattern=PATTERN, copied=frozenset(COLOURS))


class _Endless:
    size: int | None = None

    def __init__(self, environment: Colours, seed: int) -> None:
        self._environment, self._seed = environment, seed

    def __getitem__(self, index: int) -> Task:
        colour = random.Random(f"{self._seed}/{index}").choice(self._environment.colours)
        return self._environment._task(f"train/{self._seed}/{index}", colour)


class OneCrashes(Colours):
    """The third attempt at every training task crashes in its second turn."""

    async def step(self, state: State, reply: Reply) -> StepResult:
        if state.task.id.startswith("train") and state.sibling == 2 and state.replies:
            raise RuntimeError("the sandbox is gone")
        return await super().step(state, reply)


class RewardRaises(Colours):
    """The author's reward function fails on every attempt whose sibling number is in `which`."""

    def __init__(self, *, which: Sequence[int] = (0,), **given: Any) -> None:
        super().__init__(**given)
        self.which = which

    async def rewards(self, state: State) -> Mapping[str, float | None]:
        if state.task.id.startswith("train") and state.sibling in self.which:
            raise KeyError("score")
        return await super().rewards(state)


class AlwaysCrashes(Colours):
    """Nothing can be played in training."""

    async def setup(self, task: Task) -> State:
        if task.id.startswith("train"):
            raise ConnectionError("no sandbox answers")
        return await super().setup(task)


class ToolHangs(Colours):
    """A plain function that never returns, on one training attempt a task; the tool's deadline must end it."""

    def step(self, state: State, reply: Reply) -> StepResult:  # type: ignore[override]
        if state.task.id.startswith("train") and state.sibling == 1:
            threading.Event().wait()
        return asyncio.run(super().step(state, reply))


class CoroutineHangs(Colours):
    """A coroutine that never returns, on one training attempt a task."""

    async def step(self, state: State, reply: Reply) -> StepResult:
        if state.task.id.startswith("train") and state.sibling == 1:
            await asyncio.Event().wait()
        return await super().step(state, reply)


class OpenWords(Colours):
    """An environment whose text is open, as natural language is."""

    name: ClassVar[str] = "open_words"

    def vocabulary(self) -> Vocabulary:
        return Environment.vocabulary(self)


class NeverFull(Colours):
    """Breaks its contract: the gold replies don't score full marks."""

    async def rewards(self, state: State) -> Mapping[str, float | None]:
        return {"answer": 0.5}


class TasksRaise(Colours):
    """Its author's mistake shows when tasks are asked for."""

    def tasks(self, split: Split, seed: int) -> TaskSource:
        raise KeyError("split")


class NoTasks(Colours):
    """Takes its tasks from rows only."""

    def tasks(self, split: Split, seed: int) -> TaskSource:
        return TaskList([])


class SameIds(Colours):
    """Two tasks of every step share an id."""

    def _task(self, task_id: str, colour: str) -> Task:
        return super()._task(task_id[:-1] + "0", colour)


class Needy(Colours):
    """Has an argument without a default."""

    def __init__(self, *, url: str) -> None:
        super().__init__()


class Abstract(Environment):
    """Lacks every method."""

    name: ClassVar[str] = "abstract"
