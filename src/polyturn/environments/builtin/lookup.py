"""`lookup`: a small world of records, and a value that hides behind some of them.

    user:   find(maple)              a record's name
    model:  lookup(maple)
    tool:   next(otter)              it points to another record
    model:  lookup(otter)
    tool:   value(seven)             or `nothing`: a dead end
    model:  answer(seven)            `answer(none)` after a dead end

Level `chain` is a line of 1 to `max_hops` records. In level `maze` a record points to two others, one of which is a dead
end, so that the model has to come back; the value is always there. Tasks are made from a seed without end; the held-out
split is 512 fixed tasks.

Rewards: `turn_reward` for each call that makes progress (the first look at a record on the way), and 1 for the right
answer. Demonstrations know every move but not persistence: at each pointer they give up with `answer(none)` 65 % of the time.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary, info_of
from polyturn.errors import DataError, EnvironmentSetupError, nearest
from polyturn.types import Message, Split, Task, TaskSource

Level = Literal["chain", "maze"]

NAMES = tuple(
    "amber aspen badger bamboo beacon birch bison bramble canyon cedar cobra comet condor coral cricket crow dahlia delta "
    "eagle ember falcon fern finch fjord fox glacier grove gull harbor hazel heron ibis iris island jackal juniper kestrel "
    "lagoon lark lemur lily lotus lynx maple marsh meadow moose myrtle newt nova oak orchid osprey otter panda pebble pine "
    "plover quail raven reef salmon spruce".split()
)
VALUES = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty".split()
)
NUM_HELD_OUT = 512
GIVE_UP_SHARE = 0.65

INSTRUCTIONS = (
    "Find the value behind a record. Reply with exactly one call and nothing else. lookup(name) shows a record: "
    "value(x) holds the value, next(a) or next(a,b) points to other records, nothing is a dead end. "
    "When you know the value, reply answer(x). If every way is a dead end, reply answer(none)."
)
_WORD = re.compile(r"[a-z]+")
_CALL = re.compile(r"(lookup|answer)\(\s*([a-z]+)\s*\)")


@dataclass(frozen=True, slots=True)
class Record:
    """A value, or pointers to other records, or neither (a dead end)."""

    value: str | None = None
    next: tuple[str, ...] = ()

    def shown(self) -> str:
        """The record as the tool prints it."""
        if self.value is not None:
            return f"value({self.value})"
        return f"next({','.join(self.next)})" if self.next else "nothing"


@dataclass(slots=True)
class State:
    """One trajectory: what was looked up, in order, and the answer given."""

    start: str
    records: Mapping[str, Record]
    path: frozenset[str]
    answer: str
    visited: list[str] = field(default_factory=list)
    given: str | None = None

    def key(self) -> str:
        """Equal for equal knowledge, whatever order it was gathered in."""
        return ",".join(sorted(self.visited))


class Lookup(Environment):
    """Follow pointers between records until the value turns up."""

    name: ClassVar[str] = "lookup"

    def __init__(
        self,
        *,
        level: Level = "chain",
        max_hops: int = 4,
        dead_end_share: float = 0.03,
        turn_reward: float = 0.1,
        instructions: bool = True,
    ) -> None:
        if level not in get_args(Level):
            raise EnvironmentSetupError(
                f"environment.args.level={level!r} is no level of lookup; {nearest(str(level), get_args(Level))}"
            )
        if not isinstance(max_hops, int):
            raise EnvironmentSetupError(f"environment.args.max_hops={max_hops!r} is no whole number; use 1 or more")
        if not isinstance(turn_reward, int | float) or not math.isfinite(turn_reward):
            raise EnvironmentSetupError(f"environment.args.turn_reward={turn_reward!r} is no number; use 0.1, or 0 for none")
        limit = 12 if level == "chain" else 4
        if not 1 <= max_hops <= limit:
            raise EnvironmentSetupError(
                f"environment.args.max_hops={max_hops} is out of range for level {level}; use 1 to {limit}"
            )
        if not 0 <= dead_end_share <= 1:
            raise EnvironmentSetupError(f"environment.args.dead_end_share={dead_end_share} is not a share; use 0 to 1")
        self.level: Level = level
        self.max_hops = max_hops
        self.dead_end_share = dead_end_share
        self.turn_reward = turn_reward
        self.instructions = instructions

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Endless tasks for training, 512 fixed ones held out."""
        if split == "eval":
            return TaskList([self._make("eval", 0, index) for index in range(NUM_HELD_OUT)])
        return _Endless(self, seed)

    def _make(self, split: Split, seed: int, index: int) -> Task:
        rng = random.Random(f"lookup/{self.level}/{self.max_hops}/{self.dead_end_share}/{split}/{seed}/{index}")
        names = rng.sample(NAMES, 2 * self.max_hops + 1)
        hops = 1 + index % self.max_hops  # every length equally often, in any stretch of tasks
        records: dict[str, dict[str, Any]] = {}
        for here, there in pairwise(names[:hops]):
            pointers = [there]
            if self.level == "maze":
                wrong = names[self.max_hops + len(records)]
                pointers.append(wrong)
                rng.shuffle(pointers)
            records[here] = {"next": pointers}
        if self.level == "maze":
            for pointers in [record["next"] for record in records.values()]:
                records.update({name: {} for name in pointers if name not in names[:hops]})
        dead = self.level == "chain" and rng.random() < self.dead_end_share
        answer = "none" if dead else rng.choice(VALUES)
        records[names[hops - 1]] = {} if dead else {"value": answer}
        return self._task(f"{split}/{seed}/{index}" if split == "train" else f"eval/{index}", names[0], records, answer)

    def _task(self, task_id: str, start: str, records: Mapping[str, Any], answer: str) -> Task:
        system = (Message(role="system", content=INSTRUCTIONS),) if self.instructions else ()
        opening = (*system, Message(role="user", content=f"find({start})"))
        return Task(
            id=task_id, environment=self.name, messages=opening, answer=answer, info={"start": start, "records": records}
        )

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """From `{"start": name, "records": {name: {"value": v} | {"next": [names]} | {}}, "answer": v or "none"}`."""
        for key in ("start", "records", "answer"):
            if row.get(key) in (None, ""):
                raise DataError(f"field {key!r} is missing or empty; a lookup row needs start, records and answer")
        start, records, answer = row["start"], row["records"], row["answer"]
        if not isinstance(records, Mapping) or not all(isinstance(record, Mapping) for record in records.values()):
            raise DataError("field 'records' must map names to {'value': ...}, {'next': [...]} or {}")
        if not isinstance(start, str) or start not in records:
            raise DataError(f"start {start!r} is no name of 'records'")
        for name, record in records.items():
            _check_record(name, record, records)
        path = _path(start, _as_records(records))
        found = records[path[-1]].get("value") or "none"
        if answer != found:
            raise DataError(f"the answer {answer!r} is not what the records lead to, which is {found!r}; correct either")
        return self._task(task_id, start, records, str(answer))

    # ── one trajectory ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def setup(self, task: Task) -> State:
        """Read the records of the task."""
        records = _records(task)
        start = str(info_of(task, "start"))
        if task.answer is None:
            raise DataError(f"task {task.id} has no answer; lookup scores the answer against it")
        return State(start=start, records=records, path=frozenset(_path(start, records)), answer=task.answer)

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Run one call. A malformed one gets `error` and counts; it does not end the trajectory."""
        key = state.key()
        match = None if reply.truncated else _CALL.fullmatch(reply.text.strip())
        if match is None:
            return StepResult(messages=(Message(role="tool", content="error"),), state_key=key, counts={"malformed": 1})
        verb, argument = match.groups()
        if verb == "answer":
            state.given = argument
            return StepResult(done=True, state_key=key)
        record = state.records.get(argument)
        shown = "error" if record is None else record.shown()
        progress = argument in state.path and argument not in state.visited
        if record is not None and argument not in state.visited:
            state.visited.append(argument)
        return StepResult(
            messages=(Message(role="tool", content=shown),),
            reward=self.turn_reward if progress else 0.0,
            state_key=key,
            counts={"unknown_record": 1} if record is None else {},
        )

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`answer`: 1 when the answer given is the right one."""
        return {"answer": float(state.given == state.answer)}

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The straight way to the value."""
        return [*(f"lookup({name})" for name in _path(str(info_of(task, "start")), _records(task))), f"answer({task.answer})"]

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """Right moves, too little persistence: at each pointer, and after a wrong fork, 65 % give up."""
        records = _records(task)
        replies: list[str] = []
        open_names = [str(info_of(task, "start"))]
        seen = set(open_names)
        while open_names:
            name = open_names.pop()
            record = records[name]
            replies.append(f"lookup({name})")
            if record.value is not None:
                return [*replies, f"answer({record.value})"]
            # Always the first pointer first: which one leads on is luck, and a choice that can't be told can't be copied.
            open_names.extend(target for target in reversed(record.next) if target not in seen)
            seen.update(record.next)
            if open_names and rng.random() < GIVE_UP_SHARE:
                break
        return [*replies, "answer(none)"]

    def vocabulary(self) -> Vocabulary:
        """Verbs with their bracket, names, values. Raises EnvironmentSetupError with instructions, whose words are open."""
        if self.instructions:
            raise EnvironmentSetupError(
                "builtin:tiny does not know the words of lookup's instructions; set environment.args.instructions=false"
            )
        marks = ("find(", "lookup(", "answer(", "next(", "value(", ")", ",", "nothing", "none", "error")
        return Vocabulary(words=(*marks, *NAMES, *VALUES), pattern=r"[a-z]+\(?|\)|,", copied=frozenset((*NAMES, *VALUES)))


class _Endless:
    """Training tasks made when asked for."""

    size: int | None = None

    def __init__(self, environment: Lookup, seed: int) -> None:
        self._environment = environment
        self._seed = seed

    def __getitem__(self, index: int) -> Task:
        return self._environment._make("train", self._seed, index)


def _records(task: Task) -> dict[str, Record]:
    raw: Any = info_of(task, "records")
    return _as_records(raw)


def _as_records(raw: Mapping[str, Any]) -> dict[str, Record]:
    return {name: Record(value=record.get("value"), next=tuple(record.get("next") or ())) for name, record in raw.items()}


def _check_record(name: str, record: Mapping[str, Any], records: Mapping[str, Any]) -> None:
    """Raise DataError for a record that can't be played: calls are made of lower-case letters."""
    if not _WORD.fullmatch(name):
        raise DataError(f"the name {name!r} can't be said in a call; use the letters a to z")
    value, targets = record.get("value"), record.get("next")
    if value is not None and not (isinstance(value, str) and _WORD.fullmatch(value)):
        raise DataError(f"record {name!r}: the value {value!r} can't be said in a call; use the letters a to z")
    if targets is not None and not (isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)):
        raise DataError(f"record {name!r}: 'next' must be a list of names")
    lost = [target for target in targets or () if target not in records]
    if lost:
        raise DataError(f"record {name!r} points to {lost[0]!r}, which 'records' does not hold")


def _path(start: str, records: Mapping[str, Record]) -> list[str]:
    """The shortest way from `start` to a value; where there is none, every name that can be reached, in order."""
    came_from = {start: ""}
    ahead = deque([start])
    while ahead:
        here = ahead.popleft()
        if records[here].value is not None:
            way = [here]
            while came_from[way[-1]]:
                way.append(came_from[way[-1]])
            return way[::-1]
        for name in records[here].next:
            if name not in came_from:
                came_from[name] = here
                ahead.append(name)
    return list(came_from)
