"""Chat templates: Jinja text that turns messages into one string, rendered in a sandbox.

A template is data from the model's folder. It can't reach Python, and the date it sees stands still, so that a conversation
that runs past midnight keeps its opening; a run that must resume exactly passes the date of its first start as `today`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from polyturn.errors import ModelError
from polyturn.rendering.tokenizer import Tokenizer
from polyturn.types import Json

PROBES = ("polyturn-probe-one", "polyturn-probe-two")


class _GenerationTag(jinja2.ext.Extension):
    """Renders what stands between `{% generation %}` and `{% endgeneration %}` as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template and what it makes of roles it doesn't know.

    Where a template refuses or swallows tool messages, they are rendered as user messages, adjacent ones joined by a blank
    line; where it does so with a system message, that one is put before the first user message, joined the same way.
    `tool_role` and `system_role` say under which role such messages are rendered. A source that is not a Jinja template raises
    ModelError.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        variables: Mapping[str, object] | None = None,
        today: datetime.datetime | None = None,
    ) -> None:
        self.source = source
        self._today = today or datetime.datetime.now()
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._variables = {name: token for name, token in tokens.items() if token is not None} | dict(variables or {})
        try:
            self._template = self._environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not valid Jinja at line {error.lineno}: {error.message}; correct it, "
                "or set model.chat_template to another file"
            ) from error

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        variables: Mapping[str, object] | None = None,
        today: datetime.datetime | None = None,
    ) -> ChatTemplate:
        """The template of a tokenizer's folder, or `source` in its place. Raises ModelError when there is neither.

        `variables` are the template's own switches, such as `enable_thinking`.
        """
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            raise ModelError(
                "the model's folder has no chat template, and a conversation can't be rendered without one; "
                "set model.chat_template to a Jinja file, or train an instruction-tuned model"
            )
        named = {} if tokenizer.pad_token is None else {"pad_token": tokenizer.pad_token}
        return cls(
            source,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            variables={**named, **(variables or {})},
            today=today,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Json] | None = None,
        **variables: object,
    ) -> str:
        """The conversation as one string. Raises ModelError with the template's own words where it refuses."""
        adapted = [dict(message) for message in messages]
        if self.tool_role == "user" and any(message["role"] == "tool" for message in adapted):
            adapted = _tools_as_users(adapted)
        if self.system_role == "user" and adapted and adapted[0]["role"] == "system":
            adapted = _system_into_user(adapted)
        return self._render(adapted, add_generation_prompt, tools, variables)

    @cached_property
    def tool_role(self) -> Literal["tool", "user"]:
        """`user` where the template has no place for tool messages."""
        turns = [("user", "x"), ("assistant", "x"), ("tool", PROBES[0]), ("tool", PROBES[1]), ("assistant", "x")]
        return "tool" if self._shows(turns) else "user"

    @cached_property
    def system_role(self) -> Literal["system", "user"]:
        """`user` where the template has no place for a system message."""
        return "system" if self._shows([("system", " ".join(PROBES)), ("user", "x")]) else "user"

    def _shows(self, turns: Sequence[tuple[str, str]]) -> bool:
        """Whether the template renders these turns, and the probes in them, in order."""
        try:
            text = self._render([{"role": role, "content": content} for role, content in turns], False, None, {})
        except ModelError:
            return False
        return 0 <= text.find(PROBES[0]) < text.find(PROBES[1])

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Json] | None,
        variables: Mapping[str, object],
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._variables,
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template may fail like any program
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template refuses a conversation of {roles or 'no messages'}: {error}; "
                "change the environment's messages, or set model.chat_template to a template that takes them"
            ) from error

    def _environment(self) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._today.strftime
        return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models read it: jinja2's own filter escapes `<` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tools_as_users(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Tool messages as user messages, adjacent ones joined: templates without tools mostly want roles to alternate."""
    merged: list[dict[str, object]] = []
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "role": "user"}
        if merged and message["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _system_into_user(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The system message put before the first user message, or made one."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]
