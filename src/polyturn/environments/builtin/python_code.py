r"""`python_code`: write a program that passes tests, at once or by repairing it.

    user:   Write a function to add two numbers.       The program must define `add(a, b)`.
    model:  <tool_call>{"name": "run_tests", "arguments": {"code": "def add(a, b): return a - b"}}</tool_call>
    tool:   0 of 1 public tests pass.
            test 1 failed: assert add(1, 2) == 3
    model:  <tool_call>{"name": "run_tests", "arguments": {"code": "def add(a, b): return a + b"}}</tool_call>
    tool:   1 of 1 public tests pass.
    model:  This is my answer.                         submits the program tested last; a program here would take its place

Rows are those of HumanEval, of MBPP, or of a built-in format with `tests` or `test_cases`. In mode `single` the first reply
holds the program. In mode `multi` the model may test up to `max_attempts` programs on the first `public_tests` tests; the end
is scored by all tests, and the others stay hidden.

Rewards: `tests` is 1 when every test passes, or with `reward: share` the share that does, to the `power`. `turn_reward` pays,
in proportion, for a larger share of public tests than any program before had. Whatever a program does to itself is scored; a
sandbox that breaks is a fault.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from polyturn.environments.base import Environment, Reply, StepResult, Vocabulary
from polyturn.environments.code import generated, rows
from polyturn.environments.code.feedback import Feedback
from polyturn.environments.code.judging import Judge
from polyturn.environments.code.problems import Problem
from polyturn.environments.code.replies import TOOLS, CodeCall, call_text, calls_in, fenced, submitted
from polyturn.errors import DataError, EnvironmentSetupError, nearest
from polyturn.programs import program_in, syntax_problem
from polyturn.rendering.tool_calls import CALL_FORMATS, MalformedCall, call_format
from polyturn.sandbox.base import MIB, Limits, Sandbox
from polyturn.types import Message, Row, Split, Task, TaskSource

Mode = Literal["single", "multi"]
RewardRule = Literal["all", "share"]
FeedbackKind = Literal["full", "brief"]
MAX_CALLS = 4
"""Calls of one reply that are made; the others are not."""
SUBMIT = "This is my answer."


@dataclass(slots=True)
class State:
    """One trajectory: what was tried, the program that counts so far, and the verdict on it once there is one."""

    problem: Problem
    program: str | None = None
    best: float = 0.0
    attempts: int = 0
    tried: set[str] = field(default_factory=set)
    passed: tuple[bool, ...] | None = None

    def key(self) -> str:
        """Equal for equal knowledge: the same programs tried, in whatever order, and as many attempts left."""
        digests = sorted(hashlib.blake2b(program.encode(errors="replace"), digest_size=8).hexdigest() for program in self.tried)
        return f"{self.attempts}:{','.join(digests)}"


class PythonCode(Environment):
    """Write a program that passes tests.

    `sandbox` runs it, and is the caller's to start and stop.
    """

    name: ClassVar[str] = "python_code"
    names_states: ClassVar[bool] = True
    reads_formats: ClassVar[bool] = True
    needs_answer = False

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        mode: Mode = "multi",
        tool_format: str = "hermes",
        max_attempts: int = 4,
        public_tests: int = 1,
        show_tests: int = 0,
        reward: RewardRule = "all",
        power: float = 1.0,
        turn_reward: float = 0.0,
        feedback: FeedbackKind = "full",
        output_max_chars: int = 1000,
        wall_s: float | None = None,
        memory_mib: int | None = None,
        instructions: bool = True,
        tasks: str | None = None,
        remember: int = 4096,
    ) -> None:
        _one_of("mode", mode, get_args(Mode))
        _one_of("tool_format", tool_format, CALL_FORMATS)
        _one_of("reward", reward, get_args(RewardRule))
        _one_of("feedback", feedback, get_args(FeedbackKind))
        for name, value, least in (
            ("max_attempts", max_attempts, 1),
            ("public_tests", public_tests, 0),
            ("show_tests", show_tests, 0),
            ("output_max_chars", output_max_chars, 40),
            ("remember", remember, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise EnvironmentSetupError(f"environment.args.{name}={value!r} must be a whole number, {least} or more")
        for name, number, allowed in (("power", power, power > 0), ("turn_reward", turn_reward, turn_reward >= 0)):
            if not allowed or not math.isfinite(number):
                raise EnvironmentSetupError(f"environment.args.{name}={number} is out of range; leave it out for the default")
        if turn_reward and mode == "single":
            raise EnvironmentSetupError(
                f"environment.args.turn_reward={turn_reward} pays tested programs, and mode=single tests none; use mode=multi"
            )
        if power != 1 and reward == "all":
            raise EnvironmentSetupError(
                f"environment.args.power={power} bends a share, and reward=all pays none; use reward=share"
            )
        if tasks not in (None, generated.NAME):
            raise EnvironmentSetupError(
                f"environment.args.tasks={tasks!r} is unknown; use {generated.NAME}, or leave it out and set data.path"
            )
        self.mode: Mode = mode
        self.tool_format = tool_format
        self.max_attempts = max_attempts
        self.public_tests = max(public_tests, show_tests)
        self.show_tests = show_tests
        self.reward: RewardRule = reward
        self.power = power
        self.turn_reward = turn_reward
        self.feedback = Feedback(max_chars=output_max_chars, brief=feedback == "brief")
        self.instructions = instructions
        self.generated = tasks
        self._judge = Judge(sandbox, _limits(wall_s, memory_mib), remember)

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Those that are made here, with `tasks`. Raises EnvironmentSetupError without: the problems come from rows."""
        if self.generated is None:
            raise EnvironmentSetupError(
                "environment python_code takes its problems from rows; set data.path (and data.eval_path) to a file of "
                "HumanEval, of MBPP, or in a built-in format with tests"
            )
        return generated.source(split, seed, self._task)

    def knows_row(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row is one of HumanEval or MBPP; others come in built-in formats."""
        return rows.is_humaneval(fields) or rows.is_mbpp(fields)

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """From a row of HumanEval or MBPP."""
        if rows.is_humaneval(row):
            return self._task(rows.humaneval(row), task_id)
        if rows.is_mbpp(row):
            return self._task(rows.mbpp(row), task_id)
        raise DataError(
            "the row is neither of HumanEval (prompt, entry_point, test) nor of MBPP (prompt, code, test_list), "
            f"and has {', '.join(sorted(map(str, row))) or 'no fields'}"
        )

    def task_from_example(self, row: Row) -> Task:
        """From a row in a built-in format with `tests` or `test_cases`."""
        return self._task(rows.built_in(row), row.where)

    def _task(self, row: rows.CodeRow, task_id: str) -> Task:
        messages = list(row.messages)
        if self.instructions:
            own = messages.pop(0).content if messages[0].role == "system" else ""
            told = f"{own}\n\n{self._instructions()}" if own else self._instructions()
            messages.insert(0, Message(role="system", content=told))
        shown = row.problem.cases[: min(self.show_tests, row.problem.most_public)]
        if shown:
            tests = "\n".join(map(rows.shown_case, shown))
            asked = f"{messages[-1].content}\n\nIt must pass tests such as\n{fenced(tests)}"
            messages[-1] = Message(role=messages[-1].role, content=asked)
        return Task(
            id=task_id,
            environment=self.name,
            messages=tuple(messages),
            answer=row.reference,
            info=row.problem.info(),
        )

    def _instructions(self) -> str:
        base = "Write a Python program that solves the task, with nothing but the standard library."
        if self.mode == "single":
            return f"{base} Reply with the whole program in one block:\n```python\n...\n```"
        end = (
            f"You have {self.max_attempts} attempts. The program must pass other tests, too. When you are done, reply in words "
            "without a call: the program you tested last is your answer."
        )
        if self.tool_format == "fenced":
            return f"{base} Reply with the whole program in one block:\n```python\n...\n```\nand wait: it is tested. {end}"
        return f"{base}\n\n{call_format(self.tool_format, TOOLS).instructions(TOOLS)}\n\n{end}"

    # ── one trajectory ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def setup(self, task: Task) -> State:
        """Nothing tried yet."""
        return State(problem=Problem.of(task))

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Make the calls of a reply, or end with its program. A malformed call gets an error and counts; it ends nothing."""
        key, counts = state.key(), _Counts()
        if self.mode == "single":
            code = program_in(reply.text).code
            if not code:
                counts.add("no_program")
            await self._submit(state, code or None, counts)
            return StepResult(done=True, state_key=key, counts=counts.found)
        calls = calls_in(reply, self.tool_format, state.problem)
        if calls:
            return await self._make(state, calls, key, counts)
        final = submitted(reply, state.problem, tested=state.program is not None)
        if isinstance(final, MalformedCall) or (final is None and state.program is None):
            counts.add("malformed")
            told = "neither a call nor a program" if final is None else final.problem
            if final is None:
                counts.add("no_program")
            error = Message(role="user", content="error" if self.feedback.brief else f"error: {told}")
            return StepResult(messages=(error,), state_key=key, counts=counts.found)
        await self._submit(state, final, counts)
        return StepResult(done=True, state_key=key, counts=counts.found)

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`tests`, of the program submitted or else tested last; 0 where there is none."""
        if state.passed is None:
            await self._submit(state, None, _Counts())
        passed = state.passed or ()
        share = sum(passed) / len(passed) if passed else 0.0
        return {"tests": float(share == 1) if self.reward == "all" else share**self.power}

    async def _make(self, state: State, calls: Sequence[CodeCall | MalformedCall], key: str, counts: _Counts) -> StepResult:
        texts, before = [], state.best
        for call in calls[:MAX_CALLS]:
            if isinstance(call, MalformedCall):
                counts.add("malformed")
                texts.append("error" if self.feedback.brief else f"error: {call.problem}")
            elif call.tool == "run_tests" and state.attempts >= self.max_attempts:
                texts.append(f"error: there are no more than {self.max_attempts} attempts")
            else:
                texts.append(await self._call(state, call, counts))
        if len(calls) > MAX_CALLS:
            texts.append(f"error: only the first {MAX_CALLS} calls of a reply are made")
        done = state.attempts >= self.max_attempts
        if done:
            await self._submit(state, None, counts)
        return StepResult(
            messages=tuple(Message(role="tool", content=text) for text in texts),
            reward=self.turn_reward * (state.best - before),
            done=done,
            state_key=key,
            counts=counts.found,
        )

    async def _call(self, state: State, call: CodeCall, counts: _Counts) -> str:
        """What a call comes to, in words."""
        source = state.problem.program(call.code)
        state.tried.add(f"{call.tool} {call.stdin} {source.text}")
        if call.tool == "run_tests":
            state.attempts += 1
            state.program = source.text
        wrong = syntax_problem(source.text)
        if wrong is not None:
            counts.add("syntax_error")
            return "error" if self.feedback.brief else f"error: the program is not valid Python: {wrong}"
        counts.add("runs")
        if call.tool == "run_python":
            result = await self._judge.run(source.text, call.stdin)
            counts.add("timeouts", result.reason == "timeout")
            return self.feedback.ran(result, source.shift)
        public = state.problem.cases[: min(self.public_tests, state.problem.most_public)]
        if not public:
            result = await self._judge.run(source.text)
            counts.add("timeouts", result.reason == "timeout")
            return f"There are no public tests. {self.feedback.ran(result, source.shift)}"
        verdict = await self._judge.verdict(source.text, state.problem.tests(len(public)))
        counts.add("timeouts", any(outcome.status == "timeout" for outcome in verdict.outcomes))
        state.best = max(state.best, verdict.passed / verdict.total)
        return self.feedback.tested(verdict, public, source.shift)

    async def _submit(self, state: State, code: str | None, counts: _Counts) -> None:
        """Judge `code`, or the program tested last, by all tests."""
        if code is not None:
            state.program = state.problem.program(code).text
            if syntax_problem(state.program) is not None:
                counts.add("syntax_error")
        state.passed = ()
        if state.program is None or syntax_problem(state.program) is not None:
            return
        state.passed = None  # as long as there is no verdict; the sandbox may break
        counts.add("runs")
        verdict = await self._judge.verdict(state.program, state.problem.tests())
        counts.add("timeouts", any(outcome.status == "timeout" for outcome in verdict.outcomes))
        state.passed = tuple(outcome.status == "passed" for outcome in verdict.outcomes)

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The reference; in mode `multi` it is tested, then submitted. Raises DataError for a row without one."""
        if task.answer is None:
            raise DataError(f"task {task.id} has no reference program, so nothing is known to pass its tests")
        if self.generated:
            return [task.answer, generated.SUBMIT] if self.mode == "multi" and self.max_attempts > 1 else [task.answer]
        if self.mode == "single":
            return [fenced(task.answer)]
        return [call_text("run_tests", task.answer, self.tool_format), *([SUBMIT] if self.max_attempts > 1 else [])]

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """Of tasks made here, guesses that are given up early (see `code.generated`); else as gold."""
        if self.generated and self.mode == "multi":
            return generated.demonstration(task, rng, self.max_attempts)
        return self.gold(task)

    def vocabulary(self) -> Vocabulary:
        """Of tasks made here. Raises EnvironmentSetupError where the text is open."""
        if self.generated is None:
            return super().vocabulary()
        if self.instructions or not self.feedback.brief or self.tool_format != "fenced":
            raise EnvironmentSetupError(
                "builtin:tiny knows few words; set environment.args.instructions=false, feedback=brief and tool_format=fenced"
            )
        return generated.vocabulary(self.public_tests)


class _Counts:
    """What is counted in a turn."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def add(self, name: str, happened: bool = True) -> None:
        if happened:
            self.found[name] = self.found.get(name, 0.0) + 1.0


def _limits(wall_s: float | None, memory_mib: int | None) -> Limits | None:
    """Limits of one program, or those of the sandbox. Raises ConfigError for limits that make no sense."""
    if wall_s is None and memory_mib is None:
        return None
    defaults = Limits()
    wall_s = defaults.wall_s if wall_s is None else wall_s
    memory = defaults.memory_bytes if memory_mib is None else memory_mib * MIB
    return Limits(wall_s=wall_s, cpu_s=max(1.0, wall_s), memory_bytes=memory)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise EnvironmentSetupError(f"environment.args.{name}={value!r} is unknown; {nearest(str(value), allowed)}")
