"""Words of a text as an index knows them; queries and passages are cut the same way."""

from __future__ import annotations

import re

STOP_WORDS = frozenset(
    "a an and are as at be but by for from had has have he her his if in into is it its no not of on or s she such t that the "
    "their then there these they this to was were what when where which who whom whose why how will with you".split()
)
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Lower-case words of letters and digits, common English words left out.

    >>> words_of("Which hill is the highest of the Cotswolds?")
    ['hill', 'highest', 'cotswolds']
    """
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]
