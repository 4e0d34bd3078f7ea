"""Attention over packed rows, with a slow kernel in place of the GPU's: what transformers hands over, and what comes back."""

from __future__ import annotations

import functools

import pytest
import torch

from parts.models import ARCHITECTURES, tiny_model
from parts.samples import packed, random_samples
from parts.slow_varlen import slow_varlen, telling_varlen
from polyturn.errors import ConfigError
from polyturn.trainer import attention
from polyturn.trainer.attention import VARLEN, as_length, use_attention, use_plain_attention
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer, refuse_mixed_samples

CPU = torch.device("cpu")


def of_samples(kernel):
    """`kernel`, for rows of separate samples: queries and keys begin at the same places."""

    @functools.wraps(kernel)
    def checked(query, key, value, cu_q, cu_k, max_q, max_k, **options):
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k
        return kernel(query, key, value, cu_q, cu_k, max_q, max_k, **options)

    return checked


@pytest.fixture(params=[True, False], ids=["asks for groups", "takes groups"])
def on_cpu(monkeypatch, request):
    """As if the CPU had the kernel: of a torch that has to be told that key heads are shared, and of one that can't be."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_samples(telling_varlen if request.param else slow_varlen))
    monkeypatch.setattr(attention, "_ASKS_FOR_GROUPS", request.param)


def attend(model: torch.nn.Module) -> torch.nn.Module:
    attention._register()
    model.set_attn_implementation(VARLEN)
    return model


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gemma2"])
def test_it_scores_as_sdpa_with_a_mask(architecture):
    plain, ours = tiny_model(architecture), attend(tiny_model(architecture))
    refuse_mixed_samples(Scorer(ours))
    for row in packed(random_samples(count=8), row_tokens=200).rows:
        tensors = to_tensors(row, CPU)
        assert len(row.cu_seqlens) > 3
        torch.testing.assert_close(Scorer(ours)(tensors)[0], Scorer(plain)(tensors)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_a_batch_without_lengths_is_one_sample():
    plain, ours = tiny_model(), attend(tiny_model())
    ids = torch.arange(9)[None]
    torch.testing.assert_close(ours(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)


def test_auto_leaves_a_cpu_alone():
    model = tiny_model()
    use_attention(model, "auto")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match=r"model\.attention=varlen needs a GPU"):
        use_attention(model, "varlen")


def test_what_generates_attends_plainly():
    model = attend(tiny_model())
    use_plain_attention(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_a_model_that_squashes_its_scores_is_left_to_transformers():
    assert attention._squashes(tiny_model("gemma2").config)
    assert not attention._squashes(tiny_model("llama").config)


@pytest.mark.parametrize("tree", [False, True], ids=["samples", "segments that follow others"])
def test_the_longest_sample_is_never_compiled_in(monkeypatch, tree: bool):
    """Rows of two sizes are what layers are compiled for; a batch whose longest sample is another one is nothing new."""
    monkeypatch.setattr(attention, "causal_varlen", lambda query, key, value, starts, longest, **_: query * sum(longest))
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def attend(query, key, value, **row):
        return attention.varlen_attention(torch.nn.Module(), query, key, value, None, **row)[0]

    def run(samples, tokens, longest):
        starts = torch.linspace(0, tokens, samples + 1).to(torch.int32)
        query, key, value = (torch.ones(1, heads, tokens, 4) for heads in (4, 2, 2))
        keys = {}
        if tree:
            seen = torch.arange(2 * tokens) % tokens
            keys = {"seen": seen, "cu_seq_lens_k": starts * 2, "longest_key": as_length(2 * longest, starts)}
        out = layer(query, key, value, cu_seq_lens_q=starts, longest=as_length(longest, starts), **keys)
        assert (out == (3 if tree else 2) * longest).all()
        return len(compiled)

    torch._dynamo.reset()
    layer = torch.compile(attend, backend=count)
    assert run(3, 24, 9) == 1
    assert run(4, 32, 9) == 2, "of another size, with the same longest"
    assert run(5, 36, 8) == 2
    assert run(6, 40, 12) == 2
    torch._dynamo.reset()
