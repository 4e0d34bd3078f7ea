"""Optimizer steps against the same steps written out by hand: old policy, ratios, clipping, KL, schedule, decay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parts.models import largest_gap, snapshot, tiny_model
from parts.samples import alone, loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.config.schema import LossOptions
from polyturn.losses import LossInputs, policy_loss, token_weights
from polyturn.losses.reference import PaddedBatch, reference_loss
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainSample

# ── the trainer, by hand ───────────────────────────────────────────────────────────────────────────────────────────────


class ByHand:
    """Optimizer steps in the most obvious way: one unpacked forward a sample, the whole step in one `LossInputs`."""

    def __init__(self, model: torch.nn.Module, settings: TrainerSettings, reference: torch.nn.Module | None = None) -> None:
        self.model, self.settings, self.reference = model, settings, reference
        kind: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[settings.optimizer]
        extra = {"betas": settings.betas, "eps": settings.adam_epsilon, "weight_decay": 0.0}
        self.optimizer = kind(model.parameters(), lr=settings.learning_rate, **(extra if kind is torch.optim.AdamW else {}))
        self.losses: list[float] = []
        self.ratios: list[float] = []

    def train(self, steps: list[list[TrainSample]]) -> None:
        several = self.settings.num_iterations * len(steps) > 1
        old = [self.score(self.model, samples).detach() if several else None for samples in steps]
        for _ in range(self.settings.num_iterations):
            for samples, before in zip(steps, old, strict=True):
                self.step(samples, before)

    def step(self, samples: list[TrainSample], old: torch.Tensor | None) -> None:
        loss = self.settings.loss
        names = list(dict.fromkeys(sample.trajectory_id for sample in samples))
        numbers = np.concatenate([np.full(s.loss_mask.sum(), names.index(s.trajectory_id)) for s in samples])
        weights = token_weights(
            loss.aggregation or "fixed", numbers, planned_trajectories=len(names), fixed_length=loss.fixed_length
        )
        result = policy_loss(
            LossInputs(
                trainer_logprobs_N=self.score(self.model, samples),
                old_logprobs_N=old,
                engine_logprobs_N=trained(samples, "engine_logprobs"),
                reference_logprobs_N=None if self.reference is None else self.score(self.reference, samples).detach(),
                advantages_N=trained(samples, "advantages"),
                token_weights_N=torch.from_numpy(weights).float(),
                trajectory_index_N=torch.from_numpy(numbers),
                turn_index_N=trained(samples, "turn_index"),
            ),
            loss,
        )
        self.optimizer.zero_grad()
        result.loss.backward()
        squares = sum(float(p.grad.double().pow(2).sum()) for p in self.model.parameters() if p.grad is not None)
        factor = min(1.0, self.settings.max_grad_norm / (math.sqrt(squares) + 1e-6))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.optimizer.step()
        self.losses.append(float(result.loss.detach()))
        total, count = result.metrics["ratio"]
        self.ratios.append(float(total / count))

    @staticmethod
    def score(model: torch.nn.Module, samples: list[TrainSample]) -> torch.Tensor:
        rows = []
        for sample in samples:
            ids = torch.from_numpy(sample.input_ids)
            logits: torch.Tensor = model(input_ids=ids[None]).logits[0, :-1] / sample.temperature
            chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[1:, None])[:, 0]
            rows.append(chosen[torch.from_numpy(sample.loss_mask[1:])])
        return torch.cat(rows)


def trained(samples: list[TrainSample], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in samples]))


VARIANTS: dict[str, tuple[dict[str, Any], LossOptions, int]] = {
    "one step": ({}, loss_options(), 1),
    "two iterations": ({"num_iterations": 2}, loss_options(), 1),
    "two steps a batch": ({}, loss_options("dapo"), 2),
    "two iterations of two steps": ({"num_iterations": 2}, loss_options("gspo", clip_low=0.05, clip_high=0.05), 2),
    "turn ratio and tis": ({"num_iterations": 3}, loss_options(ratio_level="turn", correction="tis"), 1),
    "sgd": ({"optimizer": "sgd", "num_iterations": 2, "learning_rate": 0.5}, loss_options(), 1),
    "adam settings": ({"betas": (0.5, 0.6), "adam_epsilon": 1e-2, "num_iterations": 3}, loss_options(), 1),
    "clipped gradient": (
        {"max_grad_norm": 0.01, "optimizer": "sgd", "num_iterations": 2, "learning_rate": 10.0},
        loss_options(),
        1,
    ),
}


@pytest.mark.parametrize(("given", "loss", "steps"), VARIANTS.values(), ids=VARIANTS)
def test_weights_after_a_batch_equal_those_of_a_loop_by_hand(given, loss, steps):
    """The old policy of every optimizer step is the one from before the first: a later one would give other ratios."""
    start = tiny_model()
    samples = on_policy(random_samples(20, count=8), start, gap=0.1)
    cut = [samples[i::steps] for i in range(steps)]
    # A large epsilon: with a small one Adam's first steps are the sign of the gradient, which rounding decides near 0.
    settings = trainer_settings(loss, **({"adam_epsilon": 1e-3} | given))
    model, by_hand = tiny_model(), ByHand(tiny_model(), settings)
    by_hand.train(cut)
    metrics = Trainer(model, settings).train([packed(part, row_tokens=40) for part in cut])
    moved = largest_gap(snapshot(model), snapshot(start))
    assert moved > 1e-4
    assert largest_gap(snapshot(model), snapshot(by_hand.model)) < 1e-3 * moved
    assert metrics["loss"] == pytest.approx(np.mean(by_hand.losses), rel=1e-4, abs=1e-7)
    assert metrics["ratio"] == pytest.approx(_mean_over_tokens(by_hand, cut), rel=1e-5)


def _mean_over_tokens(by_hand: ByHand, cut: list[list[TrainSample]]) -> float:
    tokens = [int(sum(s.loss_mask.sum() for s in part)) for part in cut] * (len(by_hand.ratios) // len(cut))
    return float(np.average(by_hand.ratios, weights=tokens))


# ── ratios ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", [loss_options(), loss_options("gspo"), loss_options("cispo"), loss_options("sapo")])
def test_the_first_step_has_ratio_exactly_one(loss):
    model = tiny_model()
    metrics = Trainer(model, trainer_settings(loss)).train([packed(random_samples(), row_tokens=30)])
    assert metrics["ratio"] == 1.0
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0.0
    assert metrics["mismatch"] > 0.1, "the engine's numbers are random here, and the ratio is none of their business"


def test_one_step_needs_no_extra_forward_and_several_need_one_a_row():
    def forwards(**given: Any) -> int:
        model, count = tiny_model(), 0
        trainer = Trainer(model, trainer_settings(**given))

        def counting(*_: Any) -> None:
            nonlocal count
            count += 1

        model.model.register_forward_hook(counting)
        trainer.train([alone(random_samples())])
        return count

    assert forwards() == 6
    assert forwards(num_iterations=2) == 6 + 2 * 6


def test_a_second_batch_of_a_step_is_off_policy():
    """optimizer_steps_per_batch=2: the second batch meets weights that have moved, so its ratio is not 1."""
    model, samples = tiny_model(), random_samples(21, count=8)
    trainer = Trainer(model, trainer_settings(learning_rate=0.05))
    metrics = trainer.train([packed(samples[:4]), packed(samples[4:])])
    assert metrics["ratio"] != 1
    assert (trainer.optimizer_step, trainer.version) == (2, 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_is_part_of_the_trainers_logprobs(temperature):
    model = tiny_model()
    samples = on_policy(random_samples(22, temperature=temperature), model)
    metrics = Trainer(model, trainer_settings()).forward_backward(packed(samples))
    assert metrics["mismatch_max"] < 1e-5
    wrong = [replace(sample, temperature=temperature * 1.3) for sample in samples]
    assert Trainer(model, trainer_settings()).forward_backward(packed(wrong))["mismatch"] > 0.02


# ── KL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("times_ratio", [True, False])
@pytest.mark.parametrize("iterations", [1, 2])
def test_the_kl_term_against_the_slow_reference(times_ratio, iterations):
    loss = loss_options(beta=0.4, kl_times_ratio=times_ratio, aggregation="sequence")
    reference = tiny_model(seed=1)
    samples = on_policy(random_samples(23), tiny_model(), gap=0.1)
    settings = trainer_settings(loss, optimizer="sgd", num_iterations=iterations, max_grad_norm=1e9, learning_rate=0.1)
    model, slow = tiny_model(), tiny_model()
    before = snapshot(reference)
    metrics = Trainer(model, settings, reference=reference).train([packed(samples, row_tokens=30)])
    old = padded_logprobs(slow, samples).detach() if iterations > 1 else None
    losses = []
    for _ in range(iterations):
        batch = padded(samples, padded_logprobs(slow, samples), old, padded_logprobs(reference, samples).detach())
        value = reference_loss(batch, loss, planned_trajectories=len(samples))
        slow.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in slow.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(float(value.detach()))
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["kl"] > 0.01
    moved = largest_gap(snapshot(model), snapshot(tiny_model()))
    assert largest_gap(snapshot(model), snapshot(slow)) < 1e-3 * moved
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.state_dict().items())


def test_a_reference_equal_to_the_policy_adds_no_loss_and_no_gradient():
    batch = packed(random_samples(24))
    plain, with_kl = tiny_model(), tiny_model()
    one = Trainer(plain, trainer_settings()).train([batch])
    two = Trainer(with_kl, trainer_settings(loss_options(beta=0.5)), reference=tiny_model()).train([batch])
    assert two["kl"] == pytest.approx(0, abs=1e-9)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-7)
    assert largest_gap(snapshot(with_kl), snapshot(plain)) < 1e-4


def padded_logprobs(model: Any, samples: list[TrainSample]) -> torch.Tensor:
    """`[B, T]`, 0 where nothing is predicted; carries the gradient."""
    longest = max(map(len, samples))
    rows = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids)
        logits = model(input_ids=ids[None]).logits[0, :-1] / sample.temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[1:, None])[:, 0]
        rows.append(torch.cat([chosen.new_zeros(1), chosen, chosen.new_zeros(longest - len(sample))]))
    return torch.stack(rows)


def padded(
    samples: list[TrainSample], logprobs: torch.Tensor, old: torch.Tensor | None, reference: torch.Tensor
) -> PaddedBatch:
    longest = max(map(len, samples))

    def grid(name: str) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(torch.from_numpy(getattr(s, name)), (0, longest - len(s))) for s in samples]
        )

    return PaddedBatch(
        trainer_logprobs_BT=logprobs,
        old_logprobs_BT=old,
        engine_logprobs_BT=grid("engine_logprobs"),
        reference_logprobs_BT=reference,
        advantages_BT=grid("advantages"),
        loss_mask_BT=grid("loss_mask"),
        turn_index_BT=grid("turn_index"),
        trajectory_of_row=list(range(len(samples))),
    )


# ── a run that must come out the same ──────────────────────────────────────────────────────────────────────────────────

GOLDEN: dict[str, dict[str, list[float]]] = {
    "llama": {
        "loss": [0.072851, -0.0824123, -0.0829859, -0.0806817, -0.0750411],
        "logprob": [-4.7954456, -5.1092022, -4.8520135, -4.6971333, -4.6201688],
        "grad_norm": [0.3915034, 0.1742668, 0.1222571, 0.1783547, 0.1378234],
    },
    "qwen2": {
        "loss": [0.072851, -0.0820906, -0.0826174, -0.0810423, -0.0749431],
        "logprob": [-4.8059225, -4.809287, -4.4092498, -4.2224693, -4.1484291],
        "grad_norm": [0.5169922, 0.1886799, 0.1367462, 0.152773, 0.1558053],
    },
    "mistral": {
        "loss": [0.072851, -0.0824602, -0.0827037, -0.0804709, -0.0751607],
        "logprob": [-4.7791673, -4.9566916, -4.7057742, -4.5664738, -4.4915495],
        "grad_norm": [0.4500065, 0.1989352, 0.1707998, 0.1723033, 0.1323613],
    },
}


def golden_run(architecture: str) -> dict[str, list[float]]:
    """Five steps of two passes over a fixed batch: turn ratios, turn tis, cosine after a warm-up, decay, clip."""
    settings = trainer_settings(
        loss_options("dapo", correction="tis", ratio_level="turn", sampler_level="turn"),
        learning_rate=1e-2,
        schedule="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        adam_epsilon=1e-3,
        max_grad_norm=0.3,
        num_iterations=2,
        total_optimizer_steps=10,
    )
    model = tiny_model(architecture)
    samples = on_policy(random_samples(30), model, gap=0.1)
    trainer = Trainer(model, settings)
    steps = [trainer.train([packed(samples, row_tokens=48)]) for _ in range(5)]
    return {name: [step[name] for step in steps] for name in ("loss", "logprob", "grad_norm")}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral"])
def test_golden_run(architecture):
    """A refactor must give these numbers; a change that means to give others records them anew, and says why."""
    found = golden_run(architecture)
    for name, expected in GOLDEN[architecture].items():
        assert found[name] == pytest.approx(expected, abs=1e-5, rel=1e-5), name
