"""Conversations as the model sees them: ids that only ever grow, or a new sample.

    open(messages) ──> prompt() ──engine──> add_completion(ids) ──environment──> add_messages(...) ──> prompt() ...

Sampled ids are kept as they are and never made again from text. For the next prompt the whole conversation is rendered as
text; when that text starts with the text of the context so far, only the rest is encoded and appended. When it does not
(the template strips old thoughts, trims white space, or closes a turn with another token than the one sampled) the context
can't be extended, and the full text starts a new one.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polyturn.errors import ModelError
from polyturn.rendering.control import Neutralizer, without_surrogates
from polyturn.rendering.template import ChatTemplate
from polyturn.rendering.tokenizer import Tokenizer
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json, Message

REPLY_PROBE = "polyturn-reply-probe"
TOOL_PROBE = "polyturn_tool_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """What the next model call reads beyond its context.

    With `continues`, `ids` follow the context so far; without it they replace it (see `polyturn.types.Turn`).
    """

    ids: tuple[int, ...]
    continues: bool


class Renderer:
    """A tokenizer and a chat template, joined. Shared by all conversations of a run; holds no state of any of them.

    `stop_ids` end an assistant turn: first the token that the template puts after a reply, then what the folder calls the end
    of a text. `control_tokens` are what environments can't write, see `polyturn.rendering.control`.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, tools: Sequence[Json] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.control_tokens = {**tokenizer.special_tokens, **self._written_tokens()}
        self._neutralize = Neutralizer(tokenizer, self.control_tokens)
        self.tools = self.shown_tools(tools or ())
        self._lead, self._opened, tail = self._around_reply()
        space, end = self._end_of_turn(tail)
        self._closing = space + end if end else tokenizer.token(tokenizer.eos_ids[0])
        stops = [self.control_tokens[end], *tokenizer.eos_ids] if end else tokenizer.eos_ids
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        chat_template: Path | None = None,
        variables: Mapping[str, object] | None = None,
        today: datetime.datetime | None = None,
        tools: Sequence[Json] | None = None,
    ) -> Renderer:
        """The renderer of a model folder, with the template in the file `chat_template` in place of its own if given."""
        tokenizer = Tokenizer.load(folder)
        if chat_template is not None and not chat_template.is_file():
            raise ModelError(f"model.chat_template {chat_template} is not a file; name a Jinja file")
        source = None if chat_template is None else chat_template.read_text(encoding="utf-8")
        return cls(tokenizer, ChatTemplate.of(tokenizer, source, variables=variables, today=today), tools=tools)

    def open(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> Conversation:
        """A conversation that starts with `messages`.

        `tools` are announced by the template in all of its prompts, in the form of `ToolSpec.as_json`; None for those of the
        renderer.
        """
        return Conversation(self, messages, self.tools if tools is None else self.shown_tools(tools))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells the model of the tools that it is given."""
        probe: Json = ToolSpec(name=TOOL_PROBE, description="x", parameters={"type": "object", "properties": {}}).as_json()
        with contextlib.suppress(ModelError):
            return TOOL_PROBE in self.template.render([{"role": "user", "content": "x"}], True, [probe])
        return False

    def shown_tools(self, tools: Sequence[Json]) -> Sequence[Json]:
        """Tools as the template gets them: control tokens in them spelled out."""
        return [self._neutral(tool) for tool in tools]

    def _neutral(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._neutralize(without_surrogates(value))
        if isinstance(value, Mapping):
            return {str(self._neutral(key)): self._neutral(inner) for key, inner in value.items()}
        return [self._neutral(inner) for inner in value] if isinstance(value, Sequence) else value

    def entry(self, message: Message) -> dict[str, object]:
        """A message as the template gets it: control tokens in it spelled out, except in what a model said."""
        content = without_surrogates(message.content)
        if message.role != "assistant":
            content = self._neutralize(content)
        return {"role": message.role, "content": content}

    def reply_entry(self, text: str) -> dict[str, object]:
        """A sampled reply as the template gets it, so that it is shown after the same text that it was sampled after.

        What the template writes before every earlier reply (a space) is taken off, and what it writes into the prompt but not
        before earlier replies (an opened thought) is put on.
        """
        return {"role": "assistant", "content": self._opened + text.removeprefix(self._lead)}

    def reply_text(self, text: str) -> str:
        """A reply with what the template writes right before and after it, its end included."""
        return self._lead + text + self._closing

    def text(self, entries: Sequence[dict[str, object]], tools: Sequence[Json] | None = None) -> str:
        """The text of a prompt that announces `tools`, None for those of the renderer."""
        shown = self.tools if tools is None else tools
        return self.template.render(entries, True, shown or None)

    def _around_reply(self) -> tuple[str, str, str]:
        """What stands before an earlier reply but not in the prompt for it, what only in the prompt, and what after a reply.

        Rendered without tools: some templates announce them before the last question, which moves.
        """
        entries: list[dict[str, object]] = [{"role": "user", "content": "x"}]
        prompt = self.text(entries)
        entries += [{"role": "assistant", "content": REPLY_PROBE}, {"role": "user", "content": "x"}]
        text = self.template.render(entries, False)
        if text.count(REPLY_PROBE) != 1:
            raise ModelError(
                "the chat template doesn't show an assistant message as it was said; "
                "set model.chat_template to a template that renders the content of every message"
            )
        before, tail = text.split(REPLY_PROBE)
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        opened = prompt[len(before) :] if prompt.startswith(before) else ""
        return lead, opened, tail

    def _end_of_turn(self, tail: str) -> tuple[str, str]:
        """White space after a reply and the control token after that, empty where plain text follows."""
        rest = tail.lstrip()
        follows = [token for token in self.control_tokens if rest.startswith(token)]
        return tail[: len(tail) - len(rest)], max(follows, key=len, default="")

    def _written_tokens(self) -> dict[str, int]:
        """Added tokens, words and white space aside, that the template writes around messages.

        The last message is a question, so that the template shows no thoughts: their marks are the model's to write.
        """
        text = ""
        for roles in (("user", "assistant", "user"), ("user", "assistant", "tool", "tool", "user")):
            with contextlib.suppress(ModelError):
                text += self.template.render([{"role": role, "content": "x"} for role in roles], False)
        return {
            token: token_id
            for token, token_id in self.tokenizer.added_tokens.items()
            if token in text and re.search(r"[^\w\s]", token)
        }


class Conversation:
    """One trajectory's messages and the ids of its context. Made by `Renderer.open`.

    Call `prompt` and `add_completion` in turns; `add_messages` between them.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Json]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._messages: list[Message] = []
        self._entries: list[dict[str, object]] = []
        self._ids: list[int] = []
        self._text = ""
        self._prompted = False
        self.add_messages(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far, as they were given and sampled."""
        return tuple(self._messages)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Every id of the current sample, in order: what the model has read and said."""
        return tuple(self._ids)

    def copy(self) -> Conversation:
        """A conversation that goes on from here by itself."""
        other = copy.copy(self)
        other._messages, other._entries, other._ids = list(self._messages), list(self._entries), list(self._ids)
        return other

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what the environment or the user says."""
        assert not self._prompted, "messages were added between a prompt and its completion"
        self._messages += messages
        self._entries += [self._renderer.entry(message) for message in messages]

    def prompt(self) -> PromptDelta:
        """Extend the context up to where the model speaks next, or start a new one.

        Raises ModelError when the template refuses the messages or renders nothing.
        """
        assert not self._prompted, "prompt was called twice without a completion"
        text = self._renderer.text(self._entries, self._tools)
        continues = bool(self._ids) and text.startswith(self._text)
        if continues:
            ids = self._renderer.tokenizer.encode(text[len(self._text) :], after=self._ids[-1])
            self._ids += ids
        else:
            ids = self._renderer.tokenizer.encode(text)
            self._ids = list(ids)
        if not self._ids:
            raise ModelError("the chat template renders nothing; set model.chat_template to one that renders messages")
        self._text = text
        self._prompted = True
        return PromptDelta(ids=ids, continues=continues)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Ids that say `text` here and end the turn, as the template writes it; for demonstrations and scripted replies."""
        assert self._prompted, "a reply was encoded without a prompt"
        return self._renderer.tokenizer.encode(self._renderer.reply_text(text), after=self._ids[-1])

    def add_completion(self, ids: Sequence[int]) -> str:
        """Append sampled ids as they are. Returns their text without the stop token, which is also the new message."""
        assert self._prompted, "a completion was added without a prompt"
        text = said = self._renderer.tokenizer.decode(ids, continued=True)
        if ids and ids[-1] in self._renderer.stop_ids:
            said = text.removesuffix(self._renderer.tokenizer.token(ids[-1]))
        self._ids += ids
        self._text += text
        self._messages.append(Message(role="assistant", content=said))
        self._entries.append(self._renderer.reply_entry(said))
        self._prompted = False
        return said
