"""`starter`: open a box, then say what it holds.

    user:   box(amber)
    model:  open(amber)         a call; a reply that is none of the two reads `error`
    tool:   holds(seven)
    model:  answer(seven)       ends the trajectory; `answer(none)` gives up

Reward: 0.1 for the turn that opens the right box, and 1 at the end for the right answer. The demonstrations, which a supervised
start learns from, know how to open and to answer but mostly give up at once, so that training has something to find.

Make it yours: what a task is (`tasks`), what a reply does (`step`), what counts (`rewards`). `gold` must earn full marks, or
`polyturn env check` says so. An exception is a fault, and its trajectory is not trained on; what the model does wrong is
answered with a message instead.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary
from polyturn.types import Message, Split, Task, TaskSource

BOXES = tuple("amber birch cedar dahlia ember fern grove hazel iris juniper lily maple oak pine rose willow".split())
THINGS = tuple("one two three four five six seven eight nine ten".split())
NUM_TASKS = 4096
NUM_HELD_OUT = 128
GIVE_UP_SHARE = 0.7
CALL = re.compile(r"(open|answer)\((\w+)\)")


@dataclass
class State:
    """One trajectory: its task, and the answer given."""

    box: str
    thing: str
    answer: str | None = None


class Starter(Environment):
    """Open a box, then say what it holds."""

    name: ClassVar[str] = "starter"

    def __init__(self, *, turn_reward: float = 0.1) -> None:
        self.turn_reward = turn_reward

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Training tasks by seed; the held-out ones are always the same."""
        rng = random.Random(f"{split}/{seed if split == 'train' else 0}")
        count = NUM_TASKS if split == "train" else NUM_HELD_OUT
        return TaskList([self.task(f"{split}/{index}", rng.choice(BOXES), rng.choice(THINGS)) for index in range(count)])

    def task(self, task_id: str, box: str, thing: str) -> Task:
        """What the model reads first, and what it is to find."""
        opening = (Message(role="user", content=f"box({box})"),)
        return Task(id=task_id, environment=self.name, messages=opening, answer=thing, info={"box": box})

    async def setup(self, task: Task) -> State:
        """The state of a new trajectory."""
        return State(box=str(task.info["box"]), thing=str(task.answer))

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Answer one reply of the model."""
        call = CALL.fullmatch(reply.text.strip())
        if call is None or reply.truncated:
            return StepResult(messages=(Message(role="tool", content="error"),), counts={"malformed": 1})
        verb, word = call.groups()
        if verb == "answer":
            state.answer = word
            return StepResult(done=True)
        if word != state.box:
            return StepResult(messages=(Message(role="tool", content="empty"),), counts={"wrong_box": 1})
        return StepResult(messages=(Message(role="tool", content=f"holds({state.thing})"),), reward=self.turn_reward)

    async def rewards(self, state: State) -> Mapping[str, float]:
        """Outcome components by name; a sum of 1 is success."""
        return {"answer": float(state.answer == state.thing)}

    def gold(self, task: Task) -> Sequence[str]:
        """Replies that solve the task."""
        return [f"open({task.info['box']})", f"answer({task.answer})"]

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """Replies to start from: right, but often without the patience to look."""
        return ["answer(none)"] if rng.random() < GIVE_UP_SHARE else self.gold(task)

    def vocabulary(self) -> Vocabulary:
        """Every word of the text above, for `builtin:tiny`. Leave it out when yours is natural language."""
        words = ("box(", "open(", "answer(", "holds(", ")", "none", "empty", "error", *BOXES, *THINGS)
        return Vocabulary(words=words, pattern=r"[a-z]+\(?|\)", copied=frozenset((*BOXES, *THINGS)))
