"""Rows on the device, and the models whose rows can't hold two samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from parts.models import ARCHITECTURES, VOCAB, gradients, largest_gap, tiny_model
from parts.samples import make_sample, packed, trainer_settings
from polyturn.errors import ModelError
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer, refuse_mixed_samples
from polyturn.trainer.trainer import Trainer

CPU = torch.device("cpu")
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
MIXING = {
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def test_to_tensors_by_hand():
    rng = np.random.default_rng(0)
    samples = [make_sample(0, [(2, 2, 0.5), (1, 1, -1.0)], rng=rng), make_sample(1, [(3, 1, 2.0)], rng=rng, temperature=0.5)]
    row = packed(samples).rows[0]
    tensors = to_tensors(row, CPU)
    assert tensors.input_ids_T.tolist() == [*samples[0].input_ids, *samples[1].input_ids]
    assert tensors.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert tensors.predicting_N.tolist() == [1, 2, 4, 8], "the position before each trained token"
    assert tensors.targets_N.tolist() == [row.input_ids[i] for i in (2, 3, 5, 9)]
    assert tensors.advantages_N.tolist() == [0.5, 0.5, -1.0, 2.0]
    assert tensors.temperature_N.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert tensors.trajectory_index_N.tolist() == [0, 0, 0, 1]
    assert tensors.turn_index_N.tolist() == [0, 0, 1, 0]


def test_scores_are_float32_and_scaled_whatever_the_models_type():
    rng = np.random.default_rng(0)
    row = to_tensors(packed([make_sample(0, [(3, 2, 1.0)], rng=rng, temperature=0.5)]).rows[0], CPU)
    model = tiny_model().bfloat16()
    logprobs, entropy = Scorer(model)(row)
    with torch.no_grad():
        plain = torch.log_softmax(model(input_ids=row.input_ids_T[None]).logits[0, row.predicting_N].float() / 0.5, -1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.detach(), plain.gather(-1, row.targets_N[:, None])[:, 0], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_chunked_head_is_the_models_own(architecture, tied):
    rng = np.random.default_rng(1)
    rows = packed([make_sample(i, [(4, 3, 1.0), (2, 3, -1.0)], rng=rng, temperature=0.5 + i) for i in range(3)]).rows
    model = tiny_model(architecture, tie_word_embeddings=tied)
    chunked, whole = Scorer(model), Scorer(model, chunked_head=False)
    assert chunked.chunked
    assert not whole.chunked
    for row in rows:
        tensors, weights = to_tensors(row, CPU), torch.linspace(-1, 1, int(row.loss_mask.sum()))
        grads = []
        for score in (chunked, whole):
            model.zero_grad(set_to_none=True)
            logprobs, entropy = score(tensors)
            (logprobs @ weights).backward()
            grads.append((logprobs.detach(), entropy, gradients(model)))
        torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-4, atol=1e-5)
        assert largest_gap(grads[0][2], grads[1][2]) < 1e-5


def test_a_head_that_does_something_of_its_own_is_left_alone():
    model = tiny_model()
    plain = type(model).forward

    class Twisted(type(model)):
        def forward(self, *arguments, **options):
            out = plain(self, *arguments, **options)
            out.logits = out.logits + torch.arange(out.logits.shape[-1])
            return out

    model.__class__ = Twisted
    score = Scorer(model)
    assert not score.chunked
    row = to_tensors(packed([make_sample(0, [(3, 2, 1.0)], rng=np.random.default_rng(0))]).rows[0], CPU)
    wanted = torch.log_softmax(model(input_ids=row.input_ids_T[None]).logits[0, row.predicting_N], -1)
    torch.testing.assert_close(score(row)[0], wanted.gather(-1, row.targets_N[:, None])[:, 0])


def test_a_float32_head():
    rng = np.random.default_rng(0)
    row = to_tensors(packed([make_sample(0, [(3, 2, 1.0)], rng=rng)]).rows[0], CPU)
    model = tiny_model().bfloat16()
    exact = Scorer(tiny_model().bfloat16().float())(row)[0]
    assert (Scorer(model, float32_head=True)(row)[0] - exact).abs().max() < 0.2
    Scorer(model, float32_head=True)(row)[0].sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_the_samples_of_a_row_is_refused(kind):
    """Its packed rows would be trained on without a sign that anything is wrong."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MIXING[kind](), attn_implementation="eager")
    with pytest.raises(ModelError, match=f"models of type {kind} let the samples of a packed row see each other"):
        Trainer(model, trainer_settings())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.005, 0.2])
def test_a_model_that_keeps_them_apart_passes(architecture, dtype, spread):
    """Also one whose predictions are all but uniform, where a small effect is a large share."""
    refuse_mixed_samples(Scorer(tiny_model(architecture, initializer_range=spread).to(dtype)))


def test_a_tiny_vocabulary_passes():
    refuse_mixed_samples(Scorer(tiny_model(vocab_size=3)))
