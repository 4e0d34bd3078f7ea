"""`reasoning_gym:NAME`: any data set of the package `reasoning_gym`, made from seeds without end and scored by its own rules.

    user:   State the final answer to the following arithmetic problem: 6 + 2 - 9 =
    model:  6 + 2 = 8, and 8 - 9 = -1. <answer>-1</answer>

Training tasks come from the run's seed; the held-out ones from seeds that no training seed can reach. The package runs in
two processes of its own (`gym_worker`), which are confined: one makes tasks, the other scores answers.

Reward: `answer`, the package's score from 0 to 1, full marks at 1; with `partial` false nothing less counts. An answer that the
scorer can't read, or over which it dies, scores 0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyturn.environments.adapters.gym_client import GymProcess
from polyturn.environments.adapters.gym_worker import CHUNK
from polyturn.environments.base import Environment, Reply, StepResult, info_of
from polyturn.environments.rewards.answers import given_answer
from polyturn.environments.rewards.view import TrajectoryView, TurnView
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.processes.threads import in_thread
from polyturn.types import Message, Split, Task, TaskSource

FIRST_TRAINING_SEED = 1 << 24
"""Below it is the held-out split. Data sets add a task's index to their seed, so that seeds must be whole chunks apart."""
LAST_SEED = 1 << 31
SYSTEM = "Think step by step. Give the final answer alone between <{tag}> and </{tag}>, in the form that the question asks for."
_TAG = re.compile(r"[A-Za-z][\w-]*")


@dataclass(slots=True)
class State:
    """One trajectory: the task, and what its answer was worth."""

    task: Task
    score: float = 0.0


class ReasoningGym(Environment):
    """Answer tasks that reasoning_gym makes."""

    name: ClassVar[str] = "reasoning_gym"

    def __init__(
        self,
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        num_held_out: int = 256,
        partial: bool = True,
        answer_tag: str = "answer",
        instructions: bool = True,
        score_cpu_s: float = 5.0,
    ) -> None:
        if not _TAG.fullmatch(answer_tag):
            raise EnvironmentSetupError(f"environment.args.answer_tag={answer_tag!r} is no tag; use letters, as in answer")
        if (
            isinstance(num_held_out, bool)
            or not isinstance(num_held_out, int)
            or not 0 <= num_held_out <= FIRST_TRAINING_SEED // 2
        ):
            raise EnvironmentSetupError(
                f"environment.args.num_held_out={num_held_out!r} must be a number of tasks, such as 256"
            )
        if not isinstance(score_cpu_s, int | float) or not 0 < score_cpu_s <= 25:
            raise EnvironmentSetupError(f"environment.args.score_cpu_s={score_cpu_s!r} must be above 0 and at most 25 seconds")
        if config is not None and not isinstance(config, Mapping):
            raise EnvironmentSetupError(f"environment.args.config={config!r:.60} must be a mapping of the data set's settings")
        self.name = f"reasoning_gym:{name}"  # type: ignore[misc]  # one class for all data sets
        self.num_held_out = num_held_out
        self.partial = partial
        self.answer_tag = answer_tag
        self.instructions = instructions
        self._maker = GymProcess(name, config or {}, cpu_s=score_cpu_s)
        self._scorer = GymProcess(name, config or {}, cpu_s=score_cpu_s)
        self._maker.open()

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Endless tasks for training, `num_held_out` fixed ones held out."""
        return _Tasks(self, split, seed)

    def make(self, split: Split, seed: int, index: int) -> Task:
        """The task at `index`. Raises ResourceError when the process that makes them is lost."""
        dataset_seed = seed_of(split, seed, index // CHUNK)
        made = self._maker.ask("make", dataset_seed, index % CHUNK)
        system = (Message(role="system", content=SYSTEM.format(tag=self.answer_tag)),) if self.instructions else ()
        return Task(
            id=f"{split}/{seed}/{index}" if split == "train" else f"eval/{index}",
            environment=self.name,
            messages=(*system, Message(role="user", content=made["question"])),
            answer=made["answer"],
            info={"seed": dataset_seed, "index": index % CHUNK, "gold": made["gold"]},
        )

    # ── one run, one trajectory ────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the process that scores. Raises ResourceError where it can't be."""
        await in_thread(self._scorer.open)

    async def stop(self) -> None:
        """End both processes. They start again when they are needed."""
        await in_thread(self._scorer.close)
        await in_thread(self._maker.close)

    async def setup(self, task: Task) -> State:
        """Nothing answered yet."""
        return State(task=task)

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Score the answer. Raises ResourceError when no process can be started that does."""
        view = TrajectoryView(task=state.task, turns=(TurnView(text=reply.text),))
        answer = given_answer(view, tag=self.answer_tag)
        if not answer:
            return StepResult(done=True, counts={"no_answer": 1})
        arguments = (info_of(state.task, "seed"), info_of(state.task, "index"), answer)
        said = await in_thread(self._scorer.ask_or_none, "score", *arguments)
        if said is None:
            return StepResult(done=True, counts={"scorer_died": 1})
        if "unreadable" in said:
            return StepResult(done=True, counts={"unreadable_answer": 1})
        score = float(said["score"])
        state.score = score if self.partial or score >= 1.0 else 0.0
        return StepResult(done=True)

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`answer`: the package's score."""
        return {"answer": state.score}

    def gold(self, task: Task) -> Sequence[str]:
        """The answer of the package. Raises DataError for a task with none that its scorer gives full marks for."""
        gold = task.info.get("gold")
        if not isinstance(gold, str):
            raise DataError(f"task {task.id}: {self.name} gives no answer that its scorer gives full marks for")
        return [f"<{self.answer_tag}>{gold}</{self.answer_tag}>"]


class _Tasks:
    """Tasks made when asked for."""

    def __init__(self, environment: ReasoningGym, split: Split, seed: int) -> None:
        self._environment, self._split, self._seed = environment, split, seed

    @property
    def size(self) -> int | None:
        """None for training."""
        return self._environment.num_held_out if self._split == "eval" else None

    def __getitem__(self, index: int) -> Task:
        return self._environment.make(self._split, self._seed, index)


def seed_of(split: Split, seed: int, chunk: int) -> int:
    """The seed of the data set that holds a chunk of tasks. Two are equal or at least CHUNK apart.

    >>> seed_of("eval", 7, 1), seed_of("train", 7, 1) >= FIRST_TRAINING_SEED
    (1024, True)
    """
    if split == "eval":
        return chunk * CHUNK
    digest = hashlib.blake2b(f"{seed}/{chunk}".encode(), digest_size=8).digest()
    places = (LAST_SEED - FIRST_TRAINING_SEED) // CHUNK
    return FIRST_TRAINING_SEED + CHUNK * (int.from_bytes(digest, "big") % places)
