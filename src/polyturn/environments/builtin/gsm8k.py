r"""`gsm8k`: grade-school word problems from rows of a file or data set, with or without a calculator.

    user:   Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?
    model:  <tool_call>{"name": "calculator", "arguments": {"expression": "48 + 48/2"}}</tool_call>
    tool:   48 + 48/2 = 72
    model:  She sold 48 + 24 = 72 clips.
            #### 72

A row has `question` and `answer`, whose last line is `#### NUMBER`. A reply answers with such a line or with `\boxed{NUMBER}`,
and numbers are compared as numbers. Without the tool a trajectory is one turn. With it, a reply that calls is answered with
the results, one that answers ends, and one that does neither is told so.

Rewards: `answer` is 1 for the right number. With `format_reward`, `format` pays that much for an answer in the form asked for,
right or wrong. With `turn_reward`, a turn whose calls compute something new is paid that much.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.rewards.numbers import boxed, last_number, read_number, same_number
from polyturn.environments.rewards.plain import plain
from polyturn.environments.tools.calculator import MAX_LENGTH, CalculatorError, calculate
from polyturn.errors import DataError, EnvironmentSetupError, nearest
from polyturn.processes.threads import in_thread
from polyturn.rendering.tool_calls import CALL_FORMATS, MalformedCall, ToolCall, ToolSpec, call_format
from polyturn.types import Message, Split, Task, TaskSource

_log = logging.getLogger(__name__)

Tool = Literal["none", "calculator"]
MARK = "####"
MAX_ANSWER = 200
"""Characters of an answer that are looked at."""
MAX_CALLS = 8
"""Calls of one reply that are run; the others are not."""

_ANSWER_FORMAT = f"End with the answer alone on the last line, as {MARK} NUMBER."
INSTRUCTIONS: Mapping[Tool, str] = {
    "none": f"Solve the problem step by step. {_ANSWER_FORMAT}",
    "calculator": (
        "Solve the problem step by step. You have a calculator. To use it, reply with a call like\n"
        "CALL\n"
        "and wait for its result. It knows + - * / // % ** and brackets. When you know the answer, don't call. "
        f"{_ANSWER_FORMAT}"
    ),
}
"""CALL stands for an example in the format of the calls."""
CALCULATOR = ToolSpec(
    name="calculator",
    description="Computes an expression of + - * / // % ** and brackets.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
EXAMPLES: tuple[tuple[str, str, str], ...] = (
    (
        "A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are left?",
        "6 * 12 - 50",
        f"The baker makes 6 * 12 = 72 rolls. 72 - 50 = 22 rolls are left.\n{MARK} 22",
    ),
    (
        "Tom earns $15 an hour. He works 8 hours a day for 5 days. How much does he earn?",
        "15 * 8 * 5",
        f"Tom works 8 * 5 = 40 hours. He earns 15 * 40 = $600.\n{MARK} 600",
    ),
)
"""Question, calculation and solution of the worked examples that `examples` shows. Written for this."""

_ANNOTATION = re.compile(r"<<([^<>]*?)=([^<>=]*)>>")
_MARKED = re.compile(rf"^[^\S\n*]*\**{MARK}[^\S\n]*([^\n#]*)", re.MULTILINE)
_NUMERIC = re.compile(r"\W*(?:\w+\s*=)?\W*(?:\d|sqrt|pi\b)")
"""How an answer starts; `#### Step 1` is a heading."""
_AMBIGUOUS = re.compile(r"\d,\d")


@dataclass(slots=True)
class State:
    """One trajectory: what the calculator said, in order, and the answer given."""

    expected: str
    results: dict[str, str] = field(default_factory=dict)
    given: str | None = None
    marked: bool = False

    def key(self) -> str:
        """Equal for equal results, whatever order they came in."""
        return "; ".join(sorted(f"{expression}={result}" for expression, result in self.results.items()))


class Gsm8k(Environment):
    """Solve a word problem and give its number, with or without a calculator."""

    name: ClassVar[str] = "gsm8k"
    names_states: ClassVar[bool] = True

    def __init__(
        self,
        *,
        tool: Tool = "none",
        turn_reward: float = 0.0,
        format_reward: float = 0.0,
        accept_unmarked: bool = False,
        examples: int = 0,
        instructions: bool = True,
        tool_format: str = "hermes",
    ) -> None:
        if tool not in get_args(Tool):
            raise EnvironmentSetupError(
                f"environment.args.tool={tool!r} is no tool of gsm8k; {nearest(str(tool), get_args(Tool))}"
            )
        if not 0 <= format_reward < 1:
            raise EnvironmentSetupError(
                f"environment.args.format_reward={format_reward} must be less than the 1 of a right answer; use 0 to 0.9"
            )
        if not 0 <= turn_reward < float("inf"):
            raise EnvironmentSetupError(f"environment.args.turn_reward={turn_reward} is no reward; use 0 or a little more")
        if turn_reward and tool == "none":
            raise EnvironmentSetupError(
                f"environment.args.turn_reward={turn_reward} pays calls, and there are none with tool=none; use tool=calculator"
            )
        if not 0 <= examples <= len(EXAMPLES):
            raise EnvironmentSetupError(
                f"environment.args.examples={examples} is out of range; use 0 to {len(EXAMPLES)} worked examples"
            )
        if tool_format not in CALL_FORMATS:
            raise EnvironmentSetupError(
                f"environment.args.tool_format={tool_format!r} is no format of calls; {nearest(str(tool_format), CALL_FORMATS)}"
            )
        self.tool: Tool = tool
        self.calls = call_format(tool_format, [CALCULATOR])
        self.turn_reward = turn_reward
        self.format_reward = format_reward
        self.accept_unmarked = accept_unmarked
        self.examples = examples
        self.instructions = instructions

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Raises EnvironmentSetupError: the problems come from rows."""
        raise EnvironmentSetupError(
            "environment gsm8k takes its problems from rows; set data.path (and data.eval_path) to a JSONL file with question "
            "and answer, or to hf:openai/gsm8k:main; `polyturn env check gsm8k` takes --data"
        )

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """From `{"question": text, "answer": "worked steps #### NUMBER"}`."""
        for key in ("question", "answer"):
            value = row.get(key)
            if value is None:
                fields = f"this row has {', '.join(sorted(map(str, row))) or 'no fields'}"
                raise DataError(f"field {key!r} is missing; a gsm8k row needs question and answer, and {fields}")
            if not isinstance(value, str) or not value.strip():
                found = "empty" if isinstance(value, str) else f"a {type(value).__name__}"
                raise DataError(f"field {key!r} is {found}; a gsm8k row needs text there")
        steps, mark, final = row["answer"].rpartition(MARK)
        final = final.strip()
        if not mark:
            raise DataError(f"field 'answer' has no {MARK}; its last line must be {MARK} NUMBER")
        number = read_number(final)
        if number is None:
            shown = f"{final[:40]!r} after {MARK} is no number" if final else f"nothing follows {MARK}"
            raise DataError(f"field 'answer': {shown}; its last line must be {MARK} NUMBER")
        if _AMBIGUOUS.search(final) and "," in final and number == read_number(final.replace(",", ".")):
            _log.warning("%s: %r could mean two numbers; its comma is read as a decimal comma", task_id, final)
        system = [Message(role="system", content=self._instructions())] if self.instructions else []
        question = Message(role="user", content=row["question"].strip())
        return Task(
            id=task_id,
            environment=self.name,
            messages=(*system, *self._shown_examples(), question),
            answer=final,
            info={"steps": steps.strip()},
        )

    def _instructions(self) -> str:
        return INSTRUCTIONS[self.tool].replace("CALL", self.calls.write("calculator", {"expression": "3 * (4 + 5)"}))

    def _shown_examples(self) -> list[Message]:
        """Worked examples as earlier turns of the conversation."""
        messages = []
        for question, expression, solution in EXAMPLES[: self.examples]:
            messages.append(Message(role="user", content=question))
            if self.tool == "calculator":
                call = self.calls.write("calculator", {"expression": expression})
                messages.append(Message(role="assistant", content=call))
                messages.append(Message(role="tool", content=f"{expression} = {calculate(expression)}"))
            messages.append(Message(role="assistant", content=solution))
        return messages

    # ── one trajectory ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def setup(self, task: Task) -> State:
        """Nothing is computed yet."""
        if task.answer is None:
            raise DataError(f"task {task.id} has no answer; gsm8k scores the answer against it")
        return State(expected=task.answer)

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Run the calls of a reply, or take its answer. A malformed call gets an error and counts; it ends nothing."""
        key = state.key()
        if self.tool == "calculator":
            calls = self.calls.parse(reply.text, truncated=reply.truncated).calls
            if calls:
                return self._run(state, calls, key)
        state.given, state.marked = self._answer(reply)
        if state.given is not None or self.tool == "none":
            return StepResult(done=True, state_key=key, counts={} if state.marked else {"unmarked_answer": 1})
        told = f"error: neither a call of the calculator nor an answer; give the answer as {MARK} NUMBER"
        return StepResult(messages=(Message(role="user", content=told),), state_key=key, counts={"malformed": 1})

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`answer`, and `format` where it is paid."""
        # In a thread: with the extra `math` a question may take its seconds, and nobody else should wait for it.
        right = state.given is not None and await in_thread(same_number, state.given, state.expected)
        components = {"answer": float(right)}
        if self.format_reward:
            components["format"] = self.format_reward * state.marked
        return components

    def _run(self, state: State, calls: Sequence[ToolCall | MalformedCall], key: str) -> StepResult:
        messages, counts, reward = [], dict.fromkeys(("calls", "malformed", "calculator_error"), 0.0), 0.0
        for call in calls[:MAX_CALLS]:
            counts["calls"] += 1
            expression = _expression(call)
            if isinstance(expression, MalformedCall):
                counts["malformed"] += 1
                messages.append(f"error: {expression.problem}")
                continue
            try:
                result = calculate(expression)
            except CalculatorError as error:
                counts["calculator_error"] += 1
                messages.append(f"{_short(expression)}: error: {error}")
                continue
            messages.append(f"{_short(expression)} = {result}")
            bare = "".join(expression.split())
            if bare not in (result, *state.results):
                reward = self.turn_reward  # once a turn: many small calls must not be worth more than the answer
            state.results[bare] = result
        if len(calls) > MAX_CALLS:
            messages.append(f"error: only the first {MAX_CALLS} calls of a reply are run")
        replies = tuple(Message(role="tool", content=content) for content in messages)
        return StepResult(messages=replies, reward=reward, state_key=key, counts={k: n for k, n in counts.items() if n})

    def _answer(self, reply: Reply) -> tuple[str | None, bool]:
        """The answer in a reply and whether it was given in the form asked for. What a limit cut off is no answer."""
        text = reply.text
        whole = text[: text.rfind("\n") + 1] if reply.truncated else text
        found = [match[1].strip() for match in _MARKED.finditer(whole)] or [boxed(text) or ""]
        given = [answer for answer in found if _NUMERIC.match(plain(answer[:MAX_ANSWER]))]
        if given:
            return given[-1], read_number(given[-1]) is not None
        return (last_number(text) if self.accept_unmarked and not reply.truncated else None), False

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The row's own steps and answer; with the tool, one of its calculations first."""
        return self._replies(task, 0)

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """As gold, with any one of the row's calculations."""
        return self._replies(task, rng.randrange(2**16))

    def _replies(self, task: Task, choice: int) -> list[str]:
        steps = str(task.info.get("steps", ""))
        solution = f"{_ANNOTATION.sub('', steps)}\n{MARK} {task.answer}".lstrip()
        sums = [expression for expression, result in _ANNOTATION.findall(steps) if _computes(expression, result)]
        if self.tool == "none" or not sums:
            return [solution]
        return [self.calls.write("calculator", {"expression": sums[choice % len(sums)].strip()}), solution]


def _expression(call: ToolCall | MalformedCall) -> str | MalformedCall:
    """The expression that a call asks for, or what is wrong with the call."""
    if isinstance(call, MalformedCall):
        return call
    if call.name != "calculator":
        return MalformedCall(problem=f"there is no tool {call.name[:40]!r}; the tool is calculator")
    expression = call.arguments.get("expression")
    if not isinstance(expression, str):
        return MalformedCall(problem="calculator needs the argument expression, a text such as '3 * (4 + 5)'")
    return expression


def _short(expression: str) -> str:
    line = " ".join(expression.split())
    return line if len(line) <= MAX_LENGTH else f"{line[:40]}..."


def _computes(expression: str, result: str) -> bool:
    """Whether the calculator agrees with a row's own calculation."""
    try:
        return same_number(calculate(expression), result)
    except CalculatorError:
        return False
