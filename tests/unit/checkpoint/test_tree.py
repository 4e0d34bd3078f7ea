"""A state taken apart and put together again."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyturn.checkpoint.tree import join, paths_in, split

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)).reshape(shape) % 2).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=4) | tensors
names = st.text(st.sampled_from("abx"), min_size=1, max_size=2) | st.sampled_from(["tensor", "dict", "tuple", "number"])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
        | st.dictionaries(st.integers(0, 4), inner, max_size=3)
    ),
    max_leaves=12,
)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@given(states)
def test_every_state_comes_back(state):
    found, rest = split(state)
    rest = json.loads(json.dumps(rest, allow_nan=False))
    assert paths_in(rest) == found.keys()
    assert equal(join(rest, found), state)


def test_one_tensor_of_two_names_is_kept_once():
    tied = torch.ones(2, 3)
    found, rest = split({"embed": tied, "head": torch.nn.Parameter(tied), "part": tied[:1]})
    assert list(found) == ["embed", "part"]
    back = join(rest, found)
    assert back["head"] is back["embed"]


def test_numbers_that_json_does_not_have():
    _, rest = split({"a": math.nan, "b": [math.inf, -math.inf]})
    back = join(json.loads(json.dumps(rest, allow_nan=False)), {})
    assert math.isnan(back["a"])
    assert back["b"] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("state", "said"), [({"a": {"b": object()}}, "a.b: a object"), ({"a": {1.5: 1}}, "a: the keys"), ({"a": {True: 1}}, "keys")]
)
def test_what_is_no_part_of_a_state_is_named(state, said):
    with pytest.raises(TypeError, match=said):
        split(state)


def test_two_tensors_of_one_path_are_refused():
    with pytest.raises(TypeError, match=r"two tensors of a state are called a\.b"):
        split({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
