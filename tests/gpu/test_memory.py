"""On a real GPU: where optimizer, reference and adapters keep their bytes, and that the numbers are those of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from parts.gpu import no_waits
from parts.models import largest_gap, snapshot, tiny_model
from parts.samples import loss_options, packed, random_samples, trainer_settings
from polyturn.config.memory import Held, Placed, trained_tensor
from polyturn.models.adapters import add_adapters, copy_for_sampling, pushed_weights
from polyturn.models.load import load_model
from polyturn.trainer.reference import FrozenModel
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu

MODES = {
    "none": {},
    "float32": {"master_weights": "float32"},
    "stochastic": {"master_weights": "stochastic"},
    "offload": {"master_weights": "float32", "offload_optimizer": True},
}


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", 0)


def trained(device: torch.device, *, dtype: torch.dtype, steps: int = 3, **given) -> tuple[torch.nn.Module, Trainer]:
    model = tiny_model(hidden_size=64, intermediate_size=96).to(device, dtype)
    trainer = Trainer(model, trainer_settings(learning_rate=1e-3, **given))
    for _ in range(steps):
        trainer.train([packed(random_samples(), row_tokens=30)])
    return model, trainer


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_lie_where_they_are_planned(cuda, mode, optimizer):
    if mode == "offload" and optimizer == "adamw_8bit":
        pytest.skip("refused by the recipe")
    _, trainer = trained(cuda, dtype=torch.bfloat16, optimizer=optimizer, **MODES[mode])
    trainer.forward_backward(packed(random_samples(), row_tokens=30))
    settings = trainer.settings
    planned = Placed(device=Held())
    for parameter in trainer.model.parameters():
        planned += trained_tensor(
            parameter.numel(),
            dtype="bfloat16",
            optimizer=optimizer,
            master_weights=settings.master_weights,
            offload=settings.offload_optimizer,
        )
    gradients = trainer.optimizer.gradients()
    assert trainer.optimizer.held() == planned
    assert {gradient.device.type for gradient in gradients} == {"cpu" if mode == "offload" else "cuda"}


def test_an_offloaded_optimizer_computes_what_the_one_on_the_gpu_does(cuda):
    here, _ = trained(cuda, dtype=torch.float32)
    away, trainer = trained(cuda, dtype=torch.float32, offload_optimizer=True)
    assert largest_gap(snapshot(here), snapshot(away)) < 1e-4
    masters = trainer.optimizer.state_dict()["masters"]
    assert all(master.device.type == "cpu" and master.is_pinned() for master in masters)
    assert {parameter.device for parameter in away.parameters()} == {cuda}
    for parameter, master in zip(away.parameters(), masters, strict=True):
        assert torch.equal(parameter.cpu(), master.to(parameter.dtype))


def test_rows_that_follow_each_other_quickly_don_t_mix_in_the_buffer(cuda):
    """Gradients of many rows go to CPU memory beside the backward passes of the next ones."""
    batch = packed([sample for seed in range(20) for sample in random_samples(seed)], row_tokens=30)
    found = []
    for given in ({"master_weights": "float32"}, MODES["offload"]):
        model = tiny_model(hidden_size=256, intermediate_size=512).to(cuda, torch.bfloat16)
        trainer = Trainer(model, trainer_settings(**given))
        trainer.forward_backward(batch)
        found.append([gradient.cpu().clone() for gradient in trainer.optimizer.gradients()])
    for here, away in zip(*found, strict=True):
        torch.testing.assert_close(away, here, rtol=1e-5, atol=1e-6 * float(here.abs().max()))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("mode", ["none", "float32", "stochastic"])
def test_a_step_does_not_wait_for_the_gpu(cuda, mode, optimizer):
    _, trainer = trained(cuda, dtype=torch.bfloat16, optimizer=optimizer, **MODES[mode])
    trainer.forward_backward(packed(random_samples()))
    trainer.optimizer.gradients()
    with no_waits():
        trainer.optimizer.step(1e-3)
        trainer.optimizer.zero_grad()


def test_a_gpu_rounds_at_random_as_the_cpu_does(cuda):
    from polyturn.trainer.rounding import stochastic_bfloat16

    rounded = stochastic_bfloat16(torch.full((200_000,), 1.0 + 2**-9, device=cuda), torch.Generator(device=cuda).manual_seed(0))
    assert sorted(set(rounded.tolist())) == [1.0, 1.0 + 2**-7]
    assert float(rounded.double().mean()) == pytest.approx(1.0 + 2**-9, abs=5 * 2**-7 * 0.5 / 200_000**0.5)


def test_a_reference_in_cpu_memory_takes_none_of_the_gpu_s_between_steps(cuda):
    policy = tiny_model(hidden_size=256, intermediate_size=512).to(cuda)
    waiting = tiny_model(seed=7, hidden_size=256, intermediate_size=512)
    size = sum(p.numel() * p.element_size() for p in waiting.parameters())
    rows = [to_tensors(row, cuda) for row in packed(random_samples()).rows]
    here = Scorer(copy.deepcopy(waiting).to(cuda))
    reference = FrozenModel(waiting, cuda, Scorer)
    before = torch.cuda.memory_allocated()
    with reference.present():
        assert torch.cuda.memory_allocated() - before >= size
        found = reference.logprobs(rows)
    del rows
    assert all(p.device.type == "cpu" and p.is_pinned() for p in waiting.parameters())
    assert torch.cuda.memory_allocated() - before < size / 2
    with torch.no_grad():
        for logprobs, row in zip(found, [to_tensors(row, cuda) for row in packed(random_samples()).rows], strict=True):
            torch.testing.assert_close(logprobs, here(row)[0], rtol=1e-4, atol=1e-4)
    settings = trainer_settings(loss_options(beta=0.1))
    assert Trainer(policy, settings, reference=waiting).train([packed(random_samples())])["kl"] > 0


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_adapters_beside_a_quantized_base(cuda, bits, tmp_path):
    tiny_model(hidden_size=128, intermediate_size=256, initializer_range=0.05).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", attention="sdpa", device=cuda, quantize=bits)
    add_adapters(model, rank=4, alpha=8.0, targets=None, base=str(tmp_path), seed=0)
    trainer = Trainer(model, trainer_settings(loss_options(beta=0.1), master_weights="float32"), reference=model)
    engine = copy_for_sampling(model)
    before = snapshot(model)
    numbers = [trainer.train([packed(random_samples())]) for _ in range(3)]
    assert numbers[0]["kl"] < 1e-3
    assert numbers[2]["kl"] > numbers[0]["kl"]
    changed = {name for name, tensor in snapshot(model).items() if not torch.equal(tensor, before[name])}
    assert changed == set(pushed_weights(model))
    frozen = [(a, b) for a, b in zip(model.parameters(), engine.parameters(), strict=True) if not a.requires_grad]
    assert all(a.data_ptr() == b.data_ptr() for a, b in frozen)
