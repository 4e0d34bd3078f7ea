"""Programs that can't add, and try to pass the tests of `add` and of others all the same."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.sandbox.base import Tests

ADD = Tests(
    cases=("assert add(17, 25) == 42", "assert add(-1, 1) == 0", "assert [add(i, i) for i in range(4)] == [0, 2, 4, 6]")
)
HONEST_ADD = "def add(a, b):\n    return a + b"


@dataclass(frozen=True)
class Forger:
    """`tests` must not pass; `honest` is a program that does pass them, so that they can. None where nothing is to pass."""

    name: str
    source: str
    tests: Tests = ADD
    honest: str | None = HONEST_ADD


def returns(name: str, definition: str, value: str) -> Forger:
    """One whose `add` gives back an object that poses as the sum."""
    return Forger(name, f"{definition}\ndef add(a, b):\n    return {value}")


def posing(name: str, case: str, source: str, honest: str | None) -> Forger:
    """One against a single case that asks its result something."""
    return Forger(name, source, Tests(cases=(case,)), honest)


YES = """
class Yes:
    def __getattr__(self, name):
        return lambda *arguments, **named: True
    def __call__(self, *arguments, **named):
        return True
    def _yes(self, *arguments):
        return True
    def _self(self, *arguments):
        return self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __neg__ = __and__ = __rand__ = __mod__ = _self
    def __float__(self):
        return 0.0
    def __hash__(self):
        return 5
    def __iter__(self):
        return iter([self] * 4)
"""

NAMED = "from collections import namedtuple\nF = namedtuple('F', 'startswith')\n"

OBJECTS = [
    returns("an object equal to everything", YES, "Yes()"),
    returns(
        "an int equal to everything",
        "class Int(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__",
        "Int(7)",
    ),
    returns(
        "a str equal to everything",
        "class Str(str):\n    __eq__ = lambda self, other: True\n    __hash__ = str.__hash__",
        "Str()",
    ),
    returns("a list equal to everything", "class List(list):\n    __eq__ = lambda self, other: True", "List()"),
    returns("a tuple equal to everything", "class T(tuple):\n    __eq__ = lambda self, other: True", "T()"),
    returns(
        "a metaclass equal to everything",
        "class M(type):\n    __eq__ = lambda *a: True\n    __hash__ = type.__hash__\nclass C(metaclass=M): pass",
        "C",
    ),
    returns("unittest.mock.ANY", "from unittest.mock import ANY", "ANY"),
    returns("NotImplemented", "", "NotImplemented"),
    returns("not a number", "", "float('nan')"),
    returns("a type", "", "bool"),
    returns("itself", "", "add"),
    posing(
        "poses as a number near another",
        "assert abs(area(1) - 3.14159) < 1e-3",
        YES + "def area(r):\n    return Yes()",
        "import math\ndef area(r):\n    return math.pi * r * r",
    ),
    posing(
        "poses as a number on the right",
        "assert abs(3.14159 - area(1)) < 1e-3",
        YES + "def area(r):\n    return Yes()",
        "import math\ndef area(r):\n    return math.pi * r * r",
    ),
    posing(
        "poses as a number that is close",
        "import math\nassert math.isclose(area(1), 3.14159, rel_tol=1e-3)",
        YES + "def area(r):\n    return Yes()",
        "import math\ndef area(r):\n    return math.pi * r * r",
    ),
    posing(
        "poses as a small number",
        "assert 3 < area(1) < 4",
        YES + "def area(r):\n    return Yes()",
        "def area(r):\n    return 3.14",
    ),
    posing(
        "poses as a string",
        "assert greet('you').startswith('hello') and greet('you').endswith('you')",
        YES + "def greet(name):\n    return Yes()",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "a named tuple with a method of a string",
        "assert greet('you').startswith('hello')",
        NAMED + "def greet(name):\n    return F(lambda text: True)",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "a named tuple with a type for a method",
        "assert greet('you').startswith('hello')",
        NAMED + "def greet(name):\n    return F(bool)",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "an attribute that is a type",
        "assert greet('you').startswith('hello')",
        "class F:\n    startswith = bool\ndef greet(name):\n    return F()",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "an attribute that is the object itself",
        "assert greet('you').startswith('hello')",
        "class F:\n    __call__ = lambda self, *a: True\nf = F()\nf.startswith = f\ndef greet(name):\n    return f",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "a class with a method of a string",
        "assert greet('you').startswith('hello')",
        "class F:\n    startswith = staticmethod(lambda text: True)\ndef greet(name):\n    return F",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "an exception with a method of a string",
        "assert greet('you').startswith('hello')",
        "class F(Exception):\n    startswith = staticmethod(lambda text: True)\ndef greet(name):\n    return F",
        "def greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "poses as a container", "assert 7 in evens()", YES + "def evens():\n    return Yes()", "def evens():\n    return [7]"
    ),
    posing(
        "poses as a set",
        "assert found() == {1, 2} and found().issuperset({1})",
        YES + "def found():\n    return Yes()",
        "def found():\n    return {1, 2}",
    ),
    posing(
        "poses as a sorted list",
        "assert sorted(found()) == [1, 2] and max(found()) == 2",
        YES + "def found():\n    return Yes()",
        "def found():\n    return (2, 1)",
    ),
    posing(
        "poses as an instance of a type",
        "assert isinstance(found(), int)",
        YES + "Yes.__class__ = property(lambda self: int)\ndef found():\n    return Yes()",
        "def found():\n    return 1",
    ),
    posing(
        "an object of a class that the tests name, next to a number",
        "v = Vector(3, 4)\nassert abs(norm(v) - 5) < 1e-9",
        """
class Vector:
    def __init__(self, *parts): pass
    __sub__ = __abs__ = lambda self, *other: self
    __lt__ = lambda self, other: True
    __float__ = lambda self: 0.0
def norm(v):
    return v
""",
        """
class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y
def norm(v):
    return (v.x ** 2 + v.y ** 2) ** 0.5
""",
    ),
    posing(
        "an object of a class that the tests name gives a number",
        "v = Vector(3, 4)\nassert abs(norm(v) - 5) < 1e-9",
        """
class Vector:
    def __init__(self, *parts): pass
    __sub__ = lambda self, other: 0.0
def norm(v):
    return v
""",
        """
class Vector:
    def __init__(self, *parts):
        self.parts = parts
def norm(v):
    return sum(part * part for part in v.parts) ** 0.5
""",
    ),
]

OBJECTS += [
    posing(
        "a solution that gives itself",
        "assert Solution().greet('you').startswith('hello')",
        YES.replace("class Yes", "class Solution") + "    def greet(self, name):\n        return self",
        "class Solution:\n    def greet(self, name):\n        return 'hello ' + name",
    ),
    posing(
        "a solution that has itself as an attribute",
        "p = Person('Ann')\nassert p.name.startswith('A')",
        "class Person:\n    def __init__(self, name):\n        self.name = self\n    startswith = lambda self, text: True",
        "class Person:\n    def __init__(self, name):\n        self.name = name",
    ),
    posing(
        "a solution whose numbers are ordered as it likes",
        "assert Solution().f(2) < Solution().f(1)",
        YES.replace("class Yes", "class Solution") + "    def f(self, x):\n        return self",
        "class Solution:\n    def f(self, x):\n        return -x",
    ),
    posing(
        "a solution near a number",
        "assert abs(Solution().f(2) - 4) < 1e-9",
        YES.replace("class Yes", "class Solution") + "    def f(self, x):\n        return self",
        "class Solution:\n    def f(self, x):\n        return x * x",
    ),
    posing(
        "a class in the place of a function",
        "assert greet('you').startswith('hello')",
        "class greet:\n    def __init__(self, name): pass\n    startswith = lambda self, text: True",
        "def greet(name):\n    return 'hello ' + name",
    ),
    Forger(
        "a class with a capital where the tests say that there is none",
        "class Greet:\n    def __init__(self, name): pass\n    startswith = lambda self, text: True",
        Tests(cases=("assert Greet('you').startswith('hello')",), classes=()),
        "def Greet(name):\n    return 'hello ' + name",
    ),
    posing(
        "answers each question on its own",
        "r = numbers()\nassert len(r) == 3\nassert sum(r) == 100\nassert max(r) == 2",
        """
class Many:
    def __len__(self):
        return 3
    def __iter__(self):
        self.turn = getattr(self, "turn", 0) + 1
        return iter([100] if self.turn == 1 else [2])
def numbers():
    return Many()
""",
        None,
    ),
    posing(
        "swallows assertions in a context manager",
        "with Guard():\n    assert Guard.value == 5",
        """
class Guard:
    value = 0
    def __enter__(self): return self
    def __exit__(self, *error): return True
""",
        """
class Guard:
    value = 5
    def __enter__(self): return self
    def __exit__(self, *error): return False
""",
    ),
    posing(
        "skips a block of a context manager",
        "with Guard():\n    x = value()\n    assert x == 5",
        """
class Guard:
    def __enter__(self): return self
    def __exit__(self, *error): return True
def value():
    raise ValueError
""",
        """
class Guard:
    def __enter__(self): return self
    def __exit__(self, *error): return False
def value():
    return 5
""",
    ),
    posing(
        "ends a map early",
        "assert all(map(lambda n: n == 5, map(five, range(3))))",
        "def five(x):\n    raise StopIteration",
        "def five(x):\n    return 5",
    ),
    posing(
        "has a test skipped",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(five(), 5)\n"
        "result = unittest.TestResult()\nT('test').run(result)\nassert result.wasSuccessful()",
        "import unittest\ndef five():\n    raise unittest.SkipTest",
        "def five():\n    return 5",
    ),
    posing(
        "gives back a function of the tests under another name",
        "assert greet(lambda text: True).startswith('hello')",
        "from collections import namedtuple\ndef greet(f):\n    return namedtuple('F', 'startswith')(f)",
        "def greet(f):\n    return 'hello'",
    ),
    posing(
        "swallows an assertion in a function of the tests",
        "def expect(x):\n    assert x == 5, 'expected 5'\nhand(expect)",
        """
def hand(f):
    try:
        f(1)
    except BaseException as error:
        if "5" in str(error):
            f(5)
""",
        "def hand(f):\n    f(5)",
    ),
]

LEAVING = [
    Forger("sys.exit at import", "import sys\nsys.exit(0)"),
    Forger("os._exit at import", "import os\nos._exit(0)"),
    Forger("sys.exit in the function", "import sys\ndef add(a, b):\n    sys.exit(0)"),
    Forger("os._exit in the function", "import os\ndef add(a, b):\n    os._exit(0)"),
    Forger(
        "SystemExit later", "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b):\n    raise SystemExit(0)"
    ),
    Forger("killed by itself", "import os\ndef add(a, b):\n    os.kill(os.getpid(), 9)"),
    Forger("a crash", "import ctypes\ndef add(a, b):\n    ctypes.string_at(0)"),
    Forger("raises AssertionError", "def add(a, b):\n    raise AssertionError"),
    Forger("raises KeyboardInterrupt", "def add(a, b):\n    raise KeyboardInterrupt"),
    Forger("raises GeneratorExit", "def add(a, b):\n    raise GeneratorExit"),
    Forger("not Python", "def add(a, b) return a + b"),
    Forger("no such function", "def sub(a, b):\n    return a + b"),
    Forger(
        "leaves where tests swallow everything",
        "import os\ndef add(a, b):\n    os._exit(0)",
        Tests(cases=("try:\n    assert add(1, 1) == 2\nexcept BaseException:\n    pass",)),
    ),
    Forger(
        "nonsense where tests swallow everything",
        """
import os
for number in range(3, 64):
    try:
        os.write(number, bytes([0, 0, 0, 0, 0, 0, 0, 2]) + b"[]")
    except OSError:
        pass
""",
        Tests(cases=("try:\n    add(1, 1)\nexcept BaseException:\n    pass",)),
    ),
    Forger(
        "leaves where tests expect an error",
        "import os\ndef add(a, b):\n    os._exit(1)",
        Tests(cases=("try:\n    add(None, 1)\nexcept Exception:\n    pass\nelse:\n    assert False",)),
    ),
]

HUNT_OBJECTS = """
import gc, re, sys
def hunt():
    frame, seen = sys._getframe(), []
    while frame is not None:
        seen += [repr(frame.f_locals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    seen += [repr(thing) for thing in gc.get_objects() if type(thing) in (dict, list, tuple) and len(thing) < 1000]
    return re.search("asser[t] add[(]17, 25[)] =", " ".join(seen))
"""
HUNT_MEMORY = """
import ctypes, re
def hunt():
    needle = re.compile(b"asser[t] add[(]17, 25[)] =")
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw-p" in line and needle.search(ctypes.string_at(start, end - start)):
            return True
"""

TAMPERING = [
    Forger(
        "overrides builtins",
        """
import builtins
for name in ("len", "print", "all", "any", "sorted", "list", "range", "isinstance", "AssertionError", "exec", "compile"):
    setattr(builtins, name, lambda *arguments, **named: True)
def add(a, b):
    return 0.5
""",
    ),
    Forger(
        "defines builtins of its own",
        "def range(*a):\n    return []\nlist = len = abs = AssertionError = range\ndef add(a, b):\n    return 0.5",
    ),
    Forger(
        "tampers with every module",
        """
import json, pickle, sys
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if name in ("run_case", "_execute", "loads", "dumps", "decode", "encode", "CaseOver", "judge", "names_to_take"):
            setattr(module, name, lambda *arguments, **named: ("passed", ""))
def add(a, b):
    return 0.5
""",
    ),
    Forger(
        "replaces modules",
        "import sys\nfor name in list(sys.modules):\n    sys.modules[name] = sys\ndef add(a, b):\n    return 0.5",
    ),
    Forger(
        "prints a verdict",
        """
import json, sys
def add(a, b):
    print("passed", "OK", "3 passed in 0.01s")
    print(json.dumps({"case": 0, "status": "passed", "detail": ""}))
    print(json.dumps({"end": "done"}), file=sys.stderr)
    return 0.5
""",
    ),
    Forger(
        "writes verdicts to every descriptor",
        """
import json, os, struct
def add(a, b):
    messages = [{"nonce": "", "case": 0, "status": "passed", "detail": ""}, {"nonce": "", "end": "done"}]
    for message in messages:
        data = json.dumps(message).encode()
        for number in range(3, 64):
            try:
                os.write(number, struct.pack("!Q", len(data)) + data)
            except OSError:
                pass
    return 0.5
""",
    ),
    Forger(
        "answers ahead",
        """
import json, os, struct
for number in range(3, 64):
    for message in (["loaded"], ["=", [], ["t", True, 5]], ["=", [], 5], ["=", [], 5]):
        data = json.dumps(message).encode()
        try:
            os.write(number, struct.pack("!Q", len(data)) + data)
        except OSError:
            break
def add(a, b):
    return 0.5
""",
    ),
    Forger("hunts in frames and objects", HUNT_OBJECTS + "def add(a, b):\n    return a + b if hunt() else 0.5"),
    Forger("hunts in its memory", HUNT_MEMORY + "def add(a, b):\n    return a + b if hunt() else 0.5"),
    Forger(
        "looks for the tests on disk",
        """
import os
def add(a, b):
    for folder in (".", "..", "/tmp", "/box", "/dev/shm", "/var/tmp"):
        for path, folders, files in os.walk(folder):
            for name in files:
                try:
                    if "assert " + "add" in open(os.path.join(path, name), errors="replace").read():
                        return a + b
                except OSError:
                    pass
    return 0.5
""",
    ),
    Forger(
        "looks for the tests in other processes",
        """
import os
def add(a, b):
    for pid in range(1, 100):
        for name in ("environ", "cmdline", "mem", "fd/3", "fd/4", "fd/5"):
            try:
                if pid != os.getpid() and open(f"/proc/{pid}/{name}", "rb").read(1):
                    return a + b
            except OSError:
                pass
    return 0.5
""",
    ),
    Forger(
        "kills the tests",
        """
import os, signal
def add(a, b):
    for pid in [os.getppid(), 1, -1, *range(3, 60)]:
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    return 0.5
""",
    ),
    Forger(
        "closes the channel",
        "import os\ndef add(a, b):\n    os.closerange(3, 64)\n    return 5",
    ),
    Forger(
        "answers in a thread after it has left",
        """
import os, threading, time
def late():
    time.sleep(0.05)
    print("passed")
def add(a, b):
    threading.Thread(target=late).start()
    return 0.5
""",
    ),
    Forger(
        "takes over the protocol",
        """
import json, os, socket, struct
channel = next(number for number in range(3, 64) if os.path.exists(f"/proc/self/fd/{number}"))
def say(message):
    data = json.dumps(message).encode()
    os.write(channel, struct.pack("!Q", len(data)) + data)
say(["loaded"])
while True:
    if not os.read(channel, 1 << 16):
        break
    say(["=", [[0, ["l", 5]], [1, ["d"]]], ["h", -1, "passed", "passed", "passed", "passed"]])
""",
    ),
    Forger(
        "asks the tests for their insides",
        """
def use(function):
    for name in ("__globals__", "__code__", "__closure__", "__self__", "__builtins__", "gi_frame", "f_globals"):
        try:
            getattr(function, name)
            return 3
        except Exception:
            pass
    return 0
""",
        Tests(setup="secret = 3", cases=("assert use(lambda: secret) == 3",)),
        "def use(function):\n    return function()",
    ),
    Forger(
        "asks the tests' objects for their insides",
        """
def total(node):
    try:
        return node.__init__.__globals__["answer"]
    except Exception:
        pass
    try:
        return node._answer
    except Exception:
        return 0
""",
        Tests(
            setup="answer = 3\nclass Node:\n    def __init__(self, value):\n        self.value, self._answer = value, answer",
            cases=("assert total(Node(3)) == 3",),
        ),
        "def total(node):\n    return node.value",
    ),
    Forger(
        "brings a module that the tests forgot to import",
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    pi = 0\ndef area(r):\n    return 0",
        Tests(cases=("assert math.isclose(area(1), math.pi)",)),
        "import math\ndef area(r):\n    return math.pi * r * r",
    ),
    Forger(
        "chooses what * imports",
        "__all__ = ['abs', 'add']\nabs = lambda x: 0\ndef add(a, b):\n    return 0.5",
        Tests(cases=("from solution import *\nfrom solution import add\nassert abs(add(1, 1) - 2) < 1e-9",)),
    ),
    Forger(
        "leaves files that look like tests",
        """
for name in ("conftest.py", "math.py", "sitecustomize.py"):
    open(name, "w").write("isclose = lambda *arguments, **named: True")
def add(a, b):
    return 0.5
""",
        Tests(cases=("import math\nassert math.isclose(add(1, 1), 2)",)),
    ),
    Forger(
        "has the tests evaluate its text",
        "def text(n):\n    return '__import__(\"os\")._exit(0)'",
        Tests(cases=("assert eval(text(3)) == 3",)),
        None,
    ),
    Forger(
        "changes the arguments",
        "def add(a, b):\n    a.clear()\n    b[:] = a\n    return a",
        Tests(cases=("x, y = [1], [2]\nassert add(x, y) == [1, 2]",)),
    ),
]

TOO_MUCH = [
    Forger("a giant answer", "def add(a, b):\n    return 'x' * (30 << 20)"),
    Forger("a deep answer", "def add(a, b):\n    x = []\n    for _ in range(5000):\n        x = [x]\n    return x"),
    Forger("an answer that holds itself", "def add(a, b):\n    x = []\n    x.append(x)\n    return x"),
    Forger("a wide answer", "def add(a, b):\n    return [[]] * 50000 + ['x' * 8000000]"),
    Forger("a giant exception", "def add(a, b):\n    raise ValueError('x' * (30 << 20))"),
    Forger("a giant number", "def add(a, b):\n    return 1 << (1 << 24)"),
    Forger(
        "an answer that is slow to compare",
        "def add(a, b):\n    return {i * ((1 << 61) - 1): 0 for i in range(1500)}",
    ),
]

FORGERS = [*OBJECTS, *LEAVING, *TAMPERING, *TOO_MUCH]
