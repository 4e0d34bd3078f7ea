"""What the model is told about its program.

Every line that the program had a say in starts with `| `, and no line of ours does: a program that prints "3 of 3 public tests
pass." is seen to have printed it. Of a traceback only the program's own lines are shown. Long output is cut in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.environments.code.rows import shown_case
from polyturn.programs import OutputCase
from polyturn.sandbox.base import CaseOutcome, RunResult, TestsResult
from polyturn.sandbox.runner import LIMIT_WORDS

MARK = "| "
MOST_TESTS = 3
"""Tests that failed and are shown."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?P<rest>.*)$')
_MOST_CASE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Words about runs and verdicts, at most `max_chars` of the program's own in each part; `brief` says how many pass only."""

    max_chars: int
    brief: bool = False

    def ran(self, result: RunResult, shift: int = 0) -> str:
        """What became of a program: how it ended, what it printed, and its traceback."""
        ends = {"ok": "The program ran to its end.", "error": f"The program ended with exit code {result.exit_code}."}
        lines = [ends.get(result.reason) or f"The program was stopped: {LIMIT_WORDS[result.reason]}."]
        if self.brief:
            return lines[0]
        lines += self._part("output:", result.stdout) or ["no output"]
        lines += self._part("errors:", own_lines(result.stderr, shift))
        return "\n".join(lines)

    def tested(self, result: TestsResult, cases: Sequence[str | OutputCase], shift: int = 0) -> str:
        """How many of the public `cases` pass, what the first others came to, and what the program printed meanwhile."""
        if self.brief:
            return f"{result.passed} of {result.total} pass"
        lines = [f"{result.passed} of {result.total} public tests pass."]
        failed = [index for index, outcome in enumerate(result.outcomes) if outcome.status != "passed"]
        if failed and not result.loaded:
            outcome = result.outcomes[failed[0]]
            lines.append(f"The program itself does not run{_limit(outcome)}:")
            lines += self._part(None, own_lines(outcome.detail, shift))
            failed = []
        for index in failed[:MOST_TESTS]:
            lines += self._case(index, result.outcomes[index], cases[index], shift)
        if len(failed) > MOST_TESTS:
            lines.append(f"and {len(failed) - MOST_TESTS} more")
        lines += self._part("output:", result.stdout)
        return "\n".join(lines)

    def _case(self, index: int, outcome: CaseOutcome, case: str | OutputCase, shift: int) -> list[str]:
        text = shown_case(case)
        text = text if len(text) <= _MOST_CASE else f"{text[:_MOST_CASE]}..."
        lines = [f"test {index + 1} {'failed' if outcome.status == 'failed' else 'ended'}{_limit(outcome)}: {text}"]
        if outcome.status not in ("failed", "error"):
            return lines
        detail = outcome.detail
        if isinstance(case, str):
            # The first line is the test's own, which is shown already; a bare AssertionError says nothing more.
            first, _, rest = detail.partition("\n")
            detail = rest if first.strip() in case else detail
            detail = "" if detail.strip() == "AssertionError" else detail
        elif outcome.status == "failed":
            detail = ""
        return lines + self._part(None, own_lines(detail, shift))

    def _part(self, title: str | None, text: str) -> list[str]:
        if not text.strip():
            return []
        return [*([title] if title else []), *quoted(text.rstrip("\n"), self.max_chars)]


def quoted(text: str, max_chars: int) -> list[str]:
    r"""A program's text line by line behind `| `; cut in the middle, with a line that says so, when it is too long.

    >>> quoted("one\ntwo", 99)
    ['| one', '| two']
    >>> quoted("a" * 10 + "b" * 10, 6)
    ['| aaa', '[14 characters left out]', '| bbb']
    """
    if len(text) <= max_chars:
        return [f"{MARK}{_plain(line)}" for line in text.splitlines()]
    half = max_chars // 2
    head, tail = text[:half], text[len(text) - (max_chars - half) :]
    left_out = f"[{len(text) - max_chars:,} characters left out]"
    return [*quoted(head, max_chars), left_out, *quoted(tail, max_chars)]


def own_lines(trace: str, shift: int = 0) -> str:
    """A traceback without the lines of other files, and with the line numbers of the model's own text, `shift` lines up."""
    kept, keep = [], True
    for line in trace.splitlines():
        match = _FRAME.match(line)
        if match:
            number = int(match["line"]) - shift
            keep = match["file"] == "solution.py" and number > 0
            line = f'  File "solution.py", line {number}{match["rest"]}'
        elif not line.startswith("    "):
            keep = True
        if keep:
            kept.append(line)
    return "\n".join(kept)


def _limit(outcome: CaseOutcome) -> str:
    words = {**LIMIT_WORDS, "not_run": "not run, the time was used up"}.get(outcome.status)
    return f" ({words})" if words else ""


def _plain(line: str) -> str:
    """A line without characters that move a cursor or hide others."""
    return "".join(character if character.isprintable() or character == "\t" else "\ufffd" for character in line)
