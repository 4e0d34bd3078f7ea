"""The families with tools to call, and replies put together from their own marks."""

from __future__ import annotations

from hypothesis import strategies as st

from polyturn.rendering.tool_calls import CALL_FORMATS, ToolSpec, call_format


def tool(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return ToolSpec(name=name, description=f"This is {name}.", parameters=parameters)


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
LOOK = tool("look", ["at"], at=TEXT, depth=INTEGER)
GO = tool("go", ["at", "depth"], at=TEXT, depth=INTEGER)
DATA = tool("data", ["value"], value={})
NOW = tool("now")
SPECS = (LOOK, GO, DATA, NOW)
PYTHON = tool("python", ["code"], code=TEXT)

FORMS = {name: call_format(name, () if name == "fenced" else SPECS) for name in CALL_FORMATS}

BODY = '{"name": "look", "arguments": {"at": "x"}}'
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>", "```", "```json"],
    "llama3": [
        "<|python_tag|>",
        ";",
        "<function=",
        "<function=look>",
        "</function>",
        '{"name": "look", "parameters": {}}',
        "look",
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "look", "abc123XYZ"],
    "xml": [
        "<look>",
        "</look>",
        "<go>",
        "</go>",
        "<at>",
        "</at>",
        "<depth>",
        "</depth>",
        "<look/>",
        "<look />",
        "<data>",
        "&lt;",
        "&#1",
    ],
    "fenced": ["```python\n", "\n```\n", "```json\n", "\n```", "~~~", "````\n", "```py", "    ```\n"],
}
JSON = [
    BODY,
    "{",
    "}",
    "[",
    "]",
    '"',
    '"name"',
    '"arguments"',
    ":",
    ",",
    "\\",
    "\\u",
    "d8",
    "1",
    "-",
    "tr",
    "true",
    "NaN",
    '{"name": "l',
]
LOOSE = [" ", "\n", "text", "é", "🙂", "<", "`", "\u2028"]


def replies(name):
    """Replies that look like calls of the family, mostly wrong ones."""
    return st.lists(st.sampled_from(MARKS[name] + JSON + LOOSE), max_size=14).map("".join)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def texts(name):
    """Any text, also one made of the family's marks."""
    return st.text() | replies(name)


def calls(name):
    """A name and arguments that the family can write: any, or any that the specs take where the family needs them."""
    anything = st.dictionaries(texts(name), values | texts(name), max_size=3)
    if name == "xml":
        arguments = {"at": texts(name), "depth": values, "value": values | texts(name)}
        return st.sampled_from(SPECS).flatmap(
            lambda spec: st.tuples(
                st.just(spec.name),
                st.fixed_dictionaries({}, optional={key: arguments[key] for key in spec.parameters["properties"]}),
            )
        )
    if name == "fenced":
        code = st.tuples(st.just("python"), st.fixed_dictionaries({"code": texts(name)}))
        return code | st.tuples(st.text(min_size=1), anything)
    return st.tuples(st.text(min_size=1), anything)
