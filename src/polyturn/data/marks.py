"""Answers of the form `steps, then #### NUMBER`: whether each row of such a file ends in a number that can be compared.

What a mark's number is worth is the environment's business; here it is only asked whether there is exactly one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MARK = "####"
_OFTEN = 0.5
_LATEX = ((re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"), (re.compile(r"\\(?:boxed|text|mathrm)\b"), ""))
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?|\.\d+")
_DECIMAL_COMMA = re.compile(r"(?<![\d,])\d+,\d{1,2}(?![\d,])")


def final_answer(answer: str) -> str | None:
    r"""What follows the last mark, None without a mark.

    >>> final_answer("8 * 9 = 72\n####72")
    '72'
    """
    _, mark, tail = answer.rpartition(MARK)
    return tail.strip() if mark else None


def reads_as_number(text: str) -> bool:
    """Whether exactly one number stands in a final answer, with whatever unit or LaTeX around it."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return len(_NUMBER.findall(text)) == 1


def mark_problems(answers: Sequence[str | None]) -> list[tuple[int, str, str]]:
    """Index, severity and reason of what is wrong with answers of a file that uses the mark. Empty where few rows do."""
    known = [answer for answer in answers if answer is not None]
    finals = [final_answer(answer) for answer in known]
    marked = [final for final in finals if final is not None]
    if len(marked) < 2 or len(marked) < _OFTEN * len(known):
        return []
    numeric = sum(map(reads_as_number, marked)) >= _OFTEN * len(marked)
    found = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        final = final_answer(answer)
        if final is None:
            found.append((index, "error", f"the answer has no '{MARK} ' line, which {len(marked)} of {len(known)} rows have"))
        elif not final:
            found.append((index, "error", f"nothing follows '{MARK}' in the answer"))
        elif numeric and not reads_as_number(final):
            found.append((index, "error", f"the final answer {final[:40]!r} is not a number, as it is in the other rows"))
        elif numeric and _DECIMAL_COMMA.search(final):
            found.append(
                (index, "warning", f"the final answer {final[:40]!r} is ambiguous: a thousands mark or a decimal comma")
            )
    return found
