"""`tools`: rows of a file, and Python functions or an MCP server to answer them with.

    user:   Which is cheaper, the red lamp or the blue one?
    model:  <tool_call>{"name": "price", "arguments": {"item": "red lamp"}}</tool_call>
            <tool_call>{"name": "price", "arguments": {"item": "blue lamp"}}</tool_call>
    tool:   24.5
    tool:   19
    model:  The blue one.

A reply with calls is answered with their results, one without is the final answer. Functions may share the state of a
trajectory: `state` makes it, or `tools` names a class, whose objects they are. What a call does wrong, and each limit that it
meets, the model reads as `error: ...`; whatever else a tool raises is a fault.

Rewards: what `score` makes of the state, or with `exact` the component `answer`, 1 for the reference or one of its aliases by
the rules of `exact_match`; else the recipe's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.rewards.answers import given_answer, gold_answers, same_answer
from polyturn.environments.rewards.view import TrajectoryView, TurnView
from polyturn.environments.tools.brought import Brought, Named, bring
from polyturn.environments.tools.calls import read_call
from polyturn.environments.tools.mcp import McpServer
from polyturn.environments.tools.toolbox import Errors, Limits, Toolbox
from polyturn.errors import DataError, EnvironmentSetupError, nearest
from polyturn.rendering.tool_calls import CALL_FORMATS, CallFormat, MalformedCall, ToolCall, ToolSpec, call_format
from polyturn.types import Message, Row, Split, Task, TaskSource

Announce = Literal["system", "template"]
DONE = "Done."
"""The last reply of a demonstration whose row has calls and no answer."""
_TAG = re.compile(r"[A-Za-z][\w-]*")


@dataclass(slots=True)
class State:
    """One trajectory: what its tools work on, and the answer given."""

    task: Task
    tools_state: Any
    given: str | None = None


class Tools(Environment):
    """Call Python functions, or the tools of an MCP server, to answer the rows of a file."""

    name: ClassVar[str] = "tools"
    reads_formats: ClassVar[bool] = True

    def __init__(
        self,
        *,
        tools: Named | Sequence[Named] = (),
        mcp: Mapping[str, Any] | None = None,
        state: Named | None = None,
        score: Named | None = None,
        exact: bool = False,
        need_answer: bool | None = None,
        answer_tag: str | None = None,
        system: str | None = None,
        tool_format: str = "hermes",
        announce: Announce = "system",
        errors: Errors = "raise",
        parallel: bool = False,
        call_deadline_s: float = 10.0,
        turn_deadline_s: float = 25.0,
        output_max_chars: int = 4000,
        max_calls_per_turn: int = 8,
    ) -> None:
        if announce not in get_args(Announce):
            hint = nearest(str(announce), get_args(Announce))
            raise EnvironmentSetupError(f"environment.args.announce={announce!r} is no choice; {hint}")
        if answer_tag is not None and not _TAG.fullmatch(answer_tag):
            raise EnvironmentSetupError(f"environment.args.answer_tag={answer_tag!r} is no tag; use letters, as in answer")
        if bool(tools) == bool(mcp):
            raise EnvironmentSetupError(
                "environment tools needs environment.args.tools, a list of package.module:function, or environment.args.mcp, "
                "a server, and takes one of the two"
            )
        if tool_format not in CALL_FORMATS:
            call_format(tool_format)  # raises
        self._tool_format = tool_format
        self._limits = Limits(
            call_deadline_s=call_deadline_s,
            turn_deadline_s=turn_deadline_s,
            output_max_chars=output_max_chars,
            max_calls_per_turn=max_calls_per_turn,
        )
        self._errors: Errors = errors
        self._parallel = parallel
        self._announce: Announce = announce
        self._mcp = None if mcp is None else McpServer(mcp)
        if self._mcp is not None and state is not None:
            raise EnvironmentSetupError("environment.args.state is for functions; the tools of an MCP server keep their own")
        self._brought: Brought = bring(tools, state, score)
        self._toolbox = None if self._mcp else self._made(self._brought.tools)
        if self._toolbox is not None:
            _ = self.calls  # raises for names that the format can't write
        self.exact = exact
        self.system = system
        self.answer_tag = answer_tag
        self.scores = exact or self._brought.score is not None
        if exact and self._brought.score is not None:
            raise EnvironmentSetupError("environment.args.exact and a score are two verdicts; keep one of them")
        self.needs_answer = need_answer if need_answer is not None else self._brought.score is None
        if exact and not self.needs_answer:
            raise EnvironmentSetupError("environment.args.exact compares with the row's answer; leave need_answer out")

    def _made(self, tools: Sequence[Any]) -> Toolbox:
        return Toolbox(tools, self._limits, errors=self._errors, parallel=self._parallel)

    @property
    def toolbox(self) -> Toolbox:
        """The tools. Those of an MCP server are asked for when they are first needed, as the opening messages name them."""
        if self._toolbox is None:
            assert self._mcp is not None, "functions are made into tools by the constructor"
            self._toolbox = self._made(self._mcp.tools())
        return self._toolbox

    @cached_property
    def calls(self) -> CallFormat:
        """How calls of these tools are written and read."""
        return call_format(self._tool_format, self.toolbox.specs)

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Raises EnvironmentSetupError: the tasks are rows."""
        raise EnvironmentSetupError(
            "environment tools takes its tasks from rows; set data.path (and data.eval_path) to a file in a built-in format, "
            "`polyturn data new FILE` writes one to start from"
        )

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """Raises DataError: rows come through `task_from_example`."""
        raise DataError("environment tools reads rows in a built-in format only")

    def task_from_example(self, row: Row) -> Task:
        """The row's messages, behind one that says what tools there are. Raises DataError for `calls` that can't be made."""
        task = super().task_from_example(row)
        _demonstrated(task, self.toolbox.specs)
        messages = task.messages
        own = messages[0].content if messages[0].role == "system" else self.system
        said = [own, self.calls.instructions(self.toolbox.specs) if self._announce == "system" else None, self._asked()]
        system = "\n\n".join(part for part in said if part)
        rest = messages[1:] if messages[0].role == "system" else messages
        opening = (Message(role="system", content=system), *rest) if system else rest
        return replace(task, messages=opening)

    def _asked(self) -> str | None:
        tag = self.answer_tag
        return None if tag is None else f"When you know the answer, reply without a call and give it as <{tag}>...</{tag}>."

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """All tools, when the chat template is to announce them."""
        return self.toolbox.specs if self._announce == "template" else ()

    # ── one run, one trajectory ────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Connect to the MCP server. Raises ResourceError where it can't be reached."""
        if self._mcp is not None:
            await self._mcp.start()

    async def stop(self) -> None:
        """End every connection, and the server where it was started from here."""
        if self._mcp is not None:
            await self._mcp.stop()

    async def setup(self, task: Task) -> State:
        """Make the state of the tools."""
        if self._mcp is not None:
            return State(task=task, tools_state=await self._mcp.current(None))
        return State(task=task, tools_state=await self._brought.state(task))

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Make the calls of a reply, or take it as the answer."""
        calls = self.calls.parse(reply.text, truncated=reply.truncated).calls
        if calls:
            if self._mcp is not None:
                state.tools_state = await self._mcp.current(state.tools_state)
            answered = await self.toolbox.answer(calls, state.tools_state)
            return StepResult(messages=_results(answered.texts), counts=answered.counts)
        if not reply.truncated or self.answer_tag is not None:
            view = TrajectoryView(task=state.task, turns=(TurnView(text=reply.text),))
            state.given = given_answer(view, tag=self.answer_tag)
        if state.given is None and self.answer_tag is not None:
            told = f"error: neither a call nor an answer; give the answer as <{self.answer_tag}>...</{self.answer_tag}>"
            return StepResult(messages=(Message(role="user", content=told),), counts={"no_answer": 1})
        return StepResult(done=True)

    async def rewards(self, state: State) -> Mapping[str, float | None]:
        """What `score` says of the state, `answer` with `exact`, else nothing."""
        if self.exact:
            golds = gold_answers(state.task)
            if not golds:
                raise DataError(f"task {state.task.id} has no answer to compare with; give the row one, or set exact=false")
            return {"answer": float(state.given is not None and any(same_answer(state.given, gold) for gold in golds))}
        return await self._brought.scored(state.tools_state, state.task, state.given)

    async def close(self, state: State) -> None:
        """Close the object whose methods the tools are, or the trajectory's connection."""
        if self._mcp is not None:
            await self._mcp.release(state.tools_state)
        else:
            await self._brought.end(state.tools_state)

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The row's calls, one a reply, then its answer. Raises DataError for a row with neither."""
        calls = [self.calls.write(call.name, call.arguments) for call in _demonstrated(task, self.toolbox.specs)]
        golds = gold_answers(task)
        if not golds and not calls:
            raise DataError(f"task {task.id} has no answer and no calls to demonstrate; give the row one of them")
        answer = golds[0] if golds else DONE
        return [*calls, answer if self.answer_tag is None else f"<{self.answer_tag}>{answer}</{self.answer_tag}>"]


def _results(texts: Sequence[str]) -> tuple[Message, ...]:
    return tuple(Message(role="tool", content=text) for text in texts)


def _demonstrated(task: Task, specs: Sequence[ToolSpec]) -> list[ToolCall]:
    """The row's `calls`. Raises DataError for what is no call of these tools."""
    given = task.info.get("calls") or ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise DataError("field 'calls' must be a list of {name, arguments}")
    calls = []
    for index, item in enumerate(given):
        name, arguments = (item.get("name"), item.get("arguments", {})) if isinstance(item, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise DataError(f"calls[{index}] must be an object with name and arguments")
        read = read_call(ToolCall(name=name, arguments=arguments), specs)
        if isinstance(read, MalformedCall):
            raise DataError(f"calls[{index}]: {read.problem}")
        calls.append(read)
    return calls
