"""A report as plain text, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from polyturn.data.findings import Finding, Report
from polyturn.data.formats import BY_NAME, MESSAGES
from polyturn.data.records import place

MOST_OF_A_KIND = 10
"""Warnings of one kind that are shown unless all are asked for. Errors are always all shown."""
MOST_VALUES = 12


def lines(report: Report, *, every: bool = False) -> Iterator[str]:
    """Summary, then findings in the order of the file, then the verdict. `every` shows all warnings too."""
    yield from summary(report)
    yield from _findings(report, every=every)
    yield _verdict(report)


def summary(report: Report) -> Iterator[str]:
    """What the file holds."""
    blank = f", {_count(report.blank_lines, 'blank line')} passed over" if report.blank_lines else ""
    dropped = f", {report.num_dropped:,} dropped by data.transform" if report.num_dropped else ""
    yield f"{report.path}: {report.container}, {_count(report.num_rows, 'row')}{blank}{dropped}"
    for note in report.notes:
        yield f"  note: {note}"
    for name, count in report.formats.most_common():
        yield f"  format: {_format(name)}" + (f" ({count:,} rows)" if len(report.formats) > 1 else "")
    if report.fields:
        shown = (
            f"{name} {there:,}" + (f" ({empty:,} empty)" if empty else "") for name, (there, empty) in report.fields.items()
        )
        yield f"  fields: {', '.join(shown)}"
    if report.lengths is not None:
        found = report.lengths
        limit = "" if found.limit is None else f" of {found.limit:,}"
        cached = ", from the cache" if found.from_cache else ""
        yield (
            f"  opening messages in {found.unit}: mean {found.mean:,.0f}, median {found.median:,.0f}, "
            f"95 % under {found.p95:,.0f}, longest {found.longest:,}{limit} (line {found.longest_line}){cached}"
        )
    yield from _mix("difficulty", report.difficulty)
    yield from _mix("tags", report.tags)
    twice = Counter(finding.kind for finding in report.findings)
    if report.num_rows:
        yield (
            f"  asked twice: {twice['duplicate'] + twice['conflict']:,} the same "
            f"({twice['conflict']:,} with another answer), {twice['near_duplicate']:,} nearly the same"
        )


def as_json(report: Report) -> dict[str, Any]:
    """The whole report, with every finding, as plain JSON."""
    return {
        **{name: getattr(report, name) for name in ("path", "container", "notes", "num_rows", "num_usable", "num_dropped")},
        "blank_lines": report.blank_lines,
        "ok": report.ok,
        "formats": dict(report.formats),
        "fields": {name: {"rows": there, "empty": empty} for name, (there, empty) in report.fields.items()},
        "lengths": None if report.lengths is None else asdict(report.lengths),
        "difficulty": dict(report.difficulty),
        "tags": dict(report.tags),
        "findings": [asdict(finding) for finding in report.findings],
    }


def line_of(report: Report, finding: Finding) -> str:
    """`file:line: reason`, with the word warning before the reason of one."""
    word = "warning: " if finding.severity == "warning" else ""
    return f"{place(report.path, finding.line)}: {word}{finding.reason}"


def _findings(report: Report, *, every: bool) -> Iterator[str]:
    shown: Counter[str] = Counter()
    for finding in report.findings:
        if finding.severity == "warning":
            shown[finding.kind] += 1
            if shown[finding.kind] > MOST_OF_A_KIND and not every:
                continue
        yield line_of(report, finding)
    for kind, count in shown.items():
        if count > MOST_OF_A_KIND and not every:
            yield f"{report.path}: {count - MOST_OF_A_KIND:,} more warnings of the kind {kind}; --all shows them"


def _verdict(report: Report) -> str:
    counts = f"{_count(len(report.errors), 'error')}, {_count(len(report.warnings), 'warning')}"
    usable = f"{report.num_usable:,} of {_count(report.num_rows, 'row')} can be used"
    return f"{'ok' if report.ok else 'not ok'}: {counts}; {usable}"


def _format(name: str) -> str:
    if name == MESSAGES:
        return f"{name} (the last assistant message is the reference)"
    form = BY_NAME[name]
    return f"{name} ({form.prompt!r} asks, {form.answer!r} answers)"


def _mix(name: str, counts: Counter[str]) -> Iterator[str]:
    if counts:
        shown = ", ".join(f"{value} {count:,}" for value, count in counts.most_common(MOST_VALUES))
        more = f", and {len(counts) - MOST_VALUES:,} more" if len(counts) > MOST_VALUES else ""
        yield f"  {name}: {shown}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
