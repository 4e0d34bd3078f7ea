"""Tool calls in replies, in the forms that model families were trained on.

    hermes     <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>
    llama3     {"name": "look", "parameters": {"at": "x"}}
    mistral    [TOOL_CALLS] [{"name": "look", "arguments": {"at": "x"}}]
    xml        <look>x</look>
    fenced     a Python or JSON code block

`call_format(name, specs)` gives a `CallFormat`, which reads, writes and explains calls. Reading is tolerant where the meaning
is plain. What can't be read comes back as a `MalformedCall` with the reason, for the model to see; nothing a model writes
raises. See docs/tool_calls.md.
"""

from polyturn.rendering.tool_calls.base import Call, CallFormat, CallReader, MalformedCall, ParsedReply, ToolCall, ToolSpec
from polyturn.rendering.tool_calls.registry import CALL_FORMATS, call_format

__all__ = [
    "CALL_FORMATS",
    "Call",
    "CallFormat",
    "CallReader",
    "MalformedCall",
    "ParsedReply",
    "ToolCall",
    "ToolSpec",
    "call_format",
]
