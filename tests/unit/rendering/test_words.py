import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import ModelError
from polyturn.rendering import ChatTemplate, Renderer, Tokenizer
from polyturn.rendering.control import spelled
from polyturn.rendering.words import (
    END_TOKEN,
    SPECIAL_TOKENS,
    TINY_CHAT_TEMPLATE,
    save_word_tokenizer,
    word_level_tokenizer,
)
from polyturn.types import Message

WORDS = ["find", "answer", "(", ")", " ", "alice", "bob", "red", "blau", "grün", "7", "?"]
PATTERN = r"\w+|\s|[^\w\s]"


def tiny():
    return Tokenizer(
        word_level_tokenizer(WORDS, PATTERN),
        eos_ids=[SPECIAL_TOKENS.index(END_TOKEN)],
        eos_token=END_TOKEN,
        chat_template=TINY_CHAT_TEMPLATE,
    )


def test_special_tokens_come_first_then_their_spellings_then_the_words():
    tokenizer = tiny()
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.token_id(spelled("<|user|>")) == 5
    assert [tokenizer.token_id(word) for word in WORDS] == list(range(10, 10 + len(WORDS)))
    assert tokenizer.vocab_size == 10 + len(WORDS)


@given(st.lists(st.sampled_from(["find(", "answer(", "alice)", "7)", " ", "?", "grün ", *SPECIAL_TOKENS])))
@settings(max_examples=50, deadline=None)
def test_decoding_gives_any_text_of_the_words_back(parts):
    tokenizer, text = tiny(), "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_word_is_named():
    with pytest.raises(ModelError, match="the word 'carol' is not in the tokenizer's vocabulary"):
        tiny().encode("<|user|>find(carol)<|end|>")


@pytest.mark.parametrize("word", ["red blue", "", "<|end|>", "a<|end|>"])
def test_a_word_that_is_not_one_piece_is_refused(word):
    with pytest.raises(ModelError, match="is not one piece under the pattern"):
        word_level_tokenizer([word], PATTERN)


def test_a_pattern_that_is_no_expression_is_refused():
    with pytest.raises(ModelError, match=r"word pattern '\(' is not a regular expression"):
        word_level_tokenizer(["a"], "(")


def test_a_quoted_control_token_stays_inside_the_vocabulary():
    """An untrained policy writes any token, and an environment may quote it: that must not end the run."""
    tokenizer = tiny()
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer))
    conversation = renderer.open([Message(role="user", content="find(alice)")])
    conversation.prompt()
    said = conversation.add_completion(tokenizer.encode("find(<|user|>)<|end|>"))
    assert said == "find(<|user|>)"
    conversation.add_messages([Message(role="tool", content=f"{said}?")])
    delta = conversation.prompt()
    assert delta.continues
    assert delta.ids.count(0) == 0
    assert tokenizer.decode(delta.ids) == f"<|tool|>find({spelled('<|user|>')})?<|end|><|assistant|>"


def test_a_saved_tokenizer_loads_here_and_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    save_word_tokenizer(tmp_path, WORDS, PATTERN)
    text = "<|user|>find(alice)<|end|><|assistant|>"
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "find(alice)"}]
    assert ours.eos_ids == (theirs.eos_token_id,) == (4,)
    assert ours.encode(text) == tuple(theirs.encode(text, add_special_tokens=False))
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    assert ChatTemplate.of(ours).render(messages, add_generation_prompt=True) == text
    assert theirs.decode(ours.encode(text)) == text
    assert len(theirs) == ours.vocab_size
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END_TOKEN


def test_a_conversation_of_the_tiny_model_only_grows():
    tokenizer = tiny()
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer))
    assert renderer.stop_ids == (4,)
    conversation = renderer.open([Message(role="user", content="find(alice)")])
    seen = list(conversation.prompt().ids)
    for reply in ("find(bob)<|end|>", "answer(", "<|end|>"):
        ids = tokenizer.encode(reply)
        conversation.add_completion(ids)
        conversation.add_messages([Message(role="tool", content="red")])
        delta = conversation.prompt()
        assert delta.continues
        seen += [*ids, *delta.ids]
    assert conversation.context_ids == tuple(seen)
    assert tokenizer.decode(seen) == (
        "<|user|>find(alice)<|end|><|assistant|>find(bob)<|end|><|tool|>red<|end|><|assistant|>answer(<|end|>"
        "<|tool|>red<|end|><|assistant|><|end|><|tool|>red<|end|><|assistant|>"
    )
