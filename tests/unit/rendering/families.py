"""Small tokenizers and chat templates with the structure of the families people train."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from polyturn.rendering import ChatTemplate, Renderer, Tokenizer
from polyturn.rendering.words import TINY_CHAT_TEMPLATE, word_level_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "rendering"

CORPUS = [
    "You help with tools. Find the colour of a thing, then answer with one word.",
    "user assistant system tool model ipython observation INST tools",
    "find(alice) gives red, find(bob) gives blue; answer(red) ends it.",
    "The weather in Zürich is nice: ça va, 東京 is far, and so are we 🙂 today.",
    "I think so. I look for the red one, I look for the blue one, and I answer.\n\nDone.\n",
]
WORDS = ["find", "answer", "look", "think", "the", "red", "blue", "alice", "bob", "grün", "7"]
WORDS += ["(", ")", ".", "?", "!", " ", "\n"]
WORD_PATTERN = r"\w+|\s|[^\w\s]"


@dataclass(frozen=True)
class Family:
    """`exact`: decoding a context gives its text back. `text`: free text, not only WORDS, can be encoded."""

    name: str
    tokenizer: Tokenizer
    template: str
    exact: bool = True
    text: bool = True

    def renderer(self, **arguments):
        return Renderer(self.tokenizer, ChatTemplate.of(self.tokenizer, self.template), **arguments)


def template_source(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def special(*names, **flags):
    return [AddedToken(name, special=True, normalized=False, **flags) for name in names]


def byte_level(tokens, plain=()):
    """A byte-level BPE, as in GPT-2 and everything after it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(tokens)
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    return backend


def pieces(*, style):
    """A BPE over pieces that start with a mark for a space, unknown characters as bytes, as sentencepiece makes them.

    `style` is how a space gets before the first word: `first` of a text only, `always` also after special tokens, `never`.
    """
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    backend.train_from_iterator([line.replace("🙂", "").replace("東京", "") for line in CORPUS], trainer)
    content = json.loads(backend.to_str())
    vocabulary = content["model"]["vocab"]
    # The newline and the space mark are in the vocabulary of some and bytes in others; here the newline is a byte.
    newline = vocabulary.pop("\n", None)
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if not any("\n" in part for part in merge)]
    kept = sorted((token for token in vocabulary if "\n" not in token), key=vocabulary.__getitem__)
    assert newline is not None
    names = [*kept[:3], *(f"<0x{value:02X}>" for value in range(256)), *kept[3:]]
    content["model"].update(vocab={name: index for index, name in enumerate(names)}, byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    strip = []
    if style == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        strip = [decoders.Strip(" ", 1, 0)]
    elif style == "always":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(special("<s>", "</s>", "<unk>"))
    return backend


def unigram():
    """A Unigram model under the Metaspace decoder, as T5's and some multilingual models'."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"], unk_token="<unk>"
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def loaded(backend, *stops, bos=None, eos):
    return Tokenizer(backend, eos_ids=[backend.token_to_id(stop) for stop in stops or (eos,)], bos_token=bos, eos_token=eos)


@cache
def family(name):
    template = TINY_CHAT_TEMPLATE if name == "words" else template_source("chatml" if name == "unigram" else name)
    exact, text = name not in ("llama2", "phi", "unigram"), name != "words"
    return Family(name, TOKENIZERS[name](), template, exact=exact, text=text)


def _llama3(*more):
    tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    tokens += more
    backend = byte_level(special(*tokens))
    # Llama 3 cuts words with an expression of its own, which joins line breaks to what stands before them.
    words = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return loaded(backend, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", bos="<|begin_of_text|>", eos="<|eot_id|>")


def _mistral(*more):
    backend = pieces(style="first")
    backend.add_special_tokens(special(*more))
    return loaded(backend, bos="<s>", eos="</s>")


def _phi():
    backend = pieces(style="first")
    # Phi-3's tokens swallow the white space after them.
    backend.add_special_tokens(special("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", rstrip=True))
    backend.add_special_tokens(special("<|endoftext|>"))
    return loaded(backend, "<|endoftext|>", bos="<s>", eos="<|endoftext|>")


def _gemma():
    backend = pieces(style="never")
    backend.add_special_tokens(special("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"))
    return loaded(backend, "<eos>", bos="<bos>", eos="<eos>")


def _qwen():
    backend = byte_level(
        special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    )
    return loaded(backend, "<|im_end|>", "<|endoftext|>", eos="<|im_end|>")


def _glm():
    tokens = special("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    return loaded(byte_level(tokens), "<|endoftext|>", "<|user|>", "<|observation|>", eos="<|endoftext|>")


TOKENIZERS = {
    "chatml": lambda: loaded(byte_level(special("<|endoftext|>", "<|im_start|>", "<|im_end|>")), eos="<|im_end|>"),
    "qwen": _qwen,
    "llama3": _llama3,
    "mistral": _mistral,
    "llama2": lambda: loaded(pieces(style="always"), bos="<s>", eos="</s>"),
    "gemma": _gemma,
    "phi": _phi,
    "glm": _glm,
    "unigram": lambda: loaded(unigram(), eos="<|im_end|>"),
    "words": lambda: loaded(word_level_tokenizer(WORDS, WORD_PATTERN), eos="<|end|>"),
}
FAMILIES = tuple(TOKENIZERS)

MISTRAL_TOKENS = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
MISTRAL_TOKENS += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
TOKENIZERS |= {
    "llama3_tools": lambda: _llama3("<|python_tag|>"),
    "mistral_tools": lambda: _mistral(*MISTRAL_TOKENS),
}
"""The same with the tokens and templates of models that were trained to call tools, beyond FAMILIES."""
