"""`xml`: what is written, what a text keeps, and which specs the format takes. The rest is in the corpus."""

from __future__ import annotations

import pytest

from polyturn.errors import ConfigError, EnvironmentSetupError
from polyturn.rendering.tool_calls import ToolCall, call_format
from unit.rendering.tool_calls.forms import DATA, FORMS, INTEGER, LOOK, PYTHON, SPECS, TEXT, tool

XML = FORMS["xml"]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("look", {"at": "x"}, "<look>x</look>"),
        ("look", {"at": "x", "depth": 2}, "<look><at>x</at><depth>2</depth></look>"),
        ("look", {"depth": 2}, "<look><depth>2</depth></look>"),
        ("look", {}, "<look/>"),
        ("look", {"at": ""}, "<look></look>"),
        ("look", {"at": "a < b & c > d"}, "<look>a < b & c > d</look>"),
        ("look", {"at": "</look> <at>"}, "<look>&lt;/look> &lt;at></look>"),
        ("look", {"at": "&lt; &amp; &#32; &x;"}, "<look>&amp;lt; &amp;amp; &amp;#32; &x;</look>"),
        ("look", {"at": "\n x "}, "<look>&#10;&#32;x&#32;</look>"),
        ("look", {"at": "  "}, "<look>&#32;&#32;</look>"),
        ("go", {"at": "x"}, "<go><at>x</at></go>"),
        ("go", {"depth": {"a": "</depth>"}}, '<go><depth>{"a": "&lt;/depth>"}</depth></go>'),
        ("data", {"value": "five"}, "<data><value>five</value></data>"),
        ("data", {"value": "5"}, '<data><value>"5"</value></data>'),
        ("data", {"value": 5}, "<data><value>5</value></data>"),
        ("data", {"value": None}, "<data><value>null</value></data>"),
    ],
)
def test_what_is_written(name, arguments, text):
    assert XML.write(name, arguments) == text
    assert XML.parse(text).calls == (ToolCall(name=name, arguments=arguments),)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("find", {}, "there is no tool 'find'; name it in the specs"),
        ("look", {"to": "x"}, "look has no argument 'to'; name it in the specs"),
        ("look", {"at": 5}, "its argument at is 5, no text"),
    ],
)
def test_what_the_specs_do_not_have_is_not_written(name, arguments, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        XML.write(name, arguments)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((), "needs their specs"),
        ((LOOK, LOOK), "two tools have one name"),
        ((tool("look at"),), "'look at', which can't be a tag"),
        ((tool("look", [], **{"a>": TEXT}),), "'a>', which can't be a tag"),
    ],
)
def test_specs_that_are_refused(specs, said):
    with pytest.raises(ConfigError, match=said):
        call_format("xml", specs)


def test_a_program_keeps_its_lines():
    form = call_format("xml", [PYTHON])
    code = "if a < b:\n    print('</p>')\n\nx = 1"
    (call,) = form.parse(f"<python>\n{code}\n</python>").calls
    assert call.arguments == {"code": code}


def test_an_argument_may_be_named_like_its_tool():
    form = call_format("xml", [tool("find", ["find", "n"], find=TEXT, n=INTEGER), DATA])
    text = form.write("find", {"find": "<find>", "n": 1})
    assert form.parse(text).calls == (ToolCall(name="find", arguments={"find": "<find>", "n": 1}),)
    (call,) = form.parse("<find><find>x</find>").calls
    assert call.problem == "the call has no </find>"


def test_only_an_argument_of_a_union_without_text_must_be_json():
    form = call_format(
        "xml", [tool("go", at={"type": ["integer", "null"]}, to={"type": ["string", "null"]}, by={"enum": ["a"]})]
    )
    (call,) = form.parse("<go><at>null</at><to>null</to><by>a</by></go>").calls
    assert call.arguments == {"at": None, "to": None, "by": "a"}
    (call,) = form.parse("<go><at>x</at></go>").calls
    assert call.problem == "the argument at is not valid JSON: expecting value at character 1"


def test_the_specs_are_those_of_the_format():
    assert {spec.name for spec in SPECS} == {"look", "go", "data", "now"}
    assert call_format("xml", [DATA]).parse("<look>x</look>").calls == ()
