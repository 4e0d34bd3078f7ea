"""The trainer on a GPU: attention over packed rows, compiled and recomputed layers, the head; each against the plain way."""

from __future__ import annotations

import copy

import pytest
import torch

from parts.gpu import no_waits
from parts.models import gradients, tiny_model
from parts.samples import loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.trainer.attention import VARLEN, use_attention, use_plain_attention
from polyturn.trainer.head import head_logprobs
from polyturn.trainer.layers import plain_layers, prepare_layers
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer, refuse_mixed_samples
from polyturn.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
GPU = torch.device("cuda")
BF16 = 0.02
"""Relative error of gradients, as norms: bfloat16 has eight bits."""
KINDS = ["llama", "qwen2", "mistral", "qwen3", "gemma3", "phi3", "granite", "cohere", "qwen3_moe"]


def model_of(kind: str) -> torch.nn.Module:
    # Heads of 32: the kernels take no smaller ones.
    return tiny_model(kind, hidden_size=128, **({"head_dim": 32} if kind in ("qwen3", "gemma3", "qwen3_moe") else {}))


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Distance of two gradients, relative to the second."""
    one, two = (torch.cat([grads[name].float().flatten() for name in sorted(wanted)]) for grads in (found, wanted))
    return float((one - two).norm() / two.norm())


def gradient(model: torch.nn.Module, batch, **settings) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    Trainer(model, trainer_settings(loss_options(), **settings)).forward_backward(batch)
    found = gradients(model)
    plain_layers(model)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_packed_rows(kind):
    plain = model_of(kind)
    batch = packed(on_policy(random_samples(count=12), plain, gap=0.3), row_tokens=200)
    exact = gradient(plain.to(GPU), batch)
    half = copy.deepcopy(plain).bfloat16()
    masked = gradient(half, batch)
    use_attention(half, "auto")
    assert half.config._attn_implementation == VARLEN
    refuse_mixed_samples(Scorer(half))
    ours = gradient(half, batch)
    assert far(ours, exact) < max(1.5 * far(masked, exact), BF16), "no farther from float32 than SDPA with a mask"
    for row in batch.rows:
        tensors = to_tensors(row, GPU)
        wanted = Scorer(plain)(tensors)[0]
        assert (Scorer(half)(tensors)[0] - wanted).abs().mean() < 0.1
    use_plain_attention(half)
    assert half.generate(torch.tensor([[3, 4, 5]], device=GPU), max_new_tokens=3, do_sample=False).shape == (1, 6)


@pytest.mark.parametrize("activations", ["keep", "selective", "full"])
def test_compiled_layers(activations):
    model = model_of("qwen3").to(GPU)
    batch = packed(on_policy(random_samples(count=12), copy.deepcopy(model).cpu(), gap=0.3), row_tokens=200)
    half = copy.deepcopy(model).bfloat16()
    use_attention(half, "auto")
    wanted = gradient(half, batch)
    found = gradient(half, batch, activations=activations, compiled=True)
    assert far(found, wanted) < BF16


def test_the_head_in_bfloat16():
    make = torch.Generator(GPU).manual_seed(0)
    hidden = torch.randn(300, 256, generator=make, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(5000, 256, generator=make, device=GPU, dtype=torch.bfloat16)).requires_grad_()
    targets = torch.randint(5000, (300,), generator=make, device=GPU)
    ones, upstream = torch.ones(300, device=GPU), torch.randn(300, generator=make, device=GPU)
    found, entropy = head_logprobs(hidden, weight, targets, ones, chunk_bytes=4 * 5000 * 64)
    logits = hidden.double() @ weight.double().T
    wanted = torch.log_softmax(logits, -1)
    torch.testing.assert_close(found.double(), wanted.gather(-1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(wanted.exp() * wanted).sum(-1), rtol=1e-5, atol=1e-4)
    exact = torch.autograd.grad((wanted.gather(-1, targets[:, None])[:, 0] * upstream).sum(), [hidden, weight])
    for grad, right in zip(torch.autograd.grad((found * upstream).sum(), [hidden, weight]), exact, strict=True):
        assert (grad.double() - right.double()).norm() / right.double().norm() < 0.01


def test_a_step_does_not_wait_for_the_device():
    model = model_of("llama").to(GPU, torch.bfloat16)
    use_attention(model, "auto")
    batch = packed(random_samples(count=12), row_tokens=60)
    trainer = Trainer(model, trainer_settings(loss_options(), compiled=True, master_weights="float32"))
    for _ in range(2):  # what is compiled first is compiled for one length, then for any
        trainer.train([batch])
    score = Scorer(model)
    assert len(batch.rows) > 2
    with no_waits():
        for row in batch.rows:
            score(to_tensors(row, GPU))[0].sum().backward()
        trainer.optimizer.step(1e-3)


def test_layers_prepared_twice_are_plain_after():
    model = model_of("llama").to(GPU)
    prepare_layers(model, activations="full", compiled=True)
    plain_layers(model)
    assert model(input_ids=torch.tensor([[1, 2, 3]], device=GPU)).logits.isfinite().all()
