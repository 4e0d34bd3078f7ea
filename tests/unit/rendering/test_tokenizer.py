import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from polyturn.errors import ModelError
from polyturn.rendering import ChatTemplate, PromptDelta, Renderer, Tokenizer
from polyturn.types import Message
from unit.rendering.families import FAMILIES, byte_level, family, loaded, pieces, special


@pytest.fixture(scope="module")
def tokenizer_json():
    return byte_level(special("<|im_start|>", "<|im_end|>", "<|endoftext|>")).to_str()


@pytest.fixture
def folder(tmp_path, tokenizer_json):
    """A model folder whose files tests add to and change."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def names(tokenizer, ids):
    return [tokenizer.token(token_id) for token_id in ids]


def test_ends_of_text_come_from_every_file_that_names_one(folder):
    tokenizer = Tokenizer.load(folder)
    start, end, text_end = (tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    write(folder, "generation_config.json", {"eos_token_id": [end, text_end]})
    write(folder, "config.json", {"text_config": {"eos_token_id": start}})
    assert Tokenizer.load(folder).eos_ids == (end, text_end, start)
    write(folder, "config.json", {"eos_token_id": None})
    assert Tokenizer.load(folder).eos_ids == (end, text_end)


def test_an_end_of_text_with_id_zero_counts(folder):
    write(folder, "config.json", {"eos_token_id": 0, "text_config": {"eos_token_id": 1}})
    assert 0 in Tokenizer.load(folder).eos_ids
    assert 1 not in Tokenizer.load(folder).eos_ids


def test_names_of_special_tokens_in_both_their_forms(folder):
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "[PAD]"})
    write(folder, "special_tokens_map.json", {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"})
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token is None, "a name outside the vocabulary would get an id outside the model"
    assert tokenizer.pad_id is None


def test_the_chat_template_is_found_wherever_it_stands(folder):
    assert Tokenizer.load(folder).chat_template is None
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": named})
    assert Tokenizer.load(folder).chat_template == "D"
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "S"})
    assert Tokenizer.load(folder).chat_template == "S"
    write(folder, "chat_template.json", {"chat_template": "J"})
    assert Tokenizer.load(folder).chat_template == "J"
    write(folder, "chat_template.jinja", "F")
    assert Tokenizer.load(folder).chat_template == "F"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "holds a list, it must hold an object"),
        ("tokenizer_config.json", {}, "names no end of text; set eos_token in tokenizer_config.json"),
        ("tokenizer_config.json", {"eos_token": "<e>"}, "names eos_token '<e>', which tokenizer.json doesn't have"),
        ("generation_config.json", {"eos_token_id": [99999]}, "has eos_token_id 99999, which tokenizer.json doesn't have"),
        (
            "tokenizer_config.json",
            {"eos_token": "<|im_end|>", "chat_template": [{"name": "rag", "template": ""}]},
            r"has chat templates \['rag'\] and none is named default",
        ),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(folder, name, content, sentence):
    write(folder, name, content)
    with pytest.raises(ModelError, match=sentence):
        Tokenizer.load(folder)


def test_missing_pieces_are_named(folder, tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="has no chat template, and a conversation can't be rendered without one"):
        Renderer.load(folder)
    with pytest.raises(ModelError, match="is not a file; name a Jinja file"):
        Renderer.load(folder, chat_template=folder / "missing.jinja")
    write(folder, "mine.jinja", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert names(Tokenizer.load(folder), Renderer.load(folder, chat_template=folder / "mine.jinja").stop_ids) == ["<|im_end|>"]


def test_truncation_and_padding_of_the_file_are_off(tmp_path, tokenizer_json):
    backend = Backend.from_str(tokenizer_json)
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert len(loaded(backend, eos="<|im_end|>").encode("find(alice) and find(bob)")) not in (2, 64)


def test_a_named_token_that_is_only_in_the_vocabulary_is_recognised_in_text():
    backend = Backend(models.BPE({"<e>": 0, "a": 1, "<": 2, "e": 3, ">": 4}, []))
    tokenizer = Tokenizer(backend, eos_ids=[0], eos_token="<e>")
    assert tokenizer.encode("a<e>a") == (1, 0, 1)
    assert tokenizer.special_tokens == {"<e>": 0}


def test_vocab_size_counts_up_to_the_largest_id():
    backend = Backend(models.BPE({"<e>": 0, "a": 7}, []))
    assert Tokenizer(backend, eos_ids=[0], eos_token="<e>").vocab_size == 8


def test_a_tokenizer_without_special_tokens_is_refused():
    with pytest.raises(ModelError, match="has no special token"):
        Tokenizer(Backend(models.BPE({"a": 0}, [])), eos_ids=[])


def test_text_that_can_not_be_encoded_is_an_error_in_one_sentence():
    tokenizer = Tokenizer(Backend(models.BPE({"<e>": 0}, [])), eos_ids=[0], eos_token="<e>")
    with pytest.raises(ModelError, match="is not valid Unicode text"):
        tokenizer.encode("a\udc80")
    backend = Backend(models.Unigram([("<e>", 0.0), ("a", 0.0)], unk_id=None))
    with pytest.raises(ModelError, match="the tokenizer can't encode 'ab'"):
        Tokenizer(backend, eos_ids=[0], eos_token="<e>").encode("ab")


def test_flags_of_a_named_token_are_kept():
    backend = byte_level(special("<|end|>", rstrip=True))
    assert len(loaded(backend, eos="<|end|>").encode("<|end|> \n")) == 1


OPEN_TEXT = [name for name in FAMILIES if family(name).text]


@pytest.mark.parametrize("name", OPEN_TEXT)
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=12), later=st.text(max_size=12))
def test_continued_text_comes_back_exactly(name, text, later):
    """Ids of a text inside a context decode to that text, wherever the tokenizer puts or strips its first space."""
    if name == "unigram":  # can't spell every character, and drops line breaks
        text, later = ("".join(c for c in part if c in "find the red ()") for part in (text, later))
        text, later = " ".join(text.split()), ""
    tokenizer = family(name).tokenizer
    # After a special token some tokenizers write a space of their own, and models are trained on that.
    assume(not any(token in text + later for token in tokenizer.added_tokens))
    head = tokenizer.encode("red")
    ids = tokenizer.encode(text, after=head[-1])
    assert tokenizer.decode(ids, continued=True) == text
    if name != "unigram":
        more = tokenizer.encode(later, after=(*head, *ids)[-1])
        assert tokenizer.decode(head) == "red"
        assert tokenizer.decode((*head, *ids, *more)) == f"red{text}{later}"


@pytest.mark.parametrize("style", ["first", "always", "never"])
def test_a_delta_after_plain_text_gets_no_space_of_its_own(style):
    tokenizer = loaded(pieces(style=style), bos="<s>", eos="</s>")
    head = tokenizer.encode("<s>look")
    delta = tokenizer.encode("red the", after=head[-1])
    assert tokenizer.decode(delta, continued=True) == "red the"
    assert tokenizer.decode((*head, *delta)).lstrip("<s> ") == "lookred the"


def test_a_token_that_swallows_white_space_does_not_swallow_that_of_a_delta_after_text():
    tokenizer = loaded(byte_level([*special("<|end|>", "<|user|>", rstrip=True), *special("<s>")]), eos="<|end|>")
    newline = tokenizer.encode("\n")
    end, user = tokenizer.special_tokens["<|end|>"], tokenizer.special_tokens["<|user|>"]
    assert tokenizer.encode("\n<|end|>\n<|user|>\n", after=newline[0]) == (*newline, end, user)


def test_a_decoder_that_joins_words_with_spaces():
    """Text is not what was encoded, yet the same on both sides of a comparison."""
    backend = Backend(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "look": 2, "##s": 3, "red": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True, normalized=False)])
    tokenizer = loaded(backend, eos="[SEP]")
    assert tokenizer.decode((2, 3, 4, 1), continued=True) == " looks red [SEP]"
    assert "[UNK]" not in tokenizer.special_tokens
    source = "{% for m in messages %}{{ m.content + '[SEP]' }}{% endfor %}"
    conversation = Renderer(tokenizer, ChatTemplate(source)).open([Message(role="user", content="looks")])
    conversation.prompt()
    assert conversation.add_completion((4, 1)) == " red"
    conversation.add_messages([Message(role="user", content="looks")])
    assert conversation.prompt() == PromptDelta(ids=(2, 3, 1, 4, 1, 2, 3, 1), continues=False)
