"""SmolLM2 with its decoder in few bits: still the same model, and adapters beside it learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from parts.samples import loss_options, make_sample, packed, trainer_settings
from polyturn.models.adapters import add_adapters, pushed_weights
from polyturn.models.load import load_model
from polyturn.models.smollm2 import ensure_smollm2
from polyturn.trainer.trainer import Trainer

pytestmark = pytest.mark.real

TEXT = (
    "The capital of France is Paris. Water boils at one hundred degrees Celsius at sea level. The sun rises in the east and "
    "sets in the west. A week has seven days, and a year has twelve months."
)


@pytest.fixture(scope="module")
def folder():
    return ensure_smollm2(lambda _: None)


def load(folder, **given) -> torch.nn.Module:
    return load_model(folder, dtype="float32", attention="sdpa", device=torch.device("cpu"), **given).eval()


@torch.no_grad()
def surprise(model, ids_1T: torch.Tensor) -> float:
    logprobs = torch.log_softmax(model(input_ids=ids_1T).logits[0, :-1], -1)
    return -float(logprobs.gather(-1, ids_1T[0, 1:, None]).mean())


@pytest.mark.parametrize(("bits", "worse"), [("8bit", 0.1), ("4bit", 0.5)])
def test_it_is_still_the_same_model_and_learns(folder, bits, worse):
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids])
    whole, model = load(folder), load(folder, quantize=bits)
    assert surprise(whole, ids) < 3
    assert abs(surprise(model, ids) - surprise(whole, ids)) < worse
    assert surprise(whole, ids.flip(1)) > surprise(model, ids) + 1, "which a model that knows nothing would not see"

    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    decoder = sum(tensor.numel() for tensor in whole.model.layers.parameters())
    assert size < 4 * (whole.num_parameters() - decoder) + (1.02 if bits == "8bit" else 0.51) * decoder + (1 << 20)

    add_adapters(model, rank=4, alpha=8.0, targets=None, base="builtin:smollm2", seed=0)
    trainer = Trainer(model, trainer_settings(loss_options(beta=0.01), learning_rate=1e-3), reference=model)

    batch = packed([make_sample(0, [(4, 12, 1.0)], rng=np.random.default_rng(0))])
    numbers = [trainer.train([batch]) for _ in range(4)]
    assert numbers[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert numbers[-1]["logprob"] > numbers[0]["logprob"] + 0.3
    assert sum(tensor.numel() * tensor.element_size() for tensor in pushed_weights(model).values()) < 8 << 20
