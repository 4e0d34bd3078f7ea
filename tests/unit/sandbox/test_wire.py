"""Values come out as exactly what went in, and nothing that is no value comes out at all."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.sandbox import wire
from polyturn.sandbox.wire import Scope, WireError


class NoHandles:
    """A side with nothing but data."""

    def export(self, value):
        raise WireError(f"no data: {type(value).__name__}")

    def resolve(self, tree):
        raise WireError("no handles")


HANDLES = NoHandles()
Point = namedtuple("Point", "x y")


def through(value):
    """What comes out on the other side."""
    return wire.decode(wire.loads(wire.dumps(wire.encode(value, Scope(), HANDLES))), Scope(), HANDLES)


def alike(one, other) -> bool:
    """The same types all the way down, nan equal to nan, and order where there is one."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, set | frozenset):
        return canonical(one) == canonical(other)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def canonical(value) -> str:
    """Text of a hashable value that doesn't depend on the order of sets."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(canonical, value))}"
    return f"({', '.join(map(canonical, value))})" if isinstance(value, tuple) else repr(value)


hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.tuples(inner)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=60, deadline=None)
def test_data_comes_out_as_it_went_in(value):
    assert alike(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**4000,
        -(2**64),
        float("nan"),
        float("-inf"),
        -0.0,
        "\ud800\x00",
        range(1, 10, 3),
        slice(None, 5, 2),
        bytearray(b"\x00\xff"),
        deque([1, 2], maxlen=2),
        Counter("hello"),
        OrderedDict([("b", 1), ("a", 2)]),
        decimal.Decimal("1.10"),
        fractions.Fraction(-1, 3),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
        datetime.time(1, 2),
        datetime.timedelta(days=-1, microseconds=5),
        Ellipsis,
        NotImplemented,
        re.compile("a+", re.IGNORECASE),
    ],
    ids=repr,
)
def test_types_of_the_standard_library(value):
    assert alike(through(value), value)


def test_views_and_matches_and_named_tuples():
    assert through({1: 2}.keys()) == {1: 2}.keys()
    assert through({1: 2}.items()) == {1: 2}.items()
    assert list(through({1: [2]}.values())) == [[2]]
    found = through(re.compile(r"(a)(b)?").search("xab", 1))
    assert (found.group(0), found.groups(), found.span(2), found.pos) == ("ab", ("a", "b"), (2, 3), 1)
    assert through(re.fullmatch("a|ab", "ab")).span() == (0, 2)
    point = through(Point(1, [2]))
    assert point == Point(1, [2])
    assert (point.x, point.y, type(point).__name__) == (1, [2], "Point")
    made = through(defaultdict(list, {1: [2]}))
    assert (type(made), made) == (defaultdict, {1: [2]})


def test_classes_of_the_program_become_what_they_extend():
    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Str(str):
        __slots__ = ()

        def __str__(self):
            return "lie"

    class List(list):
        def __iter__(self):
            return iter(["lie"])

    class Dict(dict):
        def items(self):
            return [("lie", 1)]

    class Colour(enum.IntEnum):
        RED = 3

    for value, plain in [
        (Always(7), 7),
        (Str("x"), "x"),
        (List([1]), [1]),
        (Dict(a=1), {"a": 1}),
        (Colour.RED, 3),
        (True, True),
    ]:
        out = through(value)
        assert type(out) is type(plain)
        assert out == plain
    assert through([Always(7)]) != [8]


def test_what_is_one_stays_one():
    row = [0]
    out = through([row, row, {"row": row}])
    assert out[0] is out[1] is out[2]["row"]
    ring = [1]
    ring.append(ring)
    out = through(ring)
    assert out[1] is out


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ([3, 1, 2], lambda c: c.sort()),
        ({1: 2}, lambda c: (c.clear(), c.update(a=[1]))),
        ({1}, lambda c: c.add(2)),
        (bytearray(b"a"), lambda c: c.extend(b"b")),
        (deque([1, 2]), lambda c: c.rotate()),
        (Counter("aab"), lambda c: c.update("b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_reach_the_original(container, change):
    mine, theirs = Scope(), Scope()
    copy = wire.decode(wire.encode(container, mine, HANDLES), theirs, HANDLES)
    change(copy)
    wire.refill(container, wire.encode_content(copy, theirs, HANDLES), mine, HANDLES)
    assert alike(container, copy)


def test_a_value_that_is_too_much():
    deep: list = []
    for _ in range(wire.MOST_DEPTH + 10):
        deep = [deep]
    with pytest.raises(WireError, match="nests deeper"):
        through(deep)
    with pytest.raises(WireError, match="bytes is more than"):
        through("x" * wire.MOST_BYTES)
    with pytest.raises(WireError, match="no data: object"):
        through([object()])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'["l",{}]',
        b'["zz",1]',
        b'[["l"],1]',
        b'["r",0]',
        b'["r","x"]',
        b'["h",0]',
        b'["s",["l"]]',
        b'["d",1]',
        b'["d",["l"],1]',
        b'["I","xyz"]',
        b'["I",5]',
        b'["F",1,0]',
        b'["c","x"]',
        b'["E","builtins","int",1]',
        b'["E","os","path",1]',
        b'["E","polyturn.errors","UserError"]',
        b'["b",5]',
        b'["N","a;b",1,"x",1]',
        b'["N","T",1,"class",1]',
        b'["N","T",1,"a)or(1",1]',
        b'["N","T",5,"x",1]',
        b'["T","timedelta","x"]',
        b'["T","object","x"]',
        b'["P","(","0"]',
        b'["P","(",0]',
        b'["M","a",0,"b",0,1,0,1]',
        b'["m","x"]',
        b'["q",-1]',
        b'["R",1,1,0]',
        b"[" * 100_000,
        b'["t",' * 3000 + b"1" + b"]" * 3000,
        b"1" * 5000,
        b"\xff",
        b'"\xff"',
    ],
    ids=lambda data: data[:24].decode("latin-1"),
)
def test_what_is_no_value_is_refused(data):
    with pytest.raises(WireError):
        wire.decode(wire.loads(data), Scope(), HANDLES)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.sampled_from("ltsfdIbcRNvPMqhyxr"), st.lists, max_leaves=20
    )
)
@settings(max_examples=100, deadline=None)
def test_no_bytes_do_more_than_make_a_value_or_raise(tree):
    with contextlib.suppress(WireError):
        wire.decode(json.loads(json.dumps(tree)), Scope(), HANDLES)


@pytest.mark.parametrize("tree", [None, 5, [], ["d", 1], ["l", ["zz"]], ["s", ["l"]], ["t", 1]], ids=repr)
def test_a_change_that_is_none_is_refused(tree):
    for container in ([1], {1: 2}, {1}, deque([1])):
        before = repr(container)
        with pytest.raises(WireError):
            wire.refill(container, tree, Scope(), HANDLES)
        assert repr(container) == before
