"""Programs that models write: taking one out of a reply, and the seam to whatever runs it.

A reply may be the program itself, or hold it in fences, as in

    Here is the function:
    ```python
    def add(a, b): ...
    ```

The rule: of the fenced blocks, the last one tagged as Python counts; without such a tag the last one without any tag; else the
last one. Blocks without text are passed over while another has some. A fence opens and closes at the start of a line (white
space aside), so three backticks inside a line of the program close nothing, and a fence that is never closed runs to the end.
"""

from __future__ import annotations

import ast
import re
import textwrap
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from polyturn.errors import DataError

Dress = Literal["bare", "fence", "empty_fence", "none"]
"""How a reply holds its program: as it is, in a fence, in a fence without text, or not at all."""

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<tag>[\w+.-]*)(?P<rest>.*)")
_PYTHON_TAGS = frozenset(("python", "py", "python3", "py3"))
_CODE_LINE = re.compile(
    r"\s*(?:(?:async\s+def|def|class)\s+\w+\s*[(:]|(?:import|from)\s+\w[\w.]*\s*(?:$|import\b|as\b|,)"
    r"|(?:for|while|if|with|try|else|elif|except)\b.*:\s*$|return\b(?!.*\.$)|@\w+|[\w.\[\]'\"]+(?:\s*,\s*[\w.\[\]'\"]+)*\s*[-+*/]?=(?!=)\s*\S"
    r"|[\w.]+\(.*\)\s*$)"
)
MOST_CHARACTERS = 200_000
"""Longer programs are not parsed."""
_FILTERS = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a reply holds as its program; `code` is empty when `dress` is `empty_fence` or `none`."""

    code: str
    dress: Dress


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a program and its tests.

    `loaded`: the program itself ran to its end. `passed` has one entry a test, False for those that were not reached. `reason`
    says what ended it, None when all went well.

    >>> Verdict(loaded=True, passed=(True, False), reason="AssertionError in test 2").share
    0.5
    """

    loaded: bool
    passed: tuple[bool, ...]
    reason: str | None = None

    @property
    def share(self) -> float:
        """Passed tests among all of them; 0 without tests."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0

    @property
    def all_passed(self) -> bool:
        """Whether the program ran, there were tests, and every one passed."""
        return self.loaded and bool(self.passed) and all(self.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCase:
    """A test of what a whole program prints: its standard output must be `stdout`, blanks at line ends and the end aside."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoints:
    """The names that tests take from a program, and which of them are classes. Everything else that tests use is their own."""

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()


class CodeRunner(Protocol):
    """Runs programs that nobody trusts. A limit that the program hits is a verdict; a fault of the runner's own is raised."""

    async def run_tests(self, code: str, tests: Sequence[str | OutputCase], entry_points: EntryPoints | None = None) -> Verdict:
        """Run `code`, then each of `tests`: Python statements that see its names, or cases that run all of it.

        Without tests the question is whether the program runs to its end. `entry_points` are the names to take from the
        program, where they are known; None leaves it to the runner to guess them from the tests.
        """


def row_tests(tests: Sequence[Any], test_cases: Sequence[Mapping[str, Any]] = ()) -> list[str | OutputCase]:
    """A row's `tests`, then its `test_cases` with `input` and `output`, as cases to run.

    Raises:
        DataError: a case whose input or output is no text, number or truth value: what is to be read or printed is not clear.

    >>> row_tests([], [{"input": "2 3", "output": 5}])
    [OutputCase(stdin='2 3', stdout='5')]
    """
    cases: list[str | OutputCase] = [str(test) for test in tests]
    for index, case in enumerate(test_cases):
        for name in ("input", "output"):
            if not isinstance(case[name], str | int | float):
                raise DataError(
                    f"test_cases[{index}].{name} is a {type(case[name]).__name__}; it must be the text that a program reads or "
                    "prints, or write the case as a statement under tests"
                )
        cases.append(OutputCase(stdin=str(case["input"]), stdout=str(case["output"])))
    return cases


def entry_points(reference: str, tests: Sequence[str]) -> EntryPoints | None:
    """What `tests` use of the functions and classes that `reference` defines; None where that can't be told.

    >>> entry_points("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    EntryPoints(names=('add',), classes=())
    """
    defined, used = _defined(reference), set[str]()
    for test in tests:
        tree = parsed(test)
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree else set()
    names = tuple(sorted(used & set(defined)))
    return EntryPoints(names=names, classes=tuple(name for name in names if defined[name])) if names else None


def defines(code: str, names: Sequence[str]) -> bool:
    """Whether a program has a function or class of its own for every one of `names`, at its top.

    >>> defines("def add(a, b): return a + b", ["add"]), defines("add", ["add"])
    (True, False)
    """
    return set(names) <= set(_defined(code))


def program_in(text: str) -> Program:
    r"""The program in a reply, by the rule at the top of this module.

    >>> program_in("So:\n```py\nx = 1\n```\nDone.").code
    'x = 1'
    >>> program_in("The function adds a and b.").dress
    'none'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    blocks = fenced_blocks(text)
    if blocks:
        filled = [(tag, code) for tag, code in blocks if code.strip()]
        if not filled:
            return Program(code="", dress="empty_fence")
        python = [code for tag, code in filled if tag in _PYTHON_TAGS]
        untagged = [code for tag, code in filled if not tag]
        return Program(code=(python or untagged or [code for _, code in filled])[-1], dress="fence")
    if looks_like_code(text):
        return Program(code=text.strip("\n"), dress="bare")
    return Program(code="", dress="none")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Tag (lower case, may be empty) and text of every fenced block, in order. The last one may be open at the end."""
    blocks: list[tuple[str, str]] = []
    fence: re.Match[str] | None = None
    inside: list[str] = []
    for line in text.split("\n"):
        if fence is None:
            match = _OPENING.fullmatch(line)
            # A line such as ```x``` is text in backticks, not a fence.
            if match is not None and not (match["marks"][0] == "`" and "`" in match["rest"]):
                fence, inside = match, []
        elif _closes(line, fence):
            blocks.append(_block(fence, inside))
            fence = None
        else:
            inside.append(line)
    if fence is not None:
        blocks.append(_block(fence, inside))
    return blocks


def looks_like_code(text: str) -> bool:
    """Whether a text without fences is a program, or at least tries to be one, rather than prose."""
    stripped = text.strip()
    if not stripped:
        return False
    if any(_CODE_LINE.match(line) for line in stripped.split("\n")):
        return True
    return "\n" not in stripped and not re.search(r"[^\W\d]\s+[^\W\d]", stripped) and syntax_problem(stripped) is None


def syntax_problem(code: str) -> str | None:
    r"""Why `code` is not valid Python, None when it is.

    >>> syntax_problem("def f(:\n    pass")
    'line 1: invalid syntax'
    """
    if len(code) > MOST_CHARACTERS:
        return f"{len(code):,} characters, more than the {MOST_CHARACTERS:,} that are parsed"
    try:
        parse(code)
    except SyntaxError as error:
        return error.msg if error.lineno is None else f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it can't be parsed ({type(error).__name__}: {error})"
    return None


def _closes(line: str, fence: re.Match[str]) -> bool:
    """Whether `line` ends the block: the same mark, as many of it or more, nothing else, not far to the right."""
    stripped = line.strip()
    marks = fence["marks"]
    indent = len(line) - len(line.lstrip())
    return len(stripped) >= len(marks) and set(stripped) == {marks[0]} and indent <= len(fence["indent"]) + 3


def _block(fence: re.Match[str], lines: Sequence[str]) -> tuple[str, str]:
    code = "\n".join(lines)
    return fence["tag"].lower(), textwrap.dedent(code) if fence["indent"] else code


def parsed(code: str) -> ast.Module | None:
    """A program as a tree, without the warnings that Python has for it; None where `syntax_problem` says why not."""
    if syntax_problem(code) is not None:
        return None
    return parse(code)


def parse(code: str) -> ast.Module:
    """A program as a tree, without the warnings that Python has for it, as of unknown escapes. Raises what `ast.parse` does."""
    # Python's filters belong to the whole process: what one thread puts back after itself would undo another's.
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _defined(code: str) -> dict[str, bool]:
    """Names that a program binds at its top to a function, a class or a lambda; True for classes."""
    found: dict[str, bool] = {}
    tree = parsed(code)
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found |= {target.id: False for target in node.targets if isinstance(target, ast.Name)}
    return found
