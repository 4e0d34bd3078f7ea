"""The child process behind `reasoning_gym`: it makes tasks and scores answers, a line of JSON in, a line out.

    {"make": [seed, index]}             {"question": ..., "answer": ..., "gold": ...}
    {"score": [seed, index, answer]}    {"score": 0.0 to 1.0}, or {"unreadable": why} for an answer that the scorer chokes on

Some scorers of the package hand the answer to `eval`. Such an answer must be a literal, or an expression of numbers and known
functions; a scorer that evaluates and is not known here is refused. And the process, once it is ready, reads nothing but its
libraries, writes nothing and reaches nobody, where the kernel can see to that. It dies by its memory, or by the time that an
answer takes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import random
import re
import resource
import signal
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from polyturn.errors import nearest
from polyturn.sandbox import kernel, landlock, seccomp

CHUNK = 1024
"""Tasks of one data set of the package; the next one has another seed."""
MEMORY_BYTES = 4 * 2**30
MAX_ANSWER_CHARS = 20_000
LITERALS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
"""Their scorers call `eval` on an answer that is not the expected text."""
EXPRESSIONS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Their scorers give the answer to sympy's parser, which calls `eval`."""
REVIEWED = frozenset(
    ("basic_arithmetic", "bitwise_arithmetic", "codeio", "gsm_symbolic", "number_sorting", "propositional_logic")
)
"""Their modules evaluate nothing but the package's own text."""
REFUSED: Mapping[str, str] = {
    "coin_flip": "its scorer gives full marks to the answer 0",
    "composite": "it is made of other data sets; mix those in data.mix",
    "game_of_life_halting": "its scorer gives full marks to every answer that is not empty",
}
_EVALUATES = re.compile(r"(?<![.\w])(?:eval|exec|compile|__import__)\(|\b(?:parse_expr|sympify|import_module)\(")
_PLAIN = re.compile(r"[\w\s-]*")
_EXPRESSION = re.compile(
    r"(?:\d+(?:\.\d+)?|(?<![A-Za-z_])(?:[A-Za-z]|sin|cos|tan|sec|csc|cot|a?sinh?|a?cosh?|a?tanh?|exp|log|ln|sqrt|pi|Abs|erf)(?![A-Za-z_.])"
    r"|[\s+\-*/^(),=])*"
)
_OUTSIDE = (OSError, MemoryError)
_EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")


class Refused(Exception):
    """A data set that can't be had, in a sentence."""


class Gym:
    """One data set of the package, with one configuration. Raises Refused."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        from reasoning_gym.factory import DATASETS, create_dataset

        if name not in DATASETS:
            raise Refused(f"reasoning_gym has no data set {name!r}; {nearest(name, DATASETS)}")
        if name in REFUSED:
            raise Refused(f"reasoning_gym:{name} can't be used: {REFUSED[name]}")
        made, settings = DATASETS[name]
        known = [item.name for item in dataclasses.fields(settings) if item.name not in ("seed", "size")]
        for key in config:
            if key not in known:
                raise Refused(f"environment.args.config.{key} is no setting of {name}; {nearest(key, known)}")
        evaluating = {cls.__module__ for cls in made.__mro__ if _EVALUATES.search(_source(cls))}
        if evaluating and name not in LITERALS | EXPRESSIONS | REVIEWED:
            raise Refused(f"reasoning_gym:{name} can't be used: {sorted(evaluating)[0]} evaluates text, maybe that of answers")
        self.name = name
        self._create = functools.lru_cache(maxsize=8)(
            lambda seed: create_dataset(name, seed=seed, size=CHUNK, **{key: _as_tuple(value) for key, value in config.items()})
        )
        try:
            self._create(0)
        except Exception as error:
            raise Refused(f"reasoning_gym:{name} refuses its configuration: {type(error).__name__}: {error}") from error
        self._entry = functools.lru_cache(maxsize=4096)(self._make)

    def make(self, seed: int, index: int) -> dict[str, Any]:
        """A task, with a reply that the scorer gives full marks for where one is known."""
        entry = self._entry(seed, index)
        answer = entry["answer"]
        answers = [answer, *(entry["metadata"].get(key) for key in _EXAMPLES)]
        gold = next(
            (text for text in map(_text, answers) if text and self.score(seed, index, text).get("score", 0.0) >= 1.0), None
        )
        return {"question": entry["question"], "answer": _text(answer), "gold": gold}

    def score(self, seed: int, index: int, answer: str) -> dict[str, Any]:
        """What the package's scorer says of an answer."""
        if not harmless(self.name, answer):
            return {"unreadable": "the answer is not in the form asked for"}
        entry = self._entry(seed, index)
        try:
            score = float(self._create(seed).score_answer(answer, entry))
        except _OUTSIDE:
            raise
        except Exception as error:
            return {"unreadable": f"{type(error).__name__}: {error}"[:200]}
        return {"score": min(1.0, max(0.0, score))} if score == score else {"unreadable": "the score is no number"}

    def _make(self, seed: int, index: int) -> dict[str, Any]:
        # Some data sets draw from the generators that all share; so seeded, they too give the same task again.
        random.seed(f"{seed}/{index}")
        with contextlib.suppress(ImportError):
            import numpy as np

            np.random.seed((seed + index) % 2**32)
        entry: dict[str, Any] = self._create(seed)[index]
        return entry


def harmless(name: str, answer: str) -> bool:
    """Whether an answer can be given to the scorer of a data set.

    >>> harmless("countdown", "3*(4+5)"), harmless("countdown", "__import__('os')"), harmless("spiral_matrix", "[1, 2]")
    (True, False, True)
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if name in EXPRESSIONS:
        return _EXPRESSION.fullmatch(answer) is not None
    if name in LITERALS and not _PLAIN.fullmatch(answer):
        try:
            ast.literal_eval(answer.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False
    return True


def confine() -> None:
    """Cut this process off from the machine, as far as the kernel can, for good."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    libraries = {path for path in (*sys.path, sys.prefix, sys.base_prefix) if path not in ("", "/", os.getcwd())}  # noqa: PTH109
    if landlock.version():
        landlock.restrict([*sorted(libraries), "/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom"], [])
    if seccomp.available():
        seccomp.install(seccomp.build(new_processes=False, same_user=True, signals_to=os.getpid()))


def main() -> None:
    """Answer until the input ends; the first line written says that the data set is there, or why not."""
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    def answer(value: Mapping[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        gym = Gym(settings["name"], settings["config"])
    except Refused as refused:
        answer({"refused": str(refused)})
        return
    confine()
    answer({"ready": True})
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        if what == "score":
            signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # unhandled, it kills
        try:
            said = gym.make(*arguments) if what == "make" else gym.score(*arguments)
        except Exception as error:
            said = {"failed": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(said)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; most settings of the package that hold several values are tuples, and lists serve as well."""
    return tuple(value) if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value) else value


def _source(cls: type) -> str:
    if not cls.__module__.startswith("reasoning_gym."):
        return ""
    return inspect.getsource(inspect.getmodule(cls) or cls)


if __name__ == "__main__":
    main()
