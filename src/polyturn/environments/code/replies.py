"""What a reply asks of `python_code`: calls of its tools, or a program to submit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from polyturn.environments.base import Reply
from polyturn.environments.code.problems import Problem
from polyturn.environments.tools.calls import read_call
from polyturn.programs import fenced_blocks, program_in
from polyturn.rendering.tool_calls import MalformedCall, ToolCall, ToolSpec, call_format

FENCED = "fenced"
"""The format in which a block of code is a call of run_tests. The others are those of `rendering.tool_calls`."""
Tool: TypeAlias = Literal["run_python", "run_tests"]
_CUT_OFF = "the reply was cut off at its limit of tokens, so that its program is not whole; write a shorter one"
_SENTINEL = "\n\0"
_CODE = {"type": "string", "description": "the whole program"}
TOOLS = (
    ToolSpec(
        name="run_tests",
        description="Tests a program and shows which public tests it passes.",
        parameters={"type": "object", "properties": {"code": _CODE}, "required": ["code"]},
    ),
    ToolSpec(
        name="run_python",
        description="Runs a program and shows what it prints.",
        parameters={
            "type": "object",
            "properties": {"code": _CODE, "stdin": {"type": "string", "description": "what it reads"}},
            "required": ["code"],
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCall:
    """A call that can be made."""

    tool: Tool
    code: str
    stdin: str = ""


def calls_in(reply: Reply, tool_format: str, problem: Problem) -> list[CodeCall | MalformedCall]:
    """The calls of a reply. With `fenced`, a program is one: in a fence, or bare if it defines what the tests ask for."""
    if tool_format != FENCED:
        found = call_format(tool_format, TOOLS).parse(reply.text, truncated=reply.truncated).calls
        return [_checked(read_call(call, TOOLS)) for call in found]
    program = program_in(_closed(reply.text) if reply.truncated else reply.text)
    if reply.truncated and program.dress != "fence":
        return [MalformedCall(problem=_CUT_OFF)]
    if program.dress == "empty_fence":
        return [MalformedCall(problem="the code block is empty")]
    if program.dress == "none" or (program.dress == "bare" and not _is_whole(program.code, problem)):
        return []
    return [CodeCall(tool="run_tests", code=program.code)]


def submitted(reply: Reply, problem: Problem, *, tested: bool) -> str | MalformedCall | None:
    """The program that a reply without calls submits; None leaves it to the program tested last.

    Words may pass for code (`Done`), and hold pieces of it. So code that does not define what the tests ask for counts only in
    a fence, and only while nothing was tested.
    """
    program = program_in(_closed(reply.text) if reply.truncated else reply.text)
    whole = _is_whole(program.code, problem) and not (reply.truncated and program.dress == "bare")
    if program.code and (whole or (program.dress == "fence" and not (tested and problem.names))):
        return program.code
    return MalformedCall(problem=_CUT_OFF) if reply.truncated else None


def call_text(tool: Tool, code: str, tool_format: str) -> str:
    """A call as `calls_in` reads it."""
    return fenced(code) if tool_format == FENCED else call_format(tool_format, TOOLS).write(tool, {"code": code})


def fenced(code: str) -> str:
    r"""A program in a fence, longer than any run of backticks in it.

    >>> fenced("x = 1")
    '```python\nx = 1\n```'
    """
    marks = "```"
    while marks in code:
        marks += "`"
    return f"{marks}python\n{code.rstrip()}\n{marks}"


def _checked(call: ToolCall | MalformedCall) -> CodeCall | MalformedCall:
    if isinstance(call, MalformedCall):
        return call
    given = str(call.arguments["code"])
    code = program_in(given).code or given  # there may be a fence within the argument
    if not code.strip():
        return MalformedCall(problem=f"the argument code of {call.name} is empty")
    tool: Tool = "run_python" if call.name == "run_python" else "run_tests"
    return CodeCall(tool=tool, code=code, stdin=str(call.arguments.get("stdin", "")))


def _is_whole(code: str, problem: Problem) -> bool:
    """Whether code, or what it becomes, defines what the tests ask for; False where that isn't known."""
    return problem.defined_by(problem.program(code).text)


def _closed(text: str) -> str:
    """A text without the fence that is open at its end, so that what a limit cut off is not taken for a whole program."""
    lines = text.split("\n")
    while lines and (blocks := fenced_blocks("\n".join(lines) + _SENTINEL)) and blocks[-1][1].endswith("\0"):
        # The fence was opened on one of these lines, and nothing after it closed it.
        lines = lines[: -(blocks[-1][1].count("\n") + 1)]
    return "\n".join(lines)
