"""What every environment must do, checked by playing it: `polyturn env check` prints this, and the contract tests demand it.

No model and no tokens are involved: replies are typed in by the check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyturn.environments.base import Environment, Reply
from polyturn.environments.calls import call, checked_outcome, checked_step
from polyturn.errors import EnvironmentSetupError, UserError
from polyturn.processes.deadlines import deadline
from polyturn.types import Message, Split, Task, TaskSource

NUM_TASKS = 8
MAX_TURNS = 64
DEADLINE_S = 60.0
START_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode played by hand."""

    task: Task
    transcript: tuple[Message, ...]
    turn_rewards: tuple[float, ...]
    outcome: dict[str, float | None]
    done: bool

    @property
    def score(self) -> float:
        """Sum of the outcome components."""
        return sum(value for value in self.outcome.values() if value is not None)


@dataclass(slots=True)
class ContractReport:
    """What the check found: one line per rule, and an episode to look at."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    shown: Episode | None = None

    def rule(self, name: str, problem: str | None) -> None:
        """Count a rule as kept, or as broken with the reason."""
        (self.failed if problem else self.passed).append(f"{name}: {problem}" if problem else name)


async def play_by_hand(environment: Environment, task: Task, replies: Sequence[str], *, repeat: bool = False) -> Episode:
    """Play `replies` in order until the environment is done; `repeat` says the last one again and again.

    Raises whatever the environment raises, DeadlineError, or EnvironmentSetupError for an answer that is none.
    """
    state = await _call(environment, "setup", task)
    transcript, rewards, done = list(task.messages), [], False
    try:
        for turn in range(MAX_TURNS if repeat else len(replies)):
            text = replies[min(turn, len(replies) - 1)]
            transcript.append(Message(role="assistant", content=text))
            result = checked_step(await _call(environment, "step", state, Reply(text=text)), f"{environment.name}.step")
            rewards.append(result.reward)
            transcript.extend(result.messages)
            done = result.done
            if done:
                break
        outcome = checked_outcome(await _call(environment, "rewards", state), f"{environment.name}.rewards")
    finally:
        await _call(environment, "close", state)
    return Episode(task=task, transcript=tuple(transcript), turn_rewards=tuple(rewards), outcome=outcome, done=done)


async def check_contract(environment: Environment, *, seed: int = 0, rows: TaskSource | None = None) -> ContractReport:
    """Hold `environment` to its contract on the first tasks of both splits. An exception is a broken rule, not an error.

    `rows` are tasks made from a file, for an environment that makes none itself. The sandbox, if it has one, is started.
    """
    report = ContractReport()
    try:
        await _call(environment, "start", limit_s=START_DEADLINE_S)
        await _check(environment, seed, rows, report)
    finally:
        await _call(environment, "stop")
    return report


async def _check(environment: Environment, seed: int, rows: TaskSource | None, report: ContractReport) -> None:
    tasks = _own_tasks(environment, seed, report) if rows is None else _first(rows)
    if not tasks:
        return
    report.rule("task ids are unique", None if len({task.id for task in tasks}) == len(tasks) else "two tasks share an id")
    longest: Episode | None = None
    problems: dict[str, str | None] = dict.fromkeys(("gold", "empty", "demonstration"))
    for task in tasks:
        for name in [name for name, problem in problems.items() if problem is None]:
            try:
                episode = await _scripted(environment, task, name)
            except (Exception, SystemExit) as error:
                problems[name] = f"task {task.id} {_raised(error)}"
                continue
            problems[name] = _judge(environment, episode, name)
            if name == "gold" and (longest is None or len(episode.transcript) > len(longest.transcript)):
                longest = episode
    report.rule("the gold replies score full marks", problems["gold"])
    report.rule("empty replies do not score full marks", problems["empty"])
    report.rule("a demonstration plays to its end", problems["demonstration"])
    report.shown = longest


def _own_tasks(environment: Environment, seed: int, report: ContractReport) -> list[Task]:
    """The first tasks that the environment makes, and the rules about making them."""
    tasks: list[Task] = []
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        try:
            tasks += _first(environment.tasks(split, seed))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            report.rule("tasks can be made", f"tasks({split!r}, {seed}) {_raised(error)}")
            return []
        if not tasks:
            raise EnvironmentSetupError(f"environment {environment.name} has no training tasks")
    report.rule("the same index gives the same task", _problem(_repeatable, environment, seed))
    report.rule("held-out tasks do not depend on the seed", _problem(_held_out_fixed, environment, seed))
    return tasks


def show(episode: Episode) -> str:
    """An episode as text, with the reward of each turn and the outcome."""
    lines, turn = [f"task {episode.task.id} (answer: {episode.task.answer})"], 0
    for message in episode.transcript:
        reward = ""
        if message.role == "assistant":
            reward = f"    reward {episode.turn_rewards[turn]:g}"
            turn += 1
        lines.append(f"  {message.role + ':':<10} {message.content}{reward}")
    outcome = ", ".join(f"{name}={value}" for name, value in episode.outcome.items())
    return "\n".join([*lines, f"  {'outcome:':<10} {outcome}"])


async def _scripted(environment: Environment, task: Task, name: str) -> Episode:
    if name == "empty":
        return await play_by_hand(environment, task, [""], repeat=True)
    replies = environment.gold(task) if name == "gold" else environment.demonstrations(task, random.Random(task.id))
    return await play_by_hand(environment, task, replies)


def _judge(environment: Environment, episode: Episode, name: str) -> str | None:
    full = episode.score >= environment.full_marks - 1e-6
    if name == "empty":
        return f"task {episode.task.id} gives {episode.score:g} for saying nothing" if full else None
    if not episode.done:
        return f"task {episode.task.id} is not done after the last reply"
    if name == "gold" and not full:
        return f"task {episode.task.id} scores {episode.score:g} of {environment.full_marks:g}"
    return None


def _repeatable(environment: Environment, seed: int) -> str | None:
    source, again = environment.tasks("train", seed), environment.tasks("train", seed)
    first = _first(source)
    wrong = next((found for other in (again, source) if (found := _first_difference(first, _first(other))) is not None), None)
    return None if wrong is None else f"training task {wrong} differs when asked for again"


def _held_out_fixed(environment: Environment, seed: int) -> str | None:
    source, other = environment.tasks("eval", seed), environment.tasks("eval", seed + 1)
    if source.size != other.size:
        return f"{source.size} tasks with seed {seed}, {other.size} with seed {seed + 1}"
    wrong = _first_difference(_first(source), _first(other))
    return None if wrong is None else f"held-out task {wrong} changes with the seed"


def _first(source: TaskSource) -> list[Task]:
    return [source[index] for index in range(NUM_TASKS if source.size is None else min(NUM_TASKS, source.size))]


def _first_difference(one: Sequence[Task], other: Sequence[Task]) -> int | None:
    return next((index for index, (left, right) in enumerate(zip(one, other, strict=True)) if left != right), None)


def _problem(rule: Callable[[Environment, int], str | None], environment: Environment, seed: int) -> str | None:
    try:
        return rule(environment, seed)
    except (Exception, SystemExit) as error:
        return _raised(error)


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


async def _call(environment: Environment, what: str, *arguments: Any, limit_s: float | None = None) -> Any:
    """Call a method of an environment, coroutine or not, within the check's deadline."""
    async with deadline(limit_s or DEADLINE_S, f"{environment.name}.{what}"):
        return await call(getattr(environment, what), *arguments)
