"""The checks that every bridge shares: full coverage, and checksums that see any change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import WeightMismatchError, WeightSyncError
from polyturn.weight_sync import base
from polyturn.weight_sync.base import check_coverage, check_equal, check_frozen, checksum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed": torch.randn(6, 4, generator=generator),
        "layer.q": torch.randn(4, 4, generator=generator),
        "norm": torch.ones(4),
    }


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(2, 40))
    values = torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6)))) * 50
    return values.to(dtype)


def as_bytes(tensor):
    return tensor.clone().contiguous().view(torch.uint8)


@settings(max_examples=150, deadline=None)
@given(tensors(), st.data())
def test_checksum_catches_any_flipped_bit(tensor, data):
    raw = as_bytes(tensor)
    place, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert checksum(raw.view(tensor.dtype)) != checksum(tensor)


@settings(max_examples=100, deadline=None)
@given(tensors(), st.data())
def test_checksum_catches_any_two_swapped_values(tensor, data):
    one, other = data.draw(st.integers(0, len(tensor) - 1)), data.draw(st.integers(0, len(tensor) - 1))
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    same = torch.equal(as_bytes(swapped), as_bytes(tensor))
    assert (checksum(swapped) == checksum(tensor)) == same


def test_checksum_sees_values_and_not_how_they_lie():
    tensor = torch.randn(6, 4)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(tensor) != checksum(tensor.t())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0]))
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_of_the_highest_bit_at_an_even_and_an_odd_place(dtype):
    for place in range(4):
        tensor = torch.zeros(4, dtype=dtype)
        raw = as_bytes(tensor)
        raw[(place + 1) * tensor.element_size() - 1] = 128
        assert checksum(raw.view(dtype)) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_of_swapped_values_that_are_alike(dtype):
    for one, other in [(1, -1), (0, 1), (2, 3), (1 << 32, 1), (5 << 32, 5)]:
        try:
            tensor = torch.tensor([one, 7, other, 7], dtype=dtype)
        except RuntimeError:
            continue  # a number that this type can't hold
        assert checksum(tensor) != checksum(tensor.flip(0).roll(-1))


def test_checksum_of_a_tensor_of_many_chunks(monkeypatch):
    tensor = torch.randn(23)
    whole = checksum(tensor)
    monkeypatch.setattr(base, "_CHUNK_WORDS", 4)
    assert checksum(tensor) == whole
    assert checksum(torch.cat([tensor[4:8], tensor[:4], tensor[8:]])) != whole


def test_check_equal_names_the_first_of_the_tensors_that_differ():
    target = weights()
    target["layer.q"].view(torch.int32)[1, 2] ^= 1
    target["norm"].zero_()
    with pytest.raises(WeightMismatchError, match=r"after push 3 .* 2 of 3 tensors, first layer\.q"):
        check_equal(weights(), target, 3)
    check_equal(weights(), weights(), 3)


def test_check_coverage_names_a_few_of_many():
    target = {f"layer.{index}": torch.zeros(1) for index in range(50)}
    with pytest.raises(WeightSyncError) as caught:
        check_coverage({}, target)
    assert "0 of the engine's 50" in str(caught.value)
    assert str(caught.value).count("layer.") == 8


def test_weights_that_are_never_pushed_must_be_the_same():
    check_frozen(weights(), weights())
    check_frozen({}, {})
    for spoil, first in (
        (lambda target: target["norm"].add_(1e-6), "norm"),
        (lambda target: target.pop("norm"), "norm"),
        (lambda target: target.update(extra=torch.zeros(2)), "extra"),
        (lambda target: target.update(norm=torch.ones(9)), "norm"),
    ):
        target = weights()
        spoil(target)
        with pytest.raises(WeightMismatchError, match=f"the engine's base model is not the trainer's: 1 of .* first {first};"):
            check_frozen(weights(), target)
