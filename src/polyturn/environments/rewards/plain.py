r"""Rewrites mathematical text the way a typewriter would have it: `\frac{3}{4}` as `3/4`, `3½` as `3 1/2`, `−7` as `-7`.

Only what keeps the value is rewritten; a LaTeX command that is not known keeps its backslash, so that a reader can refuse it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_LETTERS = str.maketrans(
    dict.fromkeys("−‐‑‒–—﹣－", "-")  # noqa: RUF001 - these are the minus signs people type
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u205f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {"⁄": "/", "∕": "/", "÷": "/", "⋅": "×", "·": "×", "％": "%", "，": ","}  # noqa: RUF001
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUPERSCRIPT_VALUES = str.maketrans(_SUPERSCRIPTS, "0123456789+-")
_SIMPLE = r"\s*([-+]?[\d.,]+)\s*"

_Rule = tuple["re.Pattern[str]", "str | Callable[[re.Match[str]], str]"]


def _fraction(match: re.Match[str]) -> str:
    r"""`3/4`, with a space before it where a whole number stands there: `3\frac{1}{2}` is three and a half."""
    return _space_after_digit(match) + "/".join(match.groups())


def _vulgar(match: re.Match[str]) -> str:
    return _space_after_digit(match) + unicodedata.normalize("NFKC", match.group()).replace("\u2044", "/")


def _space_after_digit(match: re.Match[str]) -> str:
    return " " if match.string[: match.start()][-1:].isdigit() else ""


_RULES: tuple[_Rule, ...] = (
    # LaTeX: spaces, text, brackets, percent and money signs, operators, fractions.
    (re.compile(r"(?<=\d)(?:\\[,!:; ]|\{,\}|~)(?=\d{3})"), ""),
    (re.compile(r"\\(?:[,!:; ]|q?quad\b)|~"), " "),
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|boxed|fbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:left|right|displaystyle|[()\[\]])(?![A-Za-z])"), " "),
    (re.compile(r"\\([%$#&_])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),  # noqa: RUF001
    (re.compile(r"\\approx(?![A-Za-z])"), "≈"),
    (re.compile(r"\\[dtc]?frac\s*(?:\{" + _SIMPLE + r"\}\s*\{" + _SIMPLE + r"\})"), _fraction),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)"), _fraction),
    (re.compile(r"\^ ?\{? ?\\circ ?\}?"), "°"),
    (re.compile(r"\\(?:pounds|euro|yen)(?![A-Za-z])"), "$"),
    # Powers: `^{-3}` and superscripts as `^-3`; one after a letter belongs to a unit and goes.
    (re.compile(f"[{_SUPERSCRIPTS}]+"), lambda match: "^" + match.group().translate(_SUPERSCRIPT_VALUES)),
    (re.compile(r"\^\s*\{\s*([-+]?)\s*(\d+)\s*\}"), r"^\1\2"),
    (re.compile(r"(?<=[A-Za-z])\s*\^[-+]?\d+"), ""),
    (re.compile(r"(?<=\d)\s*[xX*×]\s*(?=10\s*\^)"), "×"),  # noqa: RUF001
    # Typography: vulgar fractions, spaces and marks between thousands, emphasis, currency codes, signs in words.
    (re.compile("[¼-¾⅐-⅞]"), _vulgar),
    (re.compile(r"(?<=\d)[_'’](?=\d{3})"), ""),  # noqa: RUF001
    (re.compile(r"`|\*\*|__|(?<!\S)[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?=[\s.,;:!?)]|$)"), ""),
    (re.compile(r"\b(?:USD|EUR|GBP|INR|JPY|CNY|CAD|AUD|US|Rs\.?)\s*(?=[-$\d])", re.I), "$"),
    (re.compile(r"\b(?:minus|negative)\s+(?=[$€£¥₹]?[\d.])", re.I), "-"),
    (re.compile(r"\bper\s+cent\b", re.I), "percent"),
)


def plain(text: str) -> str:
    r"""`text` without LaTeX, typographic letters and emphasis, as far as that changes no value.

    >>> plain(r"The total is $3\frac{1}{2}$ \text{cups}")
    'The total is $3 1/2$  cups '
    """
    # A thin space stands between thousands; any other one between words.
    text = re.sub("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))", "", text).translate(_LETTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
