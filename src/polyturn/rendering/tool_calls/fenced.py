r"""`fenced`: code blocks. A Python block is a call of the code tool, a JSON block with name and arguments one of that tool.

    ```python
    print(3 * (4 + 5))
    ```

    ```json
    {"name": "look", "arguments": {"at": "x"}}
    ```

The code tool is the first of the specs with an argument `code`, and `python` where there are no specs. Other blocks are text.
What a fence is, `polyturn.programs` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polyturn.programs import fenced_blocks
from polyturn.rendering.tool_calls.bare import is_call, meant
from polyturn.rendering.tool_calls.base import Call, MalformedCall, ParsedReply, ToolCall, ToolSpec
from polyturn.rendering.tool_calls.json_text import JsonProblem, call_of, read_text, write_value
from polyturn.rendering.tool_calls.prompts import example_arguments, properties, told
from polyturn.rendering.tool_calls.source import Source, SourceReader, Steps, Tags, parsed
from polyturn.rendering.tool_calls.tagged import cut_off
from polyturn.types import Json

CODE = "code"
PYTHON_TAGS = frozenset(("python", "py", "python3", "py3"))
_BREAK = Tags("\n")
_MARKS = re.compile(r"[ \t]*(`{3,}|~{3,})")


class Fenced:
    """See the top of the module."""

    name = "fenced"
    separator = "\n"

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        tools = [spec.name for spec in specs if CODE in properties(spec)] if specs else ["python"]
        self._code_tool = tools[0] if tools else None

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """See `CallFormat.parse`."""
        return parsed(self.reader(), reply, truncated)

    def reader(self) -> SourceReader:
        """See `CallFormat.reader`."""
        return SourceReader(self._read)

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """See `CallFormat.write`."""
        code = arguments.get(CODE)
        if name != self._code_tool or set(arguments) != {CODE} or not isinstance(code, str) or not code.strip():
            return f"```json\n{write_value({'name': name, 'arguments': arguments})}\n```"
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", code)), 3)
        return f"{fence}python\n{code}\n{fence}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """See `CallFormat.instructions`."""
        if not specs:
            return ""
        ways = []
        if any(spec.name == self._code_tool for spec in specs):
            ways.append(f"To call {self._code_tool}, write a Python code block, which is its argument {CODE}:")
            ways.append(self.write(str(self._code_tool), {CODE: "print(3 * (4 + 5))"}))
        others = [spec for spec in specs if spec.name != self._code_tool]
        if others:
            ways.append(f"To call {'another' if ways else 'one'}, write a JSON code block with its name and arguments:")
            ways.append(self.write(others[0].name, example_arguments(others[0])))
        return told(specs, "\n".join(ways[:-1]), ways[-1])

    def _read(self, source: Source) -> Steps[None]:
        position = at = 0
        while True:
            end = yield from _line_end(source, at)
            if _MARKS.match(source.text, at, end) and fenced_blocks(source.text[at:end]):
                stop, closed = yield from _block_end(source, at, end)
                call = self._call(source.text[at:stop], cut=source.truncated and not closed)
                if call is not None:
                    source.say(position, at)
                    source.calls.append(call)
                    position = stop
                end = stop
            if end == len(source.text):
                break
            at = end + 1
        source.say(position, len(source.text))

    def _call(self, block: str, cut: bool) -> Call | None:
        """What a block calls, None for a block that is text."""
        ((tag, code),) = fenced_blocks(block)
        if tag in PYTHON_TAGS and self._code_tool is not None:
            if cut:
                return cut_off("the end of its code block")
            if not code.strip():
                return MalformedCall(problem="the code block is empty")
            return ToolCall(name=self._code_tool, arguments={CODE: code})
        if tag != "json":
            return None
        try:
            value = read_text(code)
        except JsonProblem as problem:
            if not meant(code.lstrip()):
                return None
            said = f"the call is not valid JSON: {problem.said(0)}"
            return cut_off("the end of its code block") if cut else MalformedCall(problem=said)
        if not is_call(value):
            return None
        return cut_off("the end of its code block") if cut else call_of(value)


def _line_end(source: Source, start: int) -> Steps[int]:
    found = yield from source.find(_BREAK, start)
    return len(source.text) if found is None else found[1]


def _block_end(source: Source, start: int, opened: int) -> Steps[tuple[int, bool]]:
    """Where the block ends whose first line stands from `start` to `opened`, and whether a fence ends it."""
    match = _MARKS.match(source.text, start, opened)
    assert match is not None, "a block was read where no fence is"
    fence, marks = match[0], match[1]
    del match
    end = opened
    while end < len(source.text):
        at = end + 1
        end = yield from _line_end(source, at)
        line = source.text[at:end]
        # A fence closes where the rule of `fenced_blocks` says so: then what follows is not in its block.
        if line.strip()[:3] == marks[:3] and fenced_blocks(f"{fence}\n{line}\nx") == [("", "")]:
            return end, True
    return end, False
