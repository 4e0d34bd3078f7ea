"""Training adapters: their gradient, the reference that is the policy without them, ranks, and the engine that samples."""

from __future__ import annotations

import pytest
import torch

from parts.models import gradients, largest_gap, same_bits, snapshot, tiny_model
from parts.samples import alone, loss_options, on_policy, packed, random_samples, trainer_settings
from parts.thread_ranks import ThreadRanks, on_ranks
from polyturn.engine.hf import HfEngine
from polyturn.errors import TrainingError, WeightMismatchError
from polyturn.models.adapters import adapter_parameters, add_adapters, copy_for_sampling, frozen_weights, pushed_weights
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer
from polyturn.types import SamplingParams
from polyturn.weight_sync.in_process import InProcessBridge

pytestmark = pytest.mark.real  # the quick tests do without peft

KL = loss_options(beta=0.2)


def adapted(architecture: str = "llama", *, seed: int = 0, learned: bool = True, dtype: torch.dtype = torch.float32):
    model = tiny_model(architecture).to(dtype)
    add_adapters(model, rank=4, alpha=8.0, targets=None, base="owner/name", seed=seed)
    if learned:  # where B is 0, A has no gradient
        generator = torch.Generator().manual_seed(1)
        for parameter in adapter_parameters(model):
            parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.2).to(dtype)
    return model


def batch(rows: int = 30):
    return packed(on_policy(random_samples(), tiny_model(), gap=0.2), row_tokens=rows)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_only_adapters_have_gradients_and_they_are_right(architecture):
    """Against finite differences of the loss itself, in the direction of the gradient."""
    model = adapted(architecture, dtype=torch.float64)
    trainer = Trainer(model, trainer_settings())
    assert Scorer(model).chunked
    data = packed(random_samples(), row_tokens=30)
    trainer.forward_backward(data)
    found = gradients(model)
    assert set(found) == set(pushed_weights(model))
    length = torch.sqrt(sum(gradient.double().square().sum() for gradient in found.values()))
    step, losses = 1e-5, []
    for sign in (1, -1):
        moved = adapted(architecture, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                if name in found:
                    parameter += sign * step * found[name] / length
        # The ratio of a loss that is on-policy is 1 wherever it is taken: its gradient is that of this sum.
        losses.append(_weighted_logprobs(moved, data))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(-float(length), rel=1e-3)


@torch.no_grad()
def _weighted_logprobs(model: torch.nn.Module, data) -> float:
    """Sum of advantage x log-probability over planned trajectories x budget: what the loss pushes up, but for its sign."""
    rows = [to_tensors(row, torch.device("cpu")) for row in data.rows]
    return float(sum((Scorer(model)(row)[0].double() * row.advantages_N).sum() for row in rows)) / (6 * 40)


def test_the_gradient_does_not_depend_on_the_cut():
    found = []
    for data in (packed(random_samples()), packed(random_samples(), row_tokens=30), alone(random_samples())):
        model = adapted()
        Trainer(model, trainer_settings()).forward_backward(data)
        found.append(gradients(model))
    assert largest_gap(found[1], found[0]) < 1e-4
    assert largest_gap(found[2], found[0]) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_adapters_off_are_a_frozen_copy(architecture):
    """Values, gradients and three optimizer steps, equal to the bit."""
    own, other = adapted(architecture), adapted(architecture)
    pairs = (own, own), (other, tiny_model(architecture))
    trainers = [Trainer(model, trainer_settings(KL, num_iterations=3), reference=reference) for model, reference in pairs]
    for trainer in trainers:
        trainer.forward_backward(batch())
    assert same_bits(gradients(own), gradients(other))
    for trainer in trainers:
        trainer.optimizer.zero_grad()
    first, second = (trainer.train([batch()]) for trainer in trainers)
    assert first["kl"] > 1e-3
    assert first == second
    assert same_bits(snapshot(own), snapshot(other))


def test_the_base_is_never_touched():
    model = adapted()
    before = {name: tensor.clone() for name, tensor in frozen_weights(model).items()}
    Trainer(model, trainer_settings(KL, weight_decay=0.1), reference=model).train([batch()])
    assert same_bits(frozen_weights(model), before)


@pytest.mark.parametrize("given", [{}, {"offload_optimizer": True}, {"dtype": torch.bfloat16, "master_weights": "float32"}])
def test_ranks_stay_equal_to_the_bit(given):
    dtype = given.pop("dtype", torch.float32)
    models = [adapted(dtype=dtype) for _ in range(2)]
    single = adapted(dtype=dtype)

    def work(ranks: ThreadRanks) -> dict[str, torch.Tensor]:
        model = models[ranks.rank]
        trainer = Trainer(model, trainer_settings(KL, optimizer="sgd", **given), reference=model, ranks=ranks)
        if ranks.rank == 0:
            trainer.train([batch()])
            trainer.end()
        else:
            trainer.serve()
        return snapshot(model)

    zero, one = on_ranks(2, work)
    assert same_bits(zero, one)
    Trainer(single, trainer_settings(KL, optimizer="sgd", **given), reference=single).train([batch()])
    assert largest_gap(zero, snapshot(single)) < (1e-5 if dtype == torch.float32 else 0.02)


def test_ranks_with_another_base_do_not_start():
    models = [adapted(), adapted()]
    with torch.no_grad():
        models[1].lm_head.weight[0, 0] += 1
    ends = on_ranks(2, lambda ranks: Trainer(models[ranks.rank], trainer_settings(), ranks=ranks))
    assert all(isinstance(end, TrainingError) for end in ends), ends


# ── the engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def connected(model: torch.nn.Module, sampling: torch.nn.Module) -> tuple[Trainer, HfEngine, InProcessBridge]:
    trainer, engine = Trainer(model, trainer_settings(learning_rate=0.05)), HfEngine(sampling)
    bridge = InProcessBridge(
        trainer.weights,
        engine,
        verify_every=1,
        deadline_s=30.0,
        frozen=lambda: (frozen_weights(model), engine.frozen_weights()),
    )
    return trainer, engine, bridge


async def test_a_push_brings_the_adapters_and_the_engine_samples_with_them():
    model = adapted()
    trainer, engine, bridge = connected(model, copy_for_sampling(model))
    assert set(engine.named_weights()) == set(trainer.weights()) == set(pushed_weights(model))
    await engine.start()
    try:
        sampling, prompt = SamplingParams(max_tokens=8, temperature=1.0, seed=3), (5, 9, 12)
        for version in range(3):
            await bridge.push(version)
            done = await engine.generate(prompt, sampling)
            ids = torch.tensor([*prompt, *done.ids])
            with torch.no_grad():
                own = torch.log_softmax(model(input_ids=ids[None]).logits[0, 2:-1], -1)
            wanted = own.gather(-1, ids[3:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(done.engine_logprobs), wanted, rtol=1e-4, atol=1e-4)
            trainer.train([batch()])
            moved = dict(trainer.weights())
            assert not same_bits(dict(engine.named_weights()), moved)
    finally:
        await engine.stop()


async def test_another_base_is_noticed_at_the_first_push():
    model = adapted()
    other = copy_for_sampling(adapted())
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.base_layer.weight[0, 0] += 1e-3
    _, _, bridge = connected(model, other)
    with pytest.raises(WeightMismatchError, match=r"base model is not the trainer's: 1 of .*layers.0.mlp.up_proj.base_layer"):
        await bridge.push(0)


async def test_an_engine_without_adapters_is_noticed():
    _, _, bridge = connected(adapted(), tiny_model())
    with pytest.raises(WeightMismatchError, match="base model is not the trainer's"):
        await bridge.push(0)
