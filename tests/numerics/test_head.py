"""The chunked head against the plain one: values, gradients, memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from polyturn.trainer import head
from polyturn.trainer.head import HeadShape, head_logprobs

SHAPES = {
    "plain": HeadShape(),
    "scaled": HeadShape(scale=0.3),
    "capped": HeadShape(softcap=2.0),
    "both": HeadShape(scale=3.0, softcap=5.0),
}


def plain(hidden, weight, targets, temperature, bias, shape):
    """As one would write it with all logits at hand."""
    logits = hidden.to(weight.dtype) @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * shape.scale
    if shape.softcap is not None:
        logits = torch.tanh(logits / shape.softcap) * shape.softcap
    distribution = torch.distributions.Categorical(logits=logits / temperature[:, None])
    return distribution.log_prob(targets), distribution.entropy()


def inputs(tokens=7, hidden=5, vocabulary=11, *, dtype=torch.float64, seed=0):
    make = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, hidden, generator=make, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randn(vocabulary, hidden, generator=make, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randint(vocabulary, (tokens,), generator=make),
        torch.rand(tokens, generator=make, dtype=torch.float32) + 0.5,
        torch.randn(vocabulary, generator=make, dtype=torch.float64).to(dtype).requires_grad_(),
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_plain_head(shape, with_bias):
    hidden, weight, targets, temperature, bias = inputs()
    given_bias = bias if with_bias else None
    wanted, wanted_entropy = plain(hidden, weight, targets, temperature, given_bias, shape)
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    wanted_grads = torch.autograd.grad(wanted @ upstream, leaves)
    for chunk_bytes in (1, 4 * 11 * 3, 1 << 20):
        found, entropy = head_logprobs(
            hidden, weight, targets, temperature, bias_V=given_bias, shape=shape, chunk_bytes=chunk_bytes
        )
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(entropy, wanted_entropy)
        assert not entropy.requires_grad
        for one, other in zip(torch.autograd.grad(found @ upstream, leaves), wanted_grads, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_numerical_gradient(shape):
    hidden, weight, targets, temperature, bias = inputs(tokens=3, hidden=2, vocabulary=4)

    def logprobs(hidden, weight, bias):
        return head_logprobs(hidden, weight, targets, temperature, bias_V=bias, shape=shape, chunk_bytes=32)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


@settings(max_examples=25)
@given(tokens=st.integers(1, 40), chunk_bytes=st.integers(1, 3000), seed=st.integers(0, 5))
def test_the_chunk_changes_nothing(tokens, chunk_bytes, seed):
    hidden, weight, targets, temperature, _ = inputs(tokens=tokens, dtype=torch.float32, seed=seed)
    found = [head_logprobs(hidden, weight, targets, temperature, chunk_bytes=size)[0] for size in (chunk_bytes, 1 << 30)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_bfloat16_is_summed_in_float32():
    hidden, weight, targets, temperature, _ = inputs(tokens=64, hidden=64, vocabulary=300, dtype=torch.bfloat16)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    wanted, _ = plain(exact[0], exact[1], targets, temperature, None, HeadShape())
    found, entropy = head_logprobs(hidden, weight, targets, temperature, chunk_bytes=4 * 300 * 5)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad(found.sum(), [hidden, weight])
    wanted_grads = torch.autograd.grad(wanted.sum(), exact)
    for grad, exactly in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - exactly).norm() / exactly.norm() < 4e-3, "no worse than rounding once"


def test_a_float32_head_on_bfloat16_states():
    hidden, _, targets, temperature, _ = inputs(tokens=8, dtype=torch.bfloat16)
    _, weight, *_ = inputs(tokens=8, dtype=torch.float32)
    found, _ = head_logprobs(hidden, weight, targets, temperature)
    wanted, _ = plain(hidden.detach().double(), weight.detach().double(), targets, temperature, None, HeadShape())
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(found.sum(), hidden)[0].dtype == torch.bfloat16


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, temperature, _ = inputs()
    found, _ = head_logprobs(hidden, weight.detach(), targets, temperature)
    (grad,) = torch.autograd.grad(found.sum(), [hidden])
    assert grad.isfinite().all()


def test_no_tokens_at_all():
    hidden, weight, targets, temperature, _ = inputs(tokens=0)
    found, entropy = head_logprobs(hidden, weight, targets, temperature)
    assert found.shape == entropy.shape == (0,)
    found.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_extreme_logits_stay_finite():
    hidden, weight = torch.full((2, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.0]])
    found, entropy = head_logprobs(hidden, weight, torch.tensor([0, 1]), torch.ones(2))
    torch.testing.assert_close(found, torch.tensor([0.0, -2e4]))
    torch.testing.assert_close(entropy, torch.zeros(2), atol=1e-3, rtol=0)


def test_the_logits_of_all_tokens_are_never_held():
    tokens, vocabulary = 512, 4096
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    arguments = (hidden, weight, torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        head_logprobs(*arguments, chunk_bytes=4 * vocabulary * 16)[0].sum().backward()
    assert largest <= 16 * vocabulary


def test_one_chunk_is_gone_before_the_next_takes_its_memory(monkeypatch):
    """What a loop still names while it makes the next chunk counts twice: half a GiB of the backward pass's peak, on a GPU."""
    held, most = [], 0

    def watched(function):
        def call(*arguments):
            nonlocal most
            most = max(most, sum(one() is not None for one in held))
            result = function(*arguments)
            held.append(weakref.ref(result))
            return result

        return call

    monkeypatch.setattr(head, "_product", watched(head._product))
    monkeypatch.setattr(head, "_grad_product", watched(head._grad_product))
    hidden, weight, targets, temperature, _ = inputs(tokens=9)
    found, _ = head_logprobs(hidden, weight, targets, temperature, chunk_bytes=4 * 11 * 3)
    found.sum().backward()
    assert len(held) == 3 + 3 * 2
    assert most == 1, "of a chunk, its logits while their gradient is made of them"


@pytest.mark.real
def test_the_fused_passes_are_compiled_once(monkeypatch):
    """For chunks of any size, at the beginning of a row and later."""
    fused, gpu = head._fused, torch.device("cuda")
    monkeypatch.setattr(head, "_fused", lambda function, _: fused(function, gpu))
    torch._dynamo.reset()
    counters.clear()
    for tokens in (300, 40, 64, 190):
        hidden, weight, targets, temperature = inputs(tokens, 16, 500, dtype=torch.float32)[:4]
        found, _ = head_logprobs(hidden, weight, targets, temperature, chunk_bytes=4 * 500 * 64)
        wanted, _ = plain(hidden, weight, targets, temperature, None, HeadShape())
        torch.testing.assert_close(found, wanted)
        mine = torch.autograd.grad(found.sum(), [hidden, weight])
        for one, other in zip(mine, torch.autograd.grad(wanted.sum(), [hidden, weight]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2
