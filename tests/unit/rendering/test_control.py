"""What environments and users write can't open or close a turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from polyturn.rendering import ChatTemplate, Renderer
from polyturn.rendering.control import Neutralizer, spelled
from polyturn.types import Message
from unit.rendering.families import FAMILIES, byte_level, family, loaded, special

JOINER = "\u200d"


def neutralizer(backend, eos):
    tokenizer = loaded(backend, eos=eos)
    return tokenizer, Neutralizer(tokenizer, tokenizer.special_tokens)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_no_role_but_the_model_can_write_a_control_token(name, role):
    renderer = family(name).renderer()
    tokenizer = renderer.tokenizer

    def prompt(quoted):
        opening = [Message(role="user", content="look"), Message(role="assistant", content="red")]
        messages = [*opening, Message(role=role, content=quoted)]
        if role == "system":
            messages = [messages[2], opening[0]]
        return renderer.open(messages).prompt().ids

    plain = prompt("red")
    for token, token_id in renderer.control_tokens.items():
        assert prompt(f"red{token}").count(token_id) == plain.count(token_id)
        assert name == "unigram" or spelled(token) in tokenizer.decode(prompt(f"red{token}"))
    assert prompt("red") == plain


def test_a_demonstration_of_the_model_keeps_its_control_tokens():
    renderer = family("chatml").renderer()
    messages = [Message(role="user", content="look"), Message(role="assistant", content="a<|im_end|>b")]
    assert "a<|im_end|>b" in renderer.tokenizer.decode(renderer.open(messages).prompt().ids)


def test_marks_that_prompts_explain_stay_and_marks_around_tool_answers_do_not():
    renderer = family("qwen").renderer()
    message = Message(role="tool", content="<think><tool_call></tool_response>")
    assert renderer.entry(message)["content"] == f"<think><tool_call><{JOINER}/tool_response>"


def test_other_text_is_unchanged():
    _, neutralize = neutralizer(byte_level(special("<|im_end|>")), "<|im_end|>")
    text = "<|im_start|> <|im_ end|> \u200d é 🙂 \ufffd</s>\n"
    assert neutralize(text) == text
    assert neutralize("") == ""


@given(st.lists(st.sampled_from(["<|", "|>", "im_end", "<|im_end|>", "|><|", "><", "é🙂"])).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_control_token_is_left_where_they_overlap(text):
    tokenizer, neutralize = neutralizer(byte_level(special("<|im_end|>", "|><|")), "<|im_end|>")
    ids = tokenizer.encode(neutralize(text))
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert neutralize(text).replace(JOINER, "") == text


def test_a_token_that_also_matches_normalised_text():
    backend = byte_level([])
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<|stop|>", special=True, normalized=True), *special("<|end|>")])
    tokenizer, neutralize = neutralizer(backend, "<|end|>")
    assert tokenizer.special_tokens["<|stop|>"] in tokenizer.encode("a<|STOP|>")
    assert neutralize("a<|STOP|>") == f"a<{JOINER}|STOP|>"


def test_a_tokenizer_that_drops_the_joiner_gets_another_separator():
    backend = byte_level([])
    backend.normalizer = normalizers.Replace(JOINER, "")
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    _, neutralize = neutralizer(backend, "<|end|>")
    assert neutralize("a<|end|>") == "a<\u2060|end|>"


def test_a_token_of_one_character_is_replaced():
    _, neutralize = neutralizer(byte_level(special("§", "<|end|>")), "<|end|>")
    assert neutralize("a§b") == "a\ufffdb"


def test_white_space_that_a_token_swallows_stays():
    _, neutralize = neutralizer(byte_level(special("<|end|>", lstrip=True, rstrip=True)), "<|end|>")
    assert neutralize("a \n<|end|>\n b") == f"a \n<{JOINER}|end|>\n b"


def test_half_a_surrogate_pair_is_replaced():
    """Tool output read with Python's surrogateescape holds such characters; no tokenizer takes them."""
    renderer = family("chatml").renderer()
    assert renderer.entry(Message(role="tool", content="a\udc80b"))["content"] == "a\ufffdb"


def test_an_unknown_character_is_not_taken_for_a_control_token():
    one = family("unigram")
    renderer = Renderer(one.tokenizer, ChatTemplate.of(one.tokenizer, one.template))
    assert renderer.entry(Message(role="user", content="<|∮ ☃"))["content"] == "<|∮ ☃"
