"""`builtin:arithmetic`: tiny programs in a closed vocabulary, for `builtin:tiny`.

    user:   3: *  +  -  // f(2)=5, f(4)=7      a constant, what may be done with it, and two examples: the public tests
    model:  def f(x): return x * 3
    tool:   0 of 2 pass
    model:  def f(x): return x + 3
    tool:   2 of 2 pass
    model:  done

The constant is added, subtracted, multiplied with, or divided by, and the four are listed in any order; two more examples are
hidden. There are 720 problems, a fifth of which are held out. Demonstrations go through the list, but give up 65 % of the time
after a guess that failed: three quarters of them guess wrong first, and about 38 % end with the right program.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import permutations

from polyturn.environments.base import TaskList, Vocabulary
from polyturn.environments.code.problems import Problem
from polyturn.environments.code.rows import CodeRow
from polyturn.types import Message, Split, Task, TaskSource

NAME = "builtin:arithmetic"
SUBMIT = "done"
GIVE_UP_SHARE = 0.65
CONSTANTS = INPUTS = tuple(range(2, 8))
HIDDEN_INPUTS = (9, 11)
HEAD = "def f(x): return "
OPERATORS = (" + ", " - ", " * ", " // ")
NUM_PUBLIC = 2
_HELD_OUT_OF = 5


def source(split: Split, seed: int, make: Callable[[CodeRow, str], Task]) -> TaskSource:
    """The held-out fifth of all problems, in one order; or the others, drawn by `seed` without end."""
    problems = [problem for problem in _all() if _held_out(problem) == (split == "eval")]
    if split == "eval":
        return TaskList([make(_row(*problem), f"arithmetic/eval/{index}") for index, problem in enumerate(problems)])
    return _Endless(problems, seed, make)


def demonstration(task: Task, rng: random.Random, max_attempts: int) -> list[str]:
    """Guesses until one is right or it is given up."""
    constant, _, rest = task.messages[-1].content.partition(":")
    listed = rest.partition("f(")[0]
    replies = list[str]()
    # In the order of the list: a choice that can't be told can't be copied.
    for operator in sorted(OPERATORS, key=listed.index):
        replies.append(f"{HEAD}x{operator}{constant}")
        if len(replies) == max_attempts:
            return replies
        if replies[-1] == task.answer or rng.random() < GIVE_UP_SHARE:
            break
    return [*replies, SUBMIT]


def vocabulary(num_public: int) -> Vocabulary:
    """Words of problems, programs and brief feedback on `num_public` tests."""
    public = min(num_public, NUM_PUBLIC)
    numbers = sorted(
        {_value(operator, c, x) for operator in OPERATORS for c in CONSTANTS for x in INPUTS} | {*CONSTANTS, *INPUTS}
    )
    feedback = [f"{passed} of {public} pass" for passed in range(public + 1)]
    marks = [HEAD, "x", *OPERATORS, "f(", ")=", ", ", ":", SUBMIT, "error"]
    return Vocabulary(
        words=(*marks, *feedback, *map(str, numbers)),
        pattern=r"\d of \d pass|def f\(x\): return |-?\d+| (?:[+*-]|//) |f\(|\)=|, |:|x|[a-z]+",
        copied=frozenset((*OPERATORS, *map(str, CONSTANTS))),
    )


class _Endless:
    """Problems drawn when asked for."""

    size: int | None = None

    def __init__(self, problems: Sequence[tuple[str, int, int, int]], seed: int, make: Callable[[CodeRow, str], Task]) -> None:
        self._problems = problems
        self._seed = seed
        self._make = make

    def __getitem__(self, index: int) -> Task:
        rng = random.Random(f"arithmetic/{self._seed}/{index}")
        return self._make(_row(*rng.choice(self._problems)), f"arithmetic/train/{self._seed}/{index}")


def _all() -> list[tuple[str, int, int, int]]:
    pairs = list(permutations(INPUTS, 2))
    return [(operator, constant, one, other) for operator in OPERATORS for constant in CONSTANTS for one, other in pairs]


def _held_out(problem: tuple[str, int, int, int]) -> bool:
    return hashlib.blake2b(repr(problem).encode(), digest_size=8).digest()[0] % _HELD_OUT_OF == 0


def _row(operator: str, constant: int, one: int, other: int) -> CodeRow:
    inputs = (one, other, *HIDDEN_INPUTS)
    cases = tuple(f"assert f({x}) == {_value(operator, constant, x)}" for x in inputs)
    shown = ", ".join(f"f({x})={_value(operator, constant, x)}" for x in inputs[:NUM_PUBLIC])
    order = random.Random(f"{operator}/{constant}/{one}/{other}").sample(OPERATORS, len(OPERATORS))
    return CodeRow(
        messages=(Message(role="user", content=f"{constant}:{''.join(order)}{shown}"),),
        reference=f"{HEAD}x{operator}{constant}",
        problem=Problem(cases=cases, most_public=NUM_PUBLIC, names=("f",), classes=()),
    )


def _value(operator: str, c: int, x: int) -> int:
    return {" + ": x + c, " - ": x - c, " * ": x * c, " // ": x // c}[operator]
