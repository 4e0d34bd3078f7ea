"""Rows on the device, and the models whose rows can't hold two samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from parts.models import ARCHITECTURES, VOCAB, tiny_model
from parts.samples import make_sample, packed, trainer_settings
from polyturn.errors import ModelError
from polyturn.trainer.forward import refuse_mixed_samples, to_tensors, trained_logits
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


def test_logits_are_float32_and_scaled_whatever_the_models_type():
    rng = np.random.default_rng(0)
    row = to_tensors(packed([make_sample(0, [(3, 2, 1.0)], rng=rng, temperature=0.5)]).rows[0], CPU)
    model = tiny_model().bfloat16()
    logits = trained_logits(model, row)
    with torch.no_grad():
        plain = model(input_ids=row.input_ids_T[None]).logits[0, row.predicting_N]
    assert logits.dtype == torch.float32
    assert logits.shape == (2, VOCAB)
    torch.testing.assert_close(logits.detach(), plain.float() / 0.5, rtol=0.05, atol=0.1)


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
    refuse_mixed_samples(tiny_model(architecture, initializer_range=spread).to(dtype))


def test_a_tiny_vocabulary_passes():
    refuse_mixed_samples(tiny_model(vocab_size=3))
