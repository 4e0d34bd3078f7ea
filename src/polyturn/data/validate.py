"""Checks a file before anything is trained on it: every bad row, and what is odd about the good ones.

An *error* means that training on the file would be wrong, or lose rows without a word. A *warning* is worth a look. Nothing
here knows tokenizers or environments: the caller passes in how openings are encoded and what an environment makes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from polyturn.data.cache import Tokenised
from polyturn.data.code_rows import find_ruff, is_code, references, run_references, style_findings, syntax_findings
from polyturn.data.duplicates import nearly_same, same, words
from polyturn.data.fields import difficulty_rank
from polyturn.data.findings import Finding, Lengths, Report
from polyturn.data.load import Loaded, load
from polyturn.data.marks import mark_problems
from polyturn.data.transform import Transform
from polyturn.errors import DataError
from polyturn.programs import CodeRunner
from polyturn.types import Message, Row

SHORT_CHARACTERS = 10
"""Questions with fewer characters are remarked on."""
LONG_CHARACTERS = 100_000
"""Without a tokenizer: more than about 25,000 tokens."""


def _nobody_knows(fields: Mapping[str, Any]) -> bool:
    return False


class TaskMaker(Protocol):
    """Makes an environment's opening messages of a row; raises DataError for a row it can't use."""

    def __call__(self, fields: Mapping[str, Any], row: Row | None, where: str) -> Sequence[Message]:
        """The opening messages; `row` is None for fields that make no built-in format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a file is checked against, beyond its own form. The defaults ask for what any training needs.

    `make_task` opens a row as an environment does. `encode_all` turns openings into ids. `context_tokens` is what a trajectory
    may hold, `turn_tokens` what one reply may.
    """

    knows_row: Callable[[Mapping[str, Any]], bool] = _nobody_knows
    """Whether an environment reads a row in fields of its own; any other row must be in a built-in format."""
    need_answer: bool = True
    need_difficulty: bool = False
    make_task: TaskMaker | None = None
    encode_all: Callable[[Sequence[Sequence[Message]]], Tokenised] | None = None
    context_tokens: int | None = None
    turn_tokens: int | None = None
    style: bool = True


@dataclass(slots=True)
class Checked:
    """A report with the rows behind it: those in a built-in format, and every row's opening messages."""

    report: Report
    loaded: Loaded
    rows: list[tuple[int, Row]] = field(default_factory=list)
    openings: list[tuple[int, Sequence[Message]]] = field(default_factory=list)


def check_file(path: str, transform: Transform | None = None, wanted: Wanted | None = None) -> Checked:
    """Check a file.

    Raises:
        DataError: there is no such file, or it can't be read as a whole.
        MissingDependencyError: a container whose package is not installed.
    """
    return check_loaded(load(path, transform), wanted or Wanted())


def check_loaded(loaded: Loaded, wanted: Wanted) -> Checked:
    """Check rows that are read already."""
    source = loaded.source
    report = Report(path=source.path, container=source.shown, blank_lines=source.blank_lines, num_dropped=loaded.dropped)
    report.notes += source.notes
    checked = Checked(report=report, loaded=loaded)
    for line, reason in loaded.problems:
        report.add(line, "error", "row", reason)
    report.num_rows = len(loaded.rows) + sum(line > 0 for line, _ in loaded.problems)
    report.fields = loaded.fields()
    _read_rows(checked, wanted)
    _read_openings(checked, wanted)
    for line, row in checked.rows:
        report.formats[row.format] += 1
        report.findings += syntax_findings(line, row)
        report.tags.update(row.tags)
    _answers(checked)
    _difficulties(checked, wanted)
    _questions(checked)
    _lengths(checked, wanted)
    if wanted.style:
        _style(checked)
    report.finish({line for line, _ in loaded.rows})
    return checked


async def check_references(checked: Checked, runner: CodeRunner) -> None:
    """Run the references of code rows against their own tests, and add what fails to the report."""
    broken = {finding.line for finding in checked.report.errors}
    rows = [(line, row) for line, row in checked.rows if line not in broken]
    read = {line for line, _ in checked.rows}
    others = [(line, fields) for line, fields in checked.loaded.rows if line not in broken | read]
    chosen = references(rows, others)
    findings, count = await run_references(chosen, runner), len(chosen)
    checked.report.findings += findings
    checked.report.notes.append(f"{count} references were run against their own tests, {count - len(findings)} pass")
    without = sum(bool(row.tests or row.test_cases) and row.answer is None for _, row in rows)
    if without:
        checked.report.notes.append(f"{without} rows have tests and no reference to run")
    checked.report.finish({line for line, _ in checked.loaded.rows})


def _read_rows(checked: Checked, wanted: Wanted) -> None:
    """Rows in a built-in format."""
    own = {line for line, fields in checked.loaded.rows if wanted.knows_row(fields)}
    for line, row, problems in checked.loaded.formatted(need_answer=wanted.need_answer):
        if row is not None:
            checked.rows.append((line, row))
        elif line not in own:
            for problem in problems:
                checked.report.add(line, "error", "row", problem)


def _read_openings(checked: Checked, wanted: Wanted) -> None:
    if wanted.make_task is None:
        checked.openings = [(line, row.messages) for line, row in checked.rows]
        return
    rows = dict(checked.rows)
    for line, fields in checked.loaded.rows:
        row = rows.get(line)
        if row is None and not wanted.knows_row(fields):
            continue  # said already
        try:
            checked.openings.append((line, wanted.make_task(fields, row, checked.loaded.place(line))))
        except DataError as error:
            checked.report.add(line, "error", "task", str(error))


def _answers(checked: Checked) -> None:
    """Marked final answers, over all rows of the file."""
    rows = [(line, row) for line, row in checked.rows if not is_code(row)]
    for index, severity, reason in mark_problems([row.answer for _, row in rows]):
        line = rows[index][0]
        checked.report.findings.append(
            Finding(line=line, severity="error" if severity == "error" else "warning", kind="answer", reason=reason)
        )


def _difficulties(checked: Checked, wanted: Wanted) -> None:
    report = checked.report
    given = [(line, fields.get("difficulty")) for line, fields in checked.loaded.rows]
    given = [(line, None if value == "" else value) for line, value in given]
    if all(value is None for _, value in given):
        if wanted.need_difficulty and given:
            report.add(0, "error", "difficulty", "no row has a 'difficulty', and data.curriculum=easy_first orders rows by it")
        return
    for line, value in given:
        report.difficulty["none" if value is None else str(value)] += 1
        if value is None and wanted.need_difficulty:
            report.add(line, "error", "difficulty", "'difficulty' is missing, and data.curriculum=easy_first orders rows by it")
        elif value is not None and difficulty_rank(value) is None:
            reason = f"'difficulty' is {value!r}, whose place is not known; use a number, or easy, medium, hard"
            report.add(line, "error" if wanted.need_difficulty else "warning", "difficulty", reason)


def _questions(checked: Checked) -> None:
    """Questions asked twice or nearly twice, and questions that hardly ask anything."""
    report = checked.report
    answers = dict(checked.rows)
    lines = [line for line, _ in checked.openings]
    texts = ["\n".join(message.content for message in opening if message.role != "system") for _, opening in checked.openings]
    for line, text in zip(lines, texts, strict=True):
        if len(text.strip()) < SHORT_CHARACTERS:
            report.add(line, "warning", "short", f"the question has only {len(text.strip())} characters: {text.strip()!r}")
    for likeness in same(texts):
        line, earlier = lines[likeness.index], lines[likeness.earlier]
        mine, theirs = answers.get(line), answers.get(earlier)
        if mine and theirs and not mine.tests and words(mine.answer or "") != words(theirs.answer or ""):
            report.add(line, "warning", "conflict", f"the same question as on line {earlier}, with another answer")
        else:
            report.add(line, "warning", "duplicate", f"the same question as on line {earlier}")
    for likeness in nearly_same(texts):
        line, earlier = lines[likeness.index], lines[likeness.earlier]
        reason = f"nearly the same question as on line {earlier} ({likeness.share:.0%} of their runs of words)"
        report.add(line, "warning", "near_duplicate", reason)


def _lengths(checked: Checked, wanted: Wanted) -> None:
    """How long the openings are, and whether the longest leave room for a reply."""
    report, openings = checked.report, checked.openings
    if not openings:
        return
    characters = np.array([sum(len(message.content) for message in opening) for _, opening in openings])
    if wanted.encode_all is None:
        whole = dict(checked.rows)
        for (line, _), opening in zip(openings, characters, strict=True):
            row = whole.get(line)
            size = int(opening) + len((row.answer if row else None) or "")
            if size > LONG_CHARACTERS:
                reason = f"about {size:,} characters, far over any usual context: no rollout of it would fit, leave the row out"
                report.add(line, "warning", "length", reason)
        too_long = sum(finding.kind == "length" for finding in report.findings)
        if too_long:
            report.notes.append(f"{too_long} of {len(openings)} rows are too long for any usual context")
        report.lengths = _summary(characters, [line for line, _ in openings], "characters", None)
        return
    tokenised = wanted.encode_all([opening for _, opening in openings])
    for index, reason in sorted(tokenised.problems.items()):
        report.add(openings[index][0], "error", "length", reason)
    lengths, limit = tokenised.lengths, wanted.context_tokens
    if limit is not None:
        for (line, _), length in zip(openings, lengths, strict=True):
            left = limit - int(length)
            name = f"rollout.max_trajectory_tokens={limit:,}"
            if left < 1:
                reason = f"the opening takes {int(length):,} tokens, which leaves no room for a reply in {name}"
                report.add(line, "error", "length", reason)
            elif wanted.turn_tokens is not None and left < wanted.turn_tokens:
                reason = f"the opening takes {int(length):,} tokens, which leaves {left:,} of {name} for all replies"
                report.add(line, "warning", "length", reason)
    report.lengths = _summary(lengths, [line for line, _ in openings], "tokens", limit, tokenised.from_cache)


def _summary(sizes: Any, lines: Sequence[int], unit: Any, limit: int | None, from_cache: bool = False) -> Lengths:
    longest = int(np.argmax(sizes))
    return Lengths(
        unit=unit,
        mean=float(np.mean(sizes)),
        median=float(np.median(sizes)),
        p95=float(np.percentile(sizes, 95)),
        longest=int(sizes[longest]),
        longest_line=lines[longest],
        limit=limit,
        from_cache=from_cache,
    )


def _style(checked: Checked) -> None:
    code = [(line, row) for line, row in checked.rows if is_code(row)]
    if not code:
        return
    ruff = find_ruff()
    if ruff is None:
        checked.report.notes.append("ruff is not installed, so the style of code was not looked at")
    else:
        checked.report.findings += style_findings(code, ruff)
