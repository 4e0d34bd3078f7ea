"""What a check found, and the numbers it counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning"]
Kind = Literal[
    "row",
    "answer",
    "code",
    "tests",
    "style",
    "length",
    "duplicate",
    "near_duplicate",
    "conflict",
    "short",
    "difficulty",
    "task",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about one line (0: the file as a whole). With an error, training on the file would be wrong."""

    line: int
    severity: Severity
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens (or characters, without a tokenizer) of the opening messages."""

    unit: Literal["tokens", "characters"]
    mean: float
    median: float
    p95: float
    longest: int
    longest_line: int
    limit: int | None = None
    from_cache: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """A checked file."""

    path: str
    container: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_rows: int = 0
    """Rows that were found, good or bad."""
    num_usable: int = 0
    """Rows without an error."""
    num_dropped: int = 0
    """Rows that the transform left out."""
    blank_lines: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    fields: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    lengths: Lengths | None = None
    difficulty: Counter[str] = field(default_factory=Counter)
    tags: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> list[Finding]:
        """Findings that training must not go on with."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """The others."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Whether the file can be trained on."""
        return not self.errors

    def add(self, line: int, severity: Severity, kind: Kind, reason: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(line=line, severity=severity, kind=kind, reason=reason))

    def finish(self, lines: set[int]) -> None:
        """Sort the findings and count the usable ones of the rows on `lines`."""
        self.findings.sort(key=lambda finding: finding.line)
        self.num_usable = len(lines - {finding.line for finding in self.errors})
