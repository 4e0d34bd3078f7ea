"""A conversation's ids, for every family: they only grow, sampled ones stay, and the text they stand for is the template's."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import ModelError
from polyturn.rendering import ChatTemplate, Renderer
from polyturn.types import Message
from unit.rendering.families import FAMILIES, WORDS, family


def user(text):
    return Message(role="user", content=text)


def tool(text):
    return Message(role="tool", content=text)


@dataclass
class Watch:
    """Drives a conversation the way a rollout does and checks every invariant on the way."""

    name: str
    opening: list
    continues: list = field(default_factory=list)
    deltas: list = field(default_factory=list)

    def __post_init__(self):
        self.family = family(self.name)
        self.tokenizer = self.family.tokenizer
        self.renderer = self.family.renderer()
        self.conversation = self.renderer.open(self.opening)
        self.seen = []  # what the model has read and said in this sample
        self.text = ""  # the same as text
        self.prompt()

    def prompt(self):
        delta = self.conversation.prompt()
        entries = [self.renderer.entry(message) for message in self.conversation.messages]
        for entry, message in zip(entries, self.conversation.messages, strict=True):
            if message.role == "assistant":
                entry.update(self.renderer.reply_entry(message.content))
        rendered = self.renderer.template.render(entries, add_generation_prompt=True)
        assert delta.continues == (bool(self.seen) and rendered.startswith(self.text))
        if delta.continues:
            self.seen += delta.ids
            if self.family.exact and "\ufffd" not in rendered:
                assert self.tokenizer.decode(self.seen) == rendered
        else:
            assert delta.ids == self.tokenizer.encode(rendered)
            self.seen = list(delta.ids)
        assert self.conversation.context_ids == tuple(self.seen)
        self.text = rendered
        self.continues.append(delta.continues)
        self.deltas.append(delta)
        return delta

    def sample(self, ids, *answer):
        said = self.conversation.add_completion(ids)
        self.seen += ids
        text = self.tokenizer.decode(ids, continued=True)
        self.text += text
        assert self.conversation.context_ids == tuple(self.seen), "sampled ids stay where they are"
        stopped = bool(ids) and ids[-1] in self.renderer.stop_ids
        assert said == (text.removesuffix(self.tokenizer.token(ids[-1])) if stopped else text)
        assert self.conversation.messages[-1] == Message(role="assistant", content=said)
        self.conversation.add_messages(answer or [tool("red")])
        return said

    def say(self, text, *answer, cut=False):
        """The canonical ids of a reply, the last `cut` of them not sampled."""
        ids = self.conversation.encode_reply(text)
        return self.sample(ids[:-1] if cut else ids, *answer)


# What a family does after a reply: continue the sample, or start a new one because the template trims what was sampled.
TRIMS = {"llama3", "mistral", "llama2", "gemma"}
END_IS_NEXT_ROLE = {"glm"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_conversation_is_one_sample_and_equals_its_full_encoding(name):
    watch = Watch(name, [user("find(alice)")])
    for reply in ("find(bob)", "look", "answer(red)"):
        # A role token that ends the turn promises who speaks next.
        watch.say(reply, user("blue") if name in END_IS_NEXT_ROLE else tool("blue"))
        watch.prompt()
    assert watch.continues == [False, True, True, True]
    assert tuple(watch.seen) == watch.tokenizer.encode(watch.text)


@pytest.mark.parametrize("name", FAMILIES)
def test_white_space_after_a_reply_starts_a_new_sample_only_where_the_template_trims(name):
    watch = Watch(name, [user("find(alice)")])
    watch.say("answer(red) \n", user("look"))
    watch.prompt()
    assert watch.continues == [False, name not in TRIMS]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_reply(name):
    watch = Watch(name, [user("find(alice)")])
    watch.sample((watch.renderer.stop_ids[0],), user("look"))
    watch.prompt()
    # Templates that write a space before every reply want it also before an empty one.
    assert watch.continues == [False, name not in ("mistral", "llama2")]
    watch.sample((), user("look"))
    watch.prompt()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_cut_by_its_limit_is_closed_by_the_template(name):
    watch = Watch(name, [user("find(alice)")])
    watch.say("look the red", cut=True)
    delta = watch.prompt()
    assert delta.continues
    closing = watch.tokenizer.token(watch.renderer.stop_ids[0])
    if name not in END_IS_NEXT_ROLE:
        assert watch.tokenizer.decode(delta.ids, continued=True).lstrip().startswith(closing)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_ended_by_another_token_than_the_templates_starts_a_new_sample(name):
    watch = Watch(name, [user("find(alice)")])
    ids = watch.conversation.encode_reply("look")[:-1]
    others = [stop for stop in watch.renderer.stop_ids if stop != watch.renderer.stop_ids[0]]
    for other in others[:1]:
        assert watch.sample((*ids, other), user("red")).strip() == "look"
        assert not watch.prompt().continues


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_that_holds_control_tokens_keeps_them(name):
    """Sampled ones, by id; and where text is open, ones that the model spelled from ordinary tokens."""
    watch = Watch(name, [user("find(alice)")])
    control = next(token for token in watch.renderer.control_tokens.values() if token not in watch.renderer.stop_ids)
    ids = watch.conversation.encode_reply("look")
    watch.sample((*ids[:-1], control, *ids))
    watch.prompt()
    assert control in watch.seen[-60:] or name in TRIMS
    if watch.family.text:
        spelled = [i for character in watch.tokenizer.token(control) for i in watch.tokenizer.encode(character, after=ids[0])]
        assert control not in spelled
        watch.sample((*ids[:-1], *spelled, *ids[-1:]), user("red"))
        watch.prompt()


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).text])
def test_half_a_character_at_the_limit_still_continues(name):
    """The cut bytes decode to a replacement character, the same one on both sides of the comparison."""
    watch = Watch(name, [user("find(alice)")])
    ids = watch.conversation.encode_reply("look 🚀")[:-1]
    while "🚀" in watch.tokenizer.decode(ids, continued=True):
        ids = ids[:-1]
    said = watch.sample(ids, user("東京 🙂"))
    assert "\ufffd" in said or name == "unigram"  # which has no bytes, and an unknown token for the whole character
    assert watch.prompt().continues
    assert tuple(watch.seen[len(watch.deltas[0].ids) :][: len(ids)]) == ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scripted_conversation_of_four_turns(name):
    watch = Watch(name, [Message(role="system", content="look"), user("find(alice)")])
    answer = "Zürich 🙂 東京\n\n" if watch.family.text else "grün\n\n"
    watch.say("look(red)", tool(answer), tool("blue"))
    watch.prompt()
    watch.say("look the", tool("7"), cut=True)
    watch.prompt()
    watch.say("find(bob) ", user("?"))
    watch.prompt()
    watch.say("answer(blue)", user("!"))
    watch.prompt()
    assert watch.continues == [False, name not in END_IS_NEXT_ROLE, True, name not in TRIMS, True]


EXPECTED_DELTAS = {
    "chatml": "\n<|im_start|>tool\nred<|im_end|>\n<|im_start|>assistant\n",
    "qwen": "\n<|im_start|>user\n<tool_response>\nred\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>ipython<|end_header_id|>\n\nred<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[INST] red [/INST]",
    "llama2": "<s> [INST] red [/INST]",  # this tokenizer puts a space after every special token
    "gemma": "\n<start_of_turn>user\nred<end_of_turn>\n<start_of_turn>model\n",
    "phi": "<|tool|>red<|end|><|assistant|>",  # and this one's special tokens swallow the line break after them
    "words": "<|tool|>red<|end|><|assistant|>",
}


@pytest.mark.parametrize("name", EXPECTED_DELTAS)
def test_what_stands_between_two_replies(name):
    watch = Watch(name, [user("find(alice)")])
    watch.say("look", tool("red"))
    assert watch.tokenizer.decode(watch.prompt().ids, continued=True) == EXPECTED_DELTAS[name]


def test_thoughts_stay_until_the_next_question_and_then_a_new_sample_starts():
    watch = Watch("qwen", [user("find(alice)")])
    watch.say("<think>\nlook\n</think>\n\nfind(bob)", tool("red"))
    watch.prompt()
    watch.say("<think>\nthink\n</think>\n\nanswer(red)", user("find(blue)"))
    watch.prompt()
    watch.say("answer(blue)", user("!"))
    watch.prompt()
    assert watch.continues == [False, True, False, True]
    assert "<think>" not in watch.text


def test_a_thought_that_the_prompt_opens_belongs_to_the_reply():
    """History must show it where the model saw it, until the template itself drops it."""
    tokenizer = family("qwen").tokenizer
    template = ChatTemplate.of(tokenizer, family("qwen").template, variables={"enable_thinking": False})
    conversation = Renderer(tokenizer, template).open([user("find(alice)")])
    continues = []
    for answer in (tool("red"), user("blue"), user("!")):
        delta = conversation.prompt()
        continues.append(delta.continues)
        assert tokenizer.decode(delta.ids).endswith("<think>\n\n</think>\n\n")
        assert conversation.add_completion(conversation.encode_reply("look")) == "look"
        conversation.add_messages([answer])
    assert [*continues, conversation.prompt().continues] == [False, True, False, False]


def test_a_template_that_drops_what_its_prompt_opened_starts_a_new_sample_each_turn():
    tokenizer = family("chatml").tokenizer
    source = family("chatml").template.replace("message.content +", "message.content.split('</think>')[-1] +")
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer, source.replace("assistant\\n'", "assistant\\n</think>'")))
    conversation = renderer.open([user("find(alice)")])
    for _ in range(2):
        assert not conversation.prompt().continues
        conversation.add_completion(conversation.encode_reply("look"))
        conversation.add_messages([tool("red")])


def test_a_space_that_the_template_writes_before_a_reply_is_not_written_twice():
    tokenizer = family("mistral").tokenizer
    source = family("mistral").template.replace("message.content | trim", "message.content")
    conversation = Renderer(tokenizer, ChatTemplate.of(tokenizer, source)).open([user("find(alice)")])
    conversation.prompt()
    assert conversation.add_completion(conversation.encode_reply("look  ")) == " look  "
    conversation.add_messages([tool("red")])
    assert conversation.prompt().continues


def test_tools_are_shown_to_the_template():
    renderer = family("qwen").renderer(tools=[{"name": "find", "description": "a < b & ü"}])
    text = renderer.tokenizer.decode(renderer.open([user("find(alice)")]).prompt().ids)
    assert '{"name": "find", "description": "a < b & ü"}' in text


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("chatml", ["<|im_end|>"]),
        ("qwen", ["<|im_end|>", "<|endoftext|>"]),
        ("llama3", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
        ("mistral", ["</s>"]),
        ("llama2", ["</s>"]),
        ("gemma", ["<end_of_turn>", "<eos>"]),
        ("phi", ["<|end|>", "<|endoftext|>"]),
        ("glm", ["<|user|>", "<|endoftext|>", "<|observation|>"]),
    ],
)
def test_stop_ids_are_the_templates_end_of_turn_and_the_folders_ends_of_text(name, stops):
    renderer = family(name).renderer()
    assert [renderer.tokenizer.token(stop) for stop in renderer.stop_ids] == stops


def test_a_template_without_an_end_of_turn_stops_at_the_end_of_text():
    tokenizer = family("chatml").tokenizer
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer, source))
    assert renderer.stop_ids == tokenizer.eos_ids
    conversation = renderer.open([user("look")])
    conversation.prompt()
    assert tokenizer.decode(conversation.encode_reply("red")) == "red<|im_end|>"


def test_a_template_that_hides_replies_is_refused():
    tokenizer = family("chatml").tokenizer
    with pytest.raises(ModelError, match="doesn't show an assistant message as it was said"):
        Renderer(tokenizer, ChatTemplate.of(tokenizer, "{{ messages[0].content }}"))


def test_a_template_that_renders_nothing_is_refused():
    tokenizer = family("chatml").tokenizer
    source = "{% if messages | length > 1 %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
    with pytest.raises(ModelError, match="renders nothing"):
        Renderer(tokenizer, ChatTemplate.of(tokenizer, source)).open([user("x")]).prompt()


def test_calls_out_of_order_are_bugs():
    conversation = family("chatml").renderer().open([user("x")])
    with pytest.raises(AssertionError, match="without a prompt"):
        conversation.add_completion((1,))
    conversation.prompt()
    with pytest.raises(AssertionError, match="called twice"):
        conversation.prompt()
    with pytest.raises(AssertionError, match="between a prompt and its completion"):
        conversation.add_messages([user("x")])


def words(name):
    """Text that the family can encode."""
    if not family(name).text:
        return st.lists(st.sampled_from([f"{word}({other})" for word in WORDS[:9:2] for other in WORDS[:9:2]])).map(" ".join)
    spice = st.sampled_from(
        ["find(", "\n", "  ", "<|im_end|>", "</s>", "🙂", "é", "<", "[INST]", "</think>", "\ufffd", "\u200d"]
    )
    return st.lists(st.one_of(spice, st.text(max_size=6))).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sampled_ids_stay_and_any_context_is_the_rendered_text(name, data):
    """Replies are arbitrary ids of the vocabulary and beyond it, or text; `Watch` checks the invariants at every step."""
    watch = Watch(name, [user(data.draw(words(name)))])
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            rng = random.Random(data.draw(st.integers(0, 2**32)))
            size = watch.tokenizer.vocab_size + 3
            ids = tuple(rng.randrange(size) for _ in range(rng.randrange(8)))
            if data.draw(st.booleans()):
                ids = (*ids, watch.renderer.stop_ids[0])
            answer = data.draw(words(name))
            watch.sample(ids, *([user(answer)] if data.draw(st.booleans()) else [tool(answer), tool("red")]))
        else:
            watch.say(data.draw(words(name)), tool(data.draw(words(name))), cut=data.draw(st.booleans()))
        watch.prompt()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_what_transformers_renders(name):
    from transformers import PreTrainedTokenizerFast

    one = family(name)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=one.tokenizer.backend, bos_token=one.tokenizer.bos_token, eos_token=one.tokenizer.eos_token
    )
    ours = ChatTemplate.of(one.tokenizer, one.template)
    messages = [{"role": role, "content": "look"} for role in ("user", "assistant", "user", "assistant", "user")]
    if ours.tool_role == "tool":
        messages[2]["role"] = "tool"
    if ours.system_role == "system":
        messages.insert(0, {"role": "system", "content": "think"})
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, chat_template=one.template, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.render(messages, add_generation_prompt=prompt) == expected
        ids = theirs(expected, add_special_tokens=False)["input_ids"]
        assert one.tokenizer.encode(expected) == tuple(ids)
        assert one.tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
