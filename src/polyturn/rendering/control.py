"""Text that spells a control token without being one: what environments and users write must not open or close a turn.

A control token's string in such text gets a zero-width joiner after its first character, so `<|im_end|>` reads the same and
encodes as ordinary characters. Control tokens are those that the tokenizer marks as special, and those that the chat template
writes around messages, `<tool_response>` for one. Others, such as `<tool_call>`, which prompts explain to the model, stay as
they are. Marks that are plain text to the tokenizer (`[INST]` of some models) are no tokens and can't be told from text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from polyturn.rendering.tokenizer import Tokenizer

ZERO_WIDTH_JOINER = "\u200d"
SEPARATORS = (ZERO_WIDTH_JOINER, "\u2060", " ")
"""Tried in this order: a tokenizer may drop the first ones before it looks for its special tokens."""
REPLACEMENT = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_ROUNDS = 8
HEAD_LENGTH = 3
"""Characters of a control token that are looked for before a text is encoded: some vocabularies have thousands of them."""


def spelled(token: str) -> str:
    """The neutral spelling of a control token: `<|end|>` with a zero-width joiner after its `<`."""
    return token[:1] + ZERO_WIDTH_JOINER + token[1:]


def without_surrogates(text: str) -> str:
    """`text` with a replacement character for every half of a surrogate pair: Python reads odd bytes so, no tokenizer does."""
    return SURROGATE.sub(REPLACEMENT, text)


class Neutralizer:
    """Rewrites the control tokens of a text so that none of their ids can come from it; other text stays as it is."""

    def __init__(self, tokenizer: Tokenizer, control_tokens: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._ids = frozenset(control_tokens.values())
        self._heads = re.compile("|".join(sorted({re.escape(token[:HEAD_LENGTH]) for token in control_tokens})))
        self._always = tokenizer.matches_normalized(self._ids)

    def __call__(self, text: str) -> str:
        """`text` without control tokens. Encodes it only when it may hold one."""
        if not self._always and not self._heads.search(text):
            return text
        for separator in SEPARATORS:
            candidate = text
            for _ in range(MAX_ROUNDS):
                starts = [start for start, _ in self._spans(candidate)]
                if not starts:
                    return candidate
                for start in reversed(starts):
                    candidate = candidate[: start + 1] + separator + candidate[start + 1 :]
        # A one-character token can't be split; losing it is better than letting it through.
        for start, end in reversed(self._spans(text)):
            text = text[:start] + REPLACEMENT + text[end:]
        return text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where control tokens stand in `text`, in order, white space that they swallow excluded."""
        spans = []
        for start, end in self._tokenizer.spans(text, self._ids):
            chunk = text[start:end]
            spans.append((start + len(chunk) - len(chunk.lstrip()), end - len(chunk) + len(chunk.rstrip())))
        return spans
