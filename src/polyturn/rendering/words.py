"""The tokenizer of `builtin:tiny`: one token a word of a closed vocabulary, and the chat template that goes with it.

    <|user|>find(alice)<|end|><|assistant|>red<|end|><|tool|>yes<|end|><|assistant|>

Text made of other words can't be encoded: `Tokenizer.encode` raises and names the word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from polyturn.errors import ModelError
from polyturn.rendering.control import spelled

END_TOKEN = "<|end|>"
SPECIAL_TOKENS = ("<|user|>", "<|tool|>", "<|assistant|>", "<|system|>", END_TOKEN)
"""Ids 0 to 4. Their neutral spellings follow, so that an environment may quote a control token that the policy wrote."""

TINY_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>' }}
{%- endif -%}
"""


def word_level_tokenizer(words: Sequence[str], pattern: str) -> tokenizers.Tokenizer:
    """A tokenizer with one id per word, in the order given after the special tokens; decoding gives the text back exactly.

    `pattern` is a regular expression whose matches, and whatever stands between them, are the words of a text. Raises
    ModelError when it is no regular expression, or cuts a word that should be one token.

    >>> tokenizer = word_level_tokenizer(["red", " ", "blue"], "[a-z]+| ")
    >>> tokenizer.decode(tokenizer.encode("red blue<|end|>").ids, skip_special_tokens=False)
    'red blue<|end|>'
    """
    try:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the word pattern {pattern!r} is not a regular expression: {error}; correct it") from error
    literals = [spelled(token) for token in SPECIAL_TOKENS]
    for word in words:
        if [piece for piece, _ in cut.pre_tokenize_str(word)] != [word] or any(token in word for token in SPECIAL_TOKENS):
            raise ModelError(
                f"the word {word!r} is not one piece under the pattern {pattern!r}; change the word or the pattern"
            )
    vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *literals, *words])
    # No unknown token: a word outside the vocabulary is a mistake, and the tokenizer says so.
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = cut
    # Without a decoder the library puts a space between tokens.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(literal, special=False, normalized=False) for literal in literals])
    return tokenizer


def save_word_tokenizer(folder: str | Path, words: Sequence[str], pattern: str) -> None:
    """Write the tokenizer of `words` with its chat template, in the files that `Tokenizer.load` and transformers read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    word_level_tokenizer(words, pattern).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TINY_CHAT_TEMPLATE, encoding="utf-8")
