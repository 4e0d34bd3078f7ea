"""Conversations with tool calls in a family's own form: the ids are those of the full render, sampled ones stay.

Where a template can't go on from what was sampled, a new sample starts, and the test says why.
"""

from __future__ import annotations

import pytest

from polyturn.rendering import ChatTemplate, Renderer
from polyturn.rendering.tool_calls import ToolCall, ToolSpec, call_format
from polyturn.types import Message
from unit.rendering.families import family, template_source

LOOK = ToolSpec(
    name="look",
    description="Look at a place, also at <|im_end|> and [INST].",
    parameters={"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
)
TOOLS = [LOOK.as_json()]
X, Y = ToolCall(name="look", arguments={"at": "x"}), ToolCall(name="look", arguments={"at": 'Zürich "東京" 🙂\n'})


def user(text):
    return Message(role="user", content=text)


def tool(text):
    return Message(role="tool", content=text)


class Play:
    """A conversation that is checked against the full render at every prompt."""

    def __init__(self, name, form, *opening, tools=(), source=None):
        one = family(name)
        self.renderer = Renderer(one.tokenizer, ChatTemplate.of(one.tokenizer, source or one.template))
        self.tokenizer, self.form, self.tools = one.tokenizer, call_format(form, [LOOK]), tools
        self.conversation = self.renderer.open(list(opening), tools=tools)
        self.sampled, self.continues = [], []
        self.prompt()

    def prompt(self):
        delta = self.conversation.prompt()
        self.continues.append(delta.continues)
        text = self.rendered()
        assert self.conversation.context_ids == self.tokenizer.encode(text)
        if delta.continues:
            assert self.conversation.context_ids[self.at : self.at + len(self.sampled)] == self.sampled

    def rendered(self):
        """The whole conversation through the template, by no way that a conversation takes."""
        messages = [{"role": message.role, "content": message.content} for message in self.conversation.messages]
        return self.renderer.template.render(messages, True, self.renderer.shown_tools(self.tools) or None)

    def say(self, text, *answers, calls, singles=(), end=None):
        """A reply as a model samples it: `singles` are its special tokens, `end` the token that ends it."""
        self.at = len(self.conversation.context_ids)
        self.sampled = self.conversation.encode_reply(text)
        if end is not None:
            self.sampled = (*self.sampled[:-1], self.tokenizer.token_id(end))
        for single in singles:
            assert self.sampled.count(self.tokenizer.token_id(single)) == text.count(single)
        said = self.conversation.add_completion(self.sampled)
        assert said == text, "special tokens that were sampled stay in the text"
        assert self.form.parse(said).calls == tuple(calls)
        self.conversation.add_messages(answers)
        self.prompt()


def both(form):
    """Two calls in one reply, in the family's form."""
    return form.separator.join(form.write(call.name, call.arguments) for call in (X, Y))


CASES = [
    ("chatml", "hermes", ()),
    ("qwen", "hermes", ("<tool_call>", "</tool_call>")),
    ("llama3", "llama3", ()),
    ("llama3_tools", "llama3", ()),
    ("mistral_tools", "mistral", ("[TOOL_CALLS]",)),
    ("chatml", "xml", ()),
    ("qwen", "fenced", ()),
]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["silent", "announced"])
@pytest.mark.parametrize(("name", "form", "singles"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_calls_and_results_are_one_sample_and_equal_the_full_render(name, form, singles, tools):
    play = Play(name, form, user("find(alice)"), tools=tools)
    play.say(both(play.form), tool("red"), tool('blue "🙂"'), calls=(X, Y), singles=singles)
    play.say(f"I look for the red one.\n{play.form.write('look', X.arguments)}", tool("none"), calls=(X,), singles=singles)
    play.say("answer(red)", tool("Done."), calls=())
    assert play.continues == [False, True, True, True]


@pytest.mark.parametrize(
    "text",
    [
        '<|python_tag|>{"name": "look", "parameters": {"at": "x"}}',
        '<|python_tag|>{"name": "look", "parameters": {"at": "x"}}; {"name": "look", "parameters": {"at": "x"}}',
        '<function=look>{"at": "x"}</function>',
    ],
)
def test_the_other_forms_of_llama(text):
    play = Play("llama3_tools", "llama3", user("find(alice)"), tools=TOOLS)
    play.say(text, tool("red"), calls=(X,) * text.count('"x"'), singles=("<|python_tag|>",))
    assert play.continues == [False, True]


@pytest.mark.parametrize("text", ['[TOOL_CALLS]look[ARGS]{"at": "x"}', '[TOOL_CALLS]look[CALL_ID]abc123XYZ[ARGS]{"at": "x"}'])
def test_the_newer_form_of_mistral(text):
    play = Play("mistral_tools", "mistral", user("find(alice)"), tools=TOOLS)
    play.say(text, tool("red"), calls=(X,), singles=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
    assert play.continues == [False, True]


def test_a_turn_of_llama_that_ends_in_eom_starts_a_new_sample():
    """The template ends every earlier turn with <|eot_id|>, and the model sampled <|eom_id|>."""
    play = Play("llama3_tools", "llama3", user("find(alice)"))
    play.say('<|python_tag|>{"name": "look", "parameters": {"at": "x"}}', tool("red"), calls=(X,), end="<|eom_id|>")
    assert play.continues == [False, False]


def test_tools_before_the_last_question_start_a_new_sample_when_the_next_question_comes():
    """Results of tools go on; a question moves the announcement, away from where the model has read it."""
    play = Play("mistral_tools", "mistral", user("find(alice)"), tools=TOOLS)
    play.say(play.form.write("look", X.arguments), tool("red"), calls=(X,))
    play.say("answer(red)", user("find(bob)"), calls=())
    assert play.continues == [False, True, False]


def test_a_space_that_the_template_puts_before_earlier_replies_starts_a_new_sample_at_a_call():
    """Mistral's first template for tools shows a reply behind a space, where calls are sampled without one."""
    source = template_source("mistral_tools").replace("message.content + eos_token", "' ' + message.content + eos_token")
    assert source != template_source("mistral_tools")
    play = Play("mistral_tools", "mistral", user("find(alice)"), source=source)
    conversation, tokenizer = play.conversation, play.tokenizer
    conversation.add_completion((*tokenizer.encode(play.form.write("look", X.arguments)), tokenizer.eos_ids[0]))
    conversation.add_messages([tool("red")])
    assert not conversation.prompt().continues


def test_white_space_after_a_call_starts_a_new_sample_where_the_template_trims():
    for name, form, continues in (("llama3_tools", "llama3", False), ("qwen", "hermes", True)):
        play = Play(name, form, user("find(alice)"))
        play.conversation.add_completion(play.conversation.encode_reply(play.form.write("look", X.arguments) + "\n"))
        play.conversation.add_messages([tool("red")])
        assert play.conversation.prompt().continues == continues


# ── tools of a conversation ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "shows"), [("qwen", True), ("llama3_tools", True), ("mistral_tools", True), ("chatml", False), ("gemma", False)]
)
def test_whether_a_template_shows_tools(name, shows):
    renderer = family(name).renderer()
    assert renderer.shows_tools is shows
    text = renderer.tokenizer.decode(renderer.open([user("find(alice)")], tools=TOOLS).prompt().ids)
    assert ("look" in text) is shows


def test_a_template_that_refuses_tools_does_not_show_them():
    tokenizer = family("chatml").tokenizer
    source = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + family("chatml").template
    assert not Renderer(tokenizer, ChatTemplate.of(tokenizer, source)).shows_tools


def test_every_conversation_has_its_own_tools():
    other = ToolSpec(name="find", description="", parameters={}).as_json()
    renderer = family("qwen").renderer(tools=[other])

    def opening(**arguments):
        return renderer.tokenizer.decode(renderer.open([user("x")], **arguments).prompt().ids)

    assert '"find"' in opening()
    assert '"find"' in opening(tools=None)
    assert "<tools>" not in opening(tools=())
    assert '"find"' not in opening(tools=TOOLS)
    assert '"look"' in opening(tools=TOOLS)


def test_control_tokens_in_a_description_are_text():
    renderer = family("qwen").renderer()
    ids = renderer.open([user("x")], tools=TOOLS).prompt().ids
    assert ids.count(renderer.tokenizer.token_id("<|im_end|>")) == 2, "one for the system message, one for the question"


@pytest.mark.parametrize("name", ["qwen", "llama3_tools", "mistral_tools"])
def test_tools_are_announced_as_transformers_announces_them(name):
    from transformers import PreTrainedTokenizerFast

    one = family(name)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=one.tokenizer.backend, bos_token=one.tokenizer.bos_token, eos_token=one.tokenizer.eos_token
    )
    messages = [{"role": role, "content": "look"} for role in ("system", "user", "assistant", "tool")]
    expected = theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=one.template, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate.of(one.tokenizer, one.template).render(messages, True, TOOLS) == expected
