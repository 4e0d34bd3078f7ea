"""What a reply asks of `python_code`: calls of its tools, or a program to submit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from polyturn.environments.base import Reply
from polyturn.environments.code.problems import Problem
from polyturn.programs import fenced_blocks, program_in
from polyturn.rendering.tool_calls import MalformedCall, call_format

ToolFormat: TypeAlias = Literal["hermes", "fenced"]
Tool: TypeAlias = Literal["run_python", "run_tests"]
_CUT_OFF = "the reply was cut off at its limit of tokens, so that its program is not whole; write a shorter one"
_SENTINEL = "\n\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCall:
    """A call that can be made."""

    tool: Tool
    code: str
    stdin: str = ""


def calls_in(reply: Reply, tool_format: ToolFormat, problem: Problem) -> list[CodeCall | MalformedCall]:
    """The calls of a reply. With `fenced`, a program is one: in a fence, or bare if it defines what the tests ask for."""
    if tool_format == "hermes":
        found = call_format(tool_format).parse(reply.text, truncated=reply.truncated).calls
        return [call if isinstance(call, MalformedCall) else _checked(call.name, dict(call.arguments)) for call in found]
    program = program_in(reply.text)
    if program.dress == "empty_fence":
        return [MalformedCall(problem="the code block is empty")]
    if program.dress == "none" or (program.dress == "bare" and not problem.defined_by(program.code)):
        return []
    if reply.truncated and (program.dress == "bare" or _is_open(reply.text)):
        return [MalformedCall(problem=_CUT_OFF)]
    return [CodeCall(tool="run_tests", code=program.code)]


def submitted(reply: Reply, problem: Problem, *, tested: bool) -> str | MalformedCall | None:
    """The program that a reply without calls submits; None leaves it to the program tested last.

    A reply of many words may hold pieces of code. Once something was tested, only code that defines what the tests ask for
    takes its place.
    """
    program = program_in(reply.text)
    if program.code and (not tested or problem.defined_by(program.code) or (not problem.names and program.dress == "fence")):
        if reply.truncated and (program.dress == "bare" or _is_open(reply.text)):
            return MalformedCall(problem=_CUT_OFF)
        return program.code
    return MalformedCall(problem=_CUT_OFF) if reply.truncated else None


def call_text(tool: Tool, code: str, tool_format: ToolFormat) -> str:
    """A call as `calls_in` reads it."""
    return call_format(tool_format).write(tool, {"code": code}) if tool_format == "hermes" else fenced(code)


def fenced(code: str) -> str:
    r"""A program in a fence, longer than any run of backticks in it.

    >>> fenced("x = 1")
    '```python\\nx = 1\\n```'
    """
    marks = "```"
    while marks in code:
        marks += "`"
    return f"{marks}python\n{code.rstrip()}\n{marks}"


def _checked(name: str, arguments: dict[str, object]) -> CodeCall | MalformedCall:
    if name not in ("run_python", "run_tests"):
        return MalformedCall(problem=f"there is no tool {name[:40]!r}; the tools are run_python and run_tests")
    code, stdin = arguments.get("code"), arguments.get("stdin", "")
    if not isinstance(code, str) or not code.strip():
        return MalformedCall(problem=f"{name} needs the argument code, the text of a program")
    if not isinstance(stdin, str):
        return MalformedCall(problem="the argument stdin must be a text")
    code = program_in(code).code or code  # a fence within the argument
    return CodeCall(tool="run_python" if name == "run_python" else "run_tests", code=code, stdin=stdin)


def _is_open(text: str) -> bool:
    """Whether the last fence of a text is never closed."""
    blocks = fenced_blocks(text + _SENTINEL)
    return bool(blocks) and blocks[-1][1].endswith("\0")
