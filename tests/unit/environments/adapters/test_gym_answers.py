"""Which answers may reach a scorer that evaluates text, what its process can reach, and where the seeds lie."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.environments.adapters.gym_worker import CHUNK, EXPRESSIONS, LITERALS, harmless
from polyturn.environments.adapters.reasoning_gym import FIRST_TRAINING_SEED, LAST_SEED, ReasoningGym, seed_of
from polyturn.errors import EnvironmentSetupError, MissingDependencyError
from polyturn.sandbox import landlock, seccomp

HOSTILE = [
    "__import__('os').system('id')",
    "().__class__.__base__.__subclasses__()",
    "open('/etc/passwd').read()",
    "exec('1')",
    "[c for c in ().__class__.__mro__]",
    "(lambda: 1)()",
    "x.diff",
    "print(1)",
    "Symbol('x')",
    "S.Half",
    "f'{1}'",
    "a := 1",
    "1" * 30_000,
]


@pytest.mark.parametrize("name", sorted(EXPRESSIONS | LITERALS))
@pytest.mark.parametrize("answer", HOSTILE)
def test_code_never_reaches_a_scorer_that_evaluates(name, answer):
    assert not harmless(name, answer)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "3*(4+5) - 2/7"),
        ("puzzle24", "(8 / (3 - 8/3))"),
        ("polynomial_multiplication", "-12*x**3 + 4*x*y - 7"),
        ("simple_integration", "3*x**2/2 + C"),
        ("intermediate_integration", "-x*cos(x) + sin(2.5*x) + exp(x)*log(x) + sqrt(x) + pi + C"),
        ("binary_matrix", "0 1\n1 0"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("n_queens", "_ _ Q _\nQ _ _ _"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("spiral_matrix", "1 -2 3"),
        ("string_insertion", "ABCDE"),
        ("string_insertion", "['A', 'B']"),
        ("chain_sum", "__import__('os')"),
    ],
)
def test_answers_in_the_form_asked_for_do(name, answer):
    assert harmless(name, answer)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab12 ()[]'\".,_*+-:=x\n", max_size=24))
def test_whatever_is_let_through_has_no_attribute_and_no_unknown_call(answer):
    for name in ("countdown", "spiral_matrix"):
        if harmless(name, answer):
            assert "__" not in answer or name == "spiral_matrix"
            before = [answer[index - 1] for index, letter in enumerate(answer) if letter == "." and index]
            assert name == "spiral_matrix" or all(letter.isdigit() for letter in before)


CONFINED = """
import json, os, socket, sys
from polyturn.environments.adapters.gym_worker import confine
confine()
reached = []
for name, attempt in {
    "read": lambda: open(sys.argv[1]).read(),
    "write": lambda: open(sys.argv[1] + ".new", "w"),
    "connect": lambda: socket.socket().connect(("127.0.0.1", 9)),
    "fork": os.fork,
    "kill": lambda: os.kill(os.getppid(), 0),
    "memory": lambda: bytearray(8 * 2**30),
}.items():
    try:
        attempt()
        reached.append(name)
    except (PermissionError, BlockingIOError, MemoryError):
        pass
print(json.dumps(reached))
"""


@pytest.mark.skipif(not (landlock.version() and seccomp.available()), reason="this kernel has no Landlock or no known seccomp")
def test_the_process_that_scores_reaches_nothing(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(secret)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": path},
        check=False,
    )
    assert json.loads(done.stdout or "null") == [], done.stderr


@given(st.integers(0, 2**40), st.integers(0, 2**20))
def test_no_training_seed_reaches_the_held_out_split(seed, chunk):
    train, held_out = seed_of("train", seed, chunk), seed_of("eval", seed, chunk % 8192)
    assert held_out + CHUNK <= FIRST_TRAINING_SEED <= train
    assert train + CHUNK <= LAST_SEED + CHUNK < 2**32
    assert train % CHUNK == held_out % CHUNK == 0, "chunks are the same or apart"


def test_seeds_and_chunks_differ():
    assert len({seed_of("train", seed, chunk) for seed in range(30) for chunk in range(30)}) == 900
    assert len({seed_of("eval", 0, chunk) for chunk in range(30)}) == 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"answer_tag": "<a>"}, "is no tag"),
        ({"num_held_out": -1}, "num_held_out=-1"),
        ({"num_held_out": 2**30}, "must be a number of tasks"),
        ({"score_cpu_s": 0}, "score_cpu_s=0"),
        ({"config": ["a"]}, "must be a mapping"),
    ],
)
def test_arguments_that_are_refused(arguments, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        ReasoningGym(name="chain_sum", **arguments)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'polyturn\[reasoning-gym\]'"):
        ReasoningGym(name="chain_sum")
