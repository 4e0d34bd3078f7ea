"""Text that spells a control token without being one: what environments and users write must not open or close a turn.

A special token's string in such text gets a zero-width joiner after its first character, so `<|im_end|>` reads the same and
encodes as ordinary characters. Only tokens that the tokenizer marks as special count: `<tool_call>` and its like, which
prompts explain to the model, stay as they are.
"""

from __future__ import annotations

import re

from polyturn.rendering.tokenizer import Tokenizer

ZERO_WIDTH_JOINER = "\u200d"
SEPARATORS = (ZERO_WIDTH_JOINER, "\u2060", " ")
"""Tried in this order: a tokenizer may drop the first ones before it looks for its special tokens."""
REPLACEMENT = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_ROUNDS = 8


def spelled(token: str) -> str:
    """The neutral spelling of a control token: `<|end|>` with a zero-width joiner after its `<`."""
    return token[:1] + ZERO_WIDTH_JOINER + token[1:]


class Neutralizer:
    """Rewrites the control tokens of a text so that none of their ids can come from it; other text stays as it is.

    Half a surrogate pair, which no tokenizer takes, becomes the replacement character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._always = tokenizer.matches_normalized

    def __call__(self, text: str) -> str:
        """`text` without control tokens. Encodes it only when it may hold one."""
        text = SURROGATE.sub(REPLACEMENT, text)
        if not self._always and not self._pattern.search(text):
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
        for start, end in self._tokenizer.control_spans(text):
            chunk = text[start:end]
            spans.append((start + len(chunk) - len(chunk.lstrip()), end - len(chunk) + len(chunk.rstrip())))
        return spans
