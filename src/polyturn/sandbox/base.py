r"""The contract of a sandbox: a program and its limits in, a result or a verdict out.

    sandbox = LocalSandbox()
    await sandbox.start()
    result = await sandbox.run(Program(source="print(6 * 7)"))               # result.stdout == "42\n"
    verdict = await sandbox.run_tests(
        Program(source="def add(a, b): return a + b"), Tests(cases=("assert add(2, 3) == 5",))
    )                                                                       # verdict.passed == verdict.total == 1

A limit that the program hits is a result, and is scored. A sandbox that breaks raises SandboxError, so that whoever asked can
tell its own fault from the program's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol, TypeAlias

from polyturn.errors import ConfigError, DataError
from polyturn.programs import OutputCase as OutputCase

MIB = 1 << 20
_MOST_PATH, _MOST_NAME = 2048, 255

ExitReason: TypeAlias = Literal["ok", "error", "timeout", "memory", "output", "files", "killed"]
"""Why a program ended: exit code 0; another code or an exception; a limit of time, memory, output or files; a signal."""
CaseStatus: TypeAlias = Literal["passed", "failed", "error", "timeout", "memory", "output", "files", "killed", "not_run"]
"""How a test case went. `failed`: an assertion did not hold. `error`: something else was raised, or the program had left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use, all of its processes together unless it says otherwise.

    Raises:
        ConfigError: a limit that is not positive, or memory that Python itself would not fit in.
    """

    wall_s: float = 10.0
    """Wall clock, from the program's first line to its end; with tests, all cases together."""
    cpu_s: float = 10.0
    """Processor time of each process."""
    memory_bytes: int = 512 * MIB
    """Memory on top of what the interpreter has at start. Also bounds the address space of each process."""
    num_processes: int = 16
    """Processes and threads at one time, the first included."""
    output_bytes: int = MIB
    """Standard output and standard error together. A program that writes more is ended."""
    file_bytes: int = 16 * MIB
    """Size of the private folder, and of any file."""
    num_files: int = 512
    """Files and folders in the private folder."""
    open_files: int = 64
    """File descriptors of each process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"sandbox limit {name}={getattr(self, name)} must be more than 0; leave it out for the default"
                )
        if self.memory_bytes < 16 * MIB:
            raise ConfigError(
                f"sandbox limit memory_bytes={self.memory_bytes} is less than Python needs; set at least {16 * MIB}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Python source to run, what it reads from standard input, and files to put into its private folder by relative path.

    Raises:
        DataError: a file name that is absolute, empty, too long, leads out of the folder, or is also a folder.
    """

    source: str
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folders = {str(folder) for name in self.files for folder in PurePosixPath(name).parents}
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or re.search("[\0\ud800-\udfff]", name):
                raise DataError(f"file name {name!r} must be relative and stay in the program's folder; rename it")
            if str(path) in folders:
                raise DataError(f"file name {name!r} is also a folder of another file; rename one of them")
            if len(name.encode()) > _MOST_PATH or any(len(part.encode()) > _MOST_NAME for part in path.parts):
                raise DataError(
                    f"file name {name[:40]!r}... is longer than a disk takes ({_MOST_NAME} bytes a part); rename it"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a program ended and what it wrote. `exit_code` or `signal` is None where the other one ended it.

    `seconds` is wall time, `cpu_s` processor time of all its processes that were waited for.
    """

    reason: ExitReason
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    seconds: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.reason == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Test cases. A string is Python code that must not raise; an `OutputCase` runs the whole program.

    Code cases share one namespace in a process of their own, where `setup` ran once: what it defines is theirs, and other names
    come from the program. Cases must stand alone, since after a case that ends the program the rest goes on in a fresh one.
    `entry_points` are the names to take from the program. None takes every name that the tests use, don't bind, and that is
    neither a builtin nor used as a module of the standard library: say them where they are known, since then a helper that the
    tests forgot to define is an error and not the program's choice. `classes` are those of them that are classes, whose objects
    may answer for themselves; None takes names with a capital for classes, and their objects answer less (`sandbox.proxies`).
    `module` is the name to import the program by.

    Raises:
        DataError: a `module` that is no name or another module's, a `case_s` that is not positive.

    >>> Tests(setup="import math", cases=("assert math.isclose(area(1), math.pi)",)).total
    1
    """

    cases: tuple[str | OutputCase, ...]
    setup: str = ""
    entry_points: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    module: str = "solution"
    case_s: float | None = None
    """Wall clock of one case; None leaves all cases the `wall_s` of the limits together."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __post_init__(self) -> None:
        if not self.module.isidentifier() or self.module in sys.stdlib_module_names:
            raise DataError(f"tests can't import the program as {self.module!r}; use a name that no other module has")
        if self.case_s is not None and not self.case_s > 0:
            raise DataError(f"case_s={self.case_s} must be more than 0; leave it out to give all cases one time")

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """How one case went; `detail` is the exception, or why it could not be judged."""

    status: CaseStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsResult:
    """The verdict on all cases, in their order, and what the program wrote meanwhile."""

    outcomes: tuple[CaseOutcome, ...]
    stdout: str
    stderr: str
    seconds: float
    loaded: bool = True
    """False where the program itself did not come to its end, so that no test could be asked anything."""

    __test__ = False

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.outcomes)

    @property
    def passed(self) -> int:
        """Number of cases that passed."""
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    @property
    def all_passed(self) -> bool:
        """Whether there were cases and all passed."""
        return self.passed == self.total > 0

    @property
    def reason(self) -> CaseStatus:
        """`passed`, or the status of the first case that did not."""
        return next((outcome.status for outcome in self.outcomes if outcome.status != "passed"), "passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of defence: whether it holds on this machine, and how, or why not. `needed` ones can't be missing."""

    name: str
    held: bool
    how: str
    needed: bool

    def __str__(self) -> str:
        return f"{'held    ' if self.held else 'NOT held'}  {self.name}: {self.how}"


class Sandbox(Protocol):
    """Runs programs apart from everything else. All methods may be called from one event loop, many at a time."""

    @property
    def isolation(self) -> tuple[Line, ...]:
        """What holds, known once started."""

    async def start(self) -> None:
        """Make ready. Raises IsolationError where a needed line does not hold, SandboxError where it can't start."""

    async def stop(self) -> None:
        """End every program and free everything. A stopped sandbox can be started again."""

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run a program to its end or its limit. Raises SandboxError when the sandbox broke."""

    async def run_tests(self, program: Program, tests: Tests, limits: Limits | None = None) -> TestsResult:
        """Judge a program by tests that it can't reach. Raises SandboxError when the sandbox broke."""
