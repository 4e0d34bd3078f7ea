"""What tests can do with a program: everything that honest tests do, by data and by handle, in one process with two ends."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import socket
import sys
import threading
import types

import pytest

from polyturn.sandbox.candidate import CandidateGate
from polyturn.sandbox.proxies import MOST_ITEMS
from polyturn.sandbox.remote import CaseOver, Peer
from polyturn.sandbox.tester import Namespace, TesterGate, _execute, names_to_take, run_case

PROGRAM = '''
import asyncio, collections, enum, functools, itertools, math, re
from dataclasses import dataclass

total = 0
table = {"a": 1}

def add(a, b=0, *rest, scale=1):
    """Adds."""
    return (a + b + sum(rest)) * scale

def count():
    global total
    total += 1
    return total

def apply(f, items):
    return [f(item) for item in items]

def sort_rows(rows):
    rows.sort(key=len)

def fill(d, s, q):
    d["new"] = [1]
    s.discard(1)
    q.append(3)

def same(x):
    return x

def first(rows):
    return rows[0]

def adder(n):
    return lambda x: x + n

def power(n):
    return functools.partial(pow, n)

def naturals():
    n = 0
    while True:
        yield n
        n += 1

def words(text):
    return (word for word in text.split())

def find(text):
    return re.search(r"(\\d+)", text)

def parse(text):
    import json
    return json.loads(text)

def kind(x):
    return type(x)

def sum_all(iterable):
    return sum(iterable)

async def later(x):
    await asyncio.sleep(0)
    return x + 1

def fails(x):
    if x > 0:
        raise ValueError("positive", x)
    return x

class Broken(LookupError):
    def __init__(self, key, extra):
        super().__init__(key)

def breaks():
    raise Broken("key", 5)

def exits():
    raise SystemExit(3)

class Stack:
    kinds = ["lifo"]

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
        return self

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def __setitem__(self, index, value):
        self.items[index] = value

    def __repr__(self):
        return f"Stack({self.items})"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.items.clear()
        return kind is not None

    @classmethod
    def of(cls, *items):
        return cls(items)

@functools.total_ordering
@dataclass(frozen=True)
class Vector:
    x: float
    y: float

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __mul__(self, scale):
        return Vector(self.x * scale, self.y * scale)

    __rmul__ = __mul__

    def __lt__(self, other):
        return abs(self) < abs(other)

    def __abs__(self):
        return math.hypot(self.x, self.y)

class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def linked(items):
    head = None
    for item in reversed(items):
        head = Node(item, head)
    return head

def reverse(node):
    before = None
    while node is not None:
        node.next, before, node = before, node, node.next
    return before

def total_of(tree):
    return 0 if tree is None else tree.value + total_of(tree.left) + total_of(tree.right)

class Colour(enum.Enum):
    RED = 1

def colour():
    return Colour.RED

class Ticker:
    def __init__(self, most):
        self.n, self.most = 0, most

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == self.most:
            raise StopIteration
        self.n += 1
        return self.n

    def get(self, name):
        return getattr(self, name)

class Hidden:
    value = 5
    def method(self):
        return True

def hidden():
    return Hidden()
'''
CASES = [
    "assert add(1, 2, 3, scale=2) == 12 and add(a=1) == 1",
    "assert add.__name__ == 'add' and callable(add)",
    "assert [count(), count()] == [1, 2] and total == 2 and count() == 3 and total == 3",
    "assert table == {'a': 1} and isinstance(table, dict)",
    "assert apply(lambda x: x * 2, (1, 2)) == [2, 4]",
    "assert apply(len, ['a', 'bb']) == [1, 2] and apply(str, [1]) == ['1'] and apply(float, ['1.5']) == [1.5]",
    "import math, operator\nassert apply(math.sqrt, [4]) == [2.0] and apply(operator.neg, [1]) == [-1]",
    "def boom(x):\n    raise KeyError(x)\ntry:\n    apply(boom, [1])\n    assert False\nexcept KeyError as error:\n    assert error.args == (1,)",
    "calls = []\nassert apply(calls.append, [1, 2]) == [None, None] and calls == [1, 2]",
    "rows = [[1, 2], [3]]\nlast = rows[0]\nassert sort_rows(rows) is None and rows == [[3], [1, 2]] and rows[1] is last",
    "from collections import deque\nd, s, q = {}, {1, 2}, deque([1], 2)\nfill(d, s, q)\n"
    "assert (d, s, list(q)) == ({'new': [1]}, {2}, [1, 3])",
    "x = [1]\nassert same(x) is x and first([x]) is x and same((x,))[0] is x",
    "assert adder(2)(3) == 5 and power(2)(5) == 32",
    "import itertools\nassert list(itertools.islice(naturals(), 3)) == [0, 1, 2] and next(naturals()) == 0",
    "assert list(words('a b')) == ['a', 'b'] and sorted(words('b a')) == ['a', 'b'] and 'b' in words('a b')",
    "assert find('a12').group(1) == '12' and find('a') is None and find('a1')",
    "assert kind(None) is type(None) and kind(5) is int and kind([]) == list and kind(ValueError()) is ValueError",
    "assert sum_all(x * x for x in range(4)) == 14 and sum_all(iter([1, 2])) == 3 and sum_all(map(int, '12')) == 3",
    "import asyncio\nassert asyncio.run(later(1)) == 2",
    "import asyncio\nasync def both():\n    return await asyncio.gather(later(1), later(2))\nassert asyncio.run(both()) == [2, 3]",
    "try:\n    fails(1)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('positive', 1) and 'positive' in str(error)",
    "try:\n    breaks()\n    assert False\nexcept Broken as error:\n    assert error.args == ('key',) and isinstance(error, LookupError)",
    "try:\n    breaks()\n    assert False\nexcept KeyError:\n    assert False\nexcept LookupError:\n    pass",
    "try:\n    exits()\n    assert False\nexcept SystemExit as error:\n    assert error.args == (3,)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(ValueError):\n            fails(1)\n"
    "        self.assertEqual(add(1, 2), 3)\nresult = unittest.TestResult()\nT('test').run(result)\nassert result.wasSuccessful(), result",
    "s = Stack()\ns.push(1).push('a')\nassert len(s) == 2 and s.pop() == 'a' and s.items == [1] and list(s) == [1] and s[0] == 1 and 1 in s",
    "s = Stack([1])\ns[0] = 5\nassert repr(s) == 'Stack([5])' == str(s) and bool(s) and not Stack() and f'{s}' == repr(s)",
    "assert isinstance(Stack(), Stack) and not isinstance(5, Stack) and Stack.kinds == ['lifo'] and len(Stack.of(1, 2)) == 2",
    "assert Stack.__name__ == 'Stack' and type(Stack.of).__name__",
    "with Stack([1]) as s:\n    assert s[0] == 1\nassert len(s) == 0",
    "v = Vector(3, 4)\nassert abs(v) == 5.0 and v + v == Vector(6, 8) and v != Vector(1, 1) and v * 2 == 2 * v == Vector(6, 8)",
    "v = Vector(3, 4)\nassert v < Vector(30, 40) and max(v, Vector(1, 1)) is v and hash(v) == hash(Vector(3, 4)) and (v * 2).x == 6",
    "assert len({Vector(1, 2), Vector(1, 2)}) == 1 and sorted([Vector(3, 4), Vector(1, 0)])[0] == Vector(1, 0)",
    "try:\n    Vector(1, 2).x = 5\n    assert False\nexcept AttributeError as error:\n    assert type(error).__name__ == 'FrozenInstanceError'",
    "import dataclasses\ntry:\n    Vector(1, 2).x = 5\n    assert False\nexcept dataclasses.FrozenInstanceError:\n    pass",
    "import json\ntry:\n    parse('{')\n    assert False\nexcept json.JSONDecodeError as error:\n    assert isinstance(error, ValueError)",
    "assert same(KeyError('a')).args == ('a',) and same(KeyError) is KeyError",
    "n = linked([1, 2])\nassert n.value == 1 and n.next.value == 2 and n.next.next is None and reverse(n).value == 2 and n.next is None",
    "class Tree:\n    def __init__(self, value, left=None, right=None):\n        self.value, self.left, self.right = value, left, right\n"
    "assert total_of(Tree(1, Tree(2), Tree(3, Tree(4)))) == 10",
    "class Link:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next\n"
    "a = Link(1, Link(2))\nb = a.next\nassert reverse(a) is b and b.next is a and a.next is None",
    "t = Ticker(3)\nassert next(t) == 1 and list(t) == [2, 3] and t.n == 3 and t.get('n') == 3",
    "assert colour() is colour() and colour() == Colour.RED and colour().value == 1 and colour().name == 'RED'",
    "assert hidden().value == 5 and hidden() is not None and hidden()",
    "from solution import add as plus, Stack as S\nimport solution\nassert plus(1, 1) == 2 == solution.add(1, 1) and S is Stack",
    "def helper(x):\n    return add(x, 1)\nassert [helper(x) for x in (1, 2)] == [2, 3]",
    "numbers = [1]\nfor add_me in (1, 2):\n    numbers.append(add(add_me))\nassert numbers == [1, 1, 2]",
    "class Holder:\n    plus = add\nassert Holder.plus(1, 2) == 3",
]
CASES += [
    "with Stack([1]) as s:\n    raise ValueError\nassert len(s) == 0",
    "it = iter(Stack([1]))\nassert next(it) == 1\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass",
]
DECLARED = [
    "assert Stack.of(1, 2).pop() == 2 and Stack().push(5).pop() == 5",
    "with Stack([1]) as s:\n    assert s.pop() == 1\nassert len(s) == 0",
    "s = Stack()\nassert s.push(1) is s",
    "a, b = Node(1), Node(2)\na.next = b\nassert a.next is b and reverse(a) is b and b.next is a",
    "assert sorted([Vector(3, 4) * 2, Vector(1, 0) * 2])[0] == Vector(2, 0)",
]
REFUSED = [
    ("len(hidden())", "the tests don't name class Hidden"),
    ("list(hidden())", "the tests don't name class Hidden"),
    ("hidden()[0]", "the tests don't name class Hidden"),
    ("float(hidden())", "the tests don't name class Hidden"),
    ("next(hidden())", "the tests don't name class Hidden"),
    ("5 in hidden()", "the tests don't name class Hidden"),
    ("assert hidden().method()", "method method: the tests don't name class Hidden"),
    ("assert hidden() + 1", "operator add"),
    ("assert hidden() < 3", "'<' not supported"),
    ("assert Vector(1, 2) < 3", "'<' not supported"),
    ("assert Vector(1, 2) * 1 < Vector(3, 4) * 1", "'<' not supported"),
    ("assert Stack.of(1).pop() == 1", "declare classes=('Stack',)"),
    ("assert Stack().push(1).pop() == 1", "declare classes=('Stack',)"),
    ("assert abs(Vector(1, 2) * 2) == 3", "mixed with a value of the tests"),
    ("assert add.__globals__", "out of the tests' reach"),
    ("assert later.__code__", "out of the tests' reach"),
    ("add(object(), 1)", "can't be handed to the program"),
    ("import sys\nadd(sys, 1)", "can't be handed to the program"),
    ("import sys\nadd(sys.stdout, 1)", "can't be handed to the program"),
    ("assert eval('1')", "must not evaluate text"),
    ("exec('x = 1')", "must not evaluate text"),
    ("assert nothing_of_this_name", "name 'nothing_of_this_name' is not defined"),
    ("from solution import missing", "cannot import name 'missing'"),
]


class Pair:
    """A program served by a thread, and tests."""

    def __init__(
        self,
        source: str = PROGRAM,
        tests: tuple[str, ...] = (),
        entry_points: list[str] | None = None,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        module = types.ModuleType("solution_of_a_test")
        sys.modules["solution_of_a_test"] = module
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        self.program = Peer(theirs, CandidateGate(module))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.peer = Peer(ours, TesterGate(), classes)
        self.namespace = Namespace(self.peer, list(tests), entry_points)
        self.sockets = (ours, theirs)
        self.thread.start()
        self.namespace.fetch_all()

    def _serve(self) -> None:
        try:
            self.program.serve_for_ever()
        except CaseOver:
            return

    def run(self, case: str) -> tuple[str, str]:
        from polyturn.sandbox.tester import _offer_module

        _offer_module("solution", self.peer)
        try:
            return run_case(self.peer, case, "<case 1>", self.namespace, 20.0)
        finally:
            del sys.modules["solution"]

    def close(self) -> None:
        self.sockets[0].close()
        self.thread.join(10)
        self.sockets[1].close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.partition("\n")[0][:50])
def test_honest_tests_can_do_this(case):
    pair = Pair(tests=(case,))
    try:
        assert pair.run(case) == ("passed", "")
    finally:
        pair.close()


@pytest.mark.parametrize("case", DECLARED, ids=lambda case: case.partition("\n")[0][:50])
def test_and_this_if_they_declare_the_classes(case):
    for classes in (("Stack", "Node", "Vector", "Ticker"), None):
        pair = Pair(tests=(case,), classes=classes)
        try:
            assert (pair.run(case)[0] == "passed") == (classes is not None)
        finally:
            pair.close()


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=lambda text: text[:40])
def test_this_is_refused_with_a_reason(case, why):
    pair = Pair(tests=(case, "add"))
    try:
        status, detail = pair.run(case)
        assert status == "error"
        assert why in detail
        assert pair.run("assert add(1, 1) == 2") == ("passed", ""), "the next case is not affected"
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("source", "case", "status"),
    [
        ("def f(): return 1", "assert f() == 2", "failed"),
        ("def f(): raise AssertionError('mine')", "f()", "error"),
        ("def f(): return 'x' * 9_000_000", "f()", "error"),
        ("def f():\n    x = []\n    for _ in range(1000): x = [x]\n    return x", "f()", "error"),
    ],
    ids=["assertion", "the program's own", "too big", "too deep"],
)
def test_how_a_case_that_does_not_pass_is_told_apart(source, case, status):
    pair = Pair(source, (case,))
    try:
        assert pair.run(case)[0] == status
        assert pair.run(f"try:\n    {case}\nexcept Exception:\n    pass")[0] in ("passed", status)
        assert pair.run("assert True") == ("passed", "")
    finally:
        pair.close()


def test_a_value_that_could_not_be_judged_fails_the_case_even_when_swallowed():
    pair = Pair("def f(): return 'x' * 9_000_000", ("f",))
    try:
        status, detail = pair.run("try:\n    f()\nexcept BaseException:\n    pass")
        assert (status, "can't be judged" in detail) == ("error", True)
    finally:
        pair.close()


def test_nothing_passes_after_the_program_has_gone():
    pair = Pair("def f(): return 1", ("f",))
    pair.sockets[1].shutdown(socket.SHUT_RDWR)
    assert pair.run("try:\n    f()\nexcept BaseException:\n    pass") == ("gone", "the program has ended")
    assert pair.run("assert True")[0] == "gone"
    pair.close()


def test_a_silent_program_is_not_waited_for():
    ours, theirs = socket.socketpair()
    peer = Peer(ours, TesterGate())
    namespace = Namespace(peer, ["f"], ["f"])
    assert run_case(peer, "try:\n    f()\nexcept BaseException:\n    pass", "<case 1>", namespace, 0.05) == ("gone", "timeout")
    ours.close()
    theirs.close()


def test_iterators_end():
    pair = Pair(tests=("naturals",))
    iterator = pair.namespace["naturals"]()
    iterator._left = 3
    with pytest.raises(OverflowError, match=str(MOST_ITEMS)):
        list(iterator)
    pair.close()


def test_which_names_are_the_programs():
    setup = "import math\nfrom os import path as p\ndef check(candidate, k=1):\n    local = candidate(k)\n    return local"
    names, modules = names_to_take([setup, "check(solve)", "assert string(1) == len([])", "random.random()", "not python ("])
    assert names == {"solve", "string", "random", "local"}
    assert modules == {"random"}


def test_an_entry_point_may_be_called_like_a_builtin_or_a_module():
    source = "def sum(a, b):\n    return a - b\ndef abs(x):\n    return 0"
    pair = Pair(source, ("sum", "abs"), ["sum"])
    try:
        assert pair.run("assert sum(5, 3) == 2 and abs(-3) == 3") == ("passed", "")
    finally:
        pair.close()
    pair = Pair("class string:\n    def __init__(self, x):\n        self.x = x", ("string(1).x",))
    try:
        assert pair.run("assert string(1).x == 1") == ("passed", "")
    finally:
        pair.close()


def test_the_tests_of_a_module_of_the_library_use_the_real_one():
    pair = Pair("class math:\n    pi = 3", ("math.pi",))
    try:
        assert pair.run("assert math.pi > 3.1") == ("passed", "")
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("get", ("__globals__",)),
        ("get", ("__code__",)),
        ("set", ("__code__", 5)),
        ("op", ("str",)),
        ("next", ()),
        ("await", ()),
        ("unknown", ()),
    ],
)
def test_the_program_gets_little_out_of_a_function_of_the_tests(operation, arguments):
    with pytest.raises((TypeError, AttributeError)):
        TesterGate().operate(operation, lambda: 0, arguments, {})


def test_the_program_gets_only_public_parts_of_an_object_of_the_tests():
    namespace: dict = {"__name__": "polyturn_tests"}
    exec("class Node:\n    def __init__(self):\n        self.value, self._hidden = 3, 4\n", namespace)
    gate, node = TesterGate(), namespace["Node"]()
    assert gate.operate("get", node, ("value",), {}) == 3
    for name in ("_hidden", "__class__", "__init__", "__dict__"):
        with pytest.raises(AttributeError, match="out of the program's reach"):
            gate.operate("get", node, (name,), {})
    assert gate.kind(sys) is None
    assert gate.kind(sys.stdout) is None
    assert gate.kind(object()) is None


def test_setup_lines_are_shown_when_they_fail():
    pair = Pair(tests=("add",))
    try:
        _execute("def check(f):\n    assert f(1) == 3, 'one more'", "<setup>", pair.namespace)
        assert pair.run("check(add)") == ("failed", "assert f(1) == 3, 'one more'\nAssertionError: one more")
    finally:
        pair.close()
