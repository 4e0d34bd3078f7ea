"""`chat`: rows of a file in any built-in format, scored by the rewards that the recipe lists.

    user:   A train leaves at 9:40 and arrives at 12:05. How long does the journey take?
    model:  2 hours and 25 minutes.
    user:   And if it leaves 15 minutes late and arrives on time?        the row's follow_up, where it has one
    model:  2 hours and 10 minutes.

The model speaks once, and once more after a `follow_up`. The environment has no tool and no opinion: `environment.rewards`
says what counts. With `exact`, the component `answer` is 1 when every reply is the reference (or an alias) of its question,
by the rules of the reward `exact_match`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.rewards.answers import gold_answers, same_answer
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Message, Row, Split, Task, TaskSource


@dataclass(slots=True)
class State:
    """One trajectory: the replies so far."""

    task: Task
    replies: list[str] = field(default_factory=list)


class Chat(Environment):
    """Answer the rows of a file, and their follow-up questions."""

    name: ClassVar[str] = "chat"
    reads_formats: ClassVar[bool] = True

    def __init__(self, *, exact: bool = False, system: str | None = None, need_answer: bool = True) -> None:
        if exact and not need_answer:
            raise EnvironmentSetupError("environment.args.exact compares with the row's answer; leave need_answer at true")
        self.exact = exact
        self.system = system
        self.needs_answer = need_answer
        self.scores = exact

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Raises EnvironmentSetupError: the tasks are rows."""
        raise EnvironmentSetupError(
            "environment chat takes its tasks from rows; set data.path (and data.eval_path) to a file in a built-in format, "
            "`polyturn data new FILE` writes one to start from"
        )

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """Raises DataError: rows come through `task_from_example`."""
        raise DataError("environment chat reads rows in a built-in format only")

    def task_from_example(self, row: Row) -> Task:
        """The row's messages, behind the `system` message unless it has one."""
        task = super().task_from_example(row)
        if self.system is None or task.messages[0].role == "system":
            return task
        opening = (Message(role="system", content=self.system), *task.messages)
        return Task(id=task.id, environment=self.name, messages=opening, answer=task.answer, info=task.info)

    async def setup(self, task: Task) -> State:
        """Nothing said yet."""
        return State(task=task)

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Ask the follow-up after the first reply, end after the last."""
        state.replies.append(reply.text)
        follow_up = state.task.info.get("follow_up")
        if len(state.replies) == 1 and isinstance(follow_up, str):
            return StepResult(messages=(Message(role="user", content=follow_up),))
        return StepResult(done=True)

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`answer` with `exact`, else nothing."""
        if not self.exact:
            return {}
        expected = self._expected(state.task)
        right = len(state.replies) >= len(expected) and all(
            any(same_answer(reply, gold) for gold in golds) for reply, golds in zip(state.replies, expected, strict=False)
        )
        return {"answer": float(right)}

    def gold(self, task: Task) -> Sequence[str]:
        """The references of the row. Raises DataError where it has none."""
        return [golds[0] for golds in self._expected(task)]

    def _expected(self, task: Task) -> list[tuple[str, ...]]:
        """The answers that count, one entry a question that has any."""
        golds = gold_answers(task)
        if not golds:
            raise DataError(f"task {task.id} has no answer to compare with; give the row one, or set exact=false")
        expected = [golds]
        response = task.info.get("follow_up_response")
        if isinstance(response, str):
            expected.append((response,))
        return expected
