"""Ten training steps whose losses and gradient norms are written down: whoever changes a number finds out."""

from __future__ import annotations

import pytest

from parts.models import tiny_model
from parts.samples import loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.trainer.trainer import Trainer

# The trainer that held all logits and its successor with the chunked head both give these, to six digits.
GOLDEN = [
    (0.0148715, 0.333374),
    (0.0743034, 0.599287),
    (-0.112954, 0.595945),
    (0.00234661, 0.366461),
    (-0.0554134, 0.32945),
    (-0.021971, 0.38617),
    (0.0352716, 0.245401),
    (0.042479, 0.343689),
    (-0.0376889, 0.341213),
    (0.0936231, 0.536478),
]
TOLERANCE = 2e-3
"""Relative. Another processor sums in another order, and AdamW makes much of small gradients."""


def curve(**settings: object) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: a turn-level ratio, a sampler weight, a KL term and two passes a step."""
    model, reference = tiny_model(seed=3), tiny_model(seed=3).requires_grad_(False)
    loss = loss_options(ratio_level="turn", correction="tis", sampler_level="turn", beta=0.05)
    given = {"learning_rate": 3e-3, "num_iterations": 2, "warmup_steps": 4} | settings
    trainer = Trainer(model, trainer_settings(loss, **given), reference=reference)
    found = []
    for step in range(10):
        samples = on_policy(random_samples(100 + step), model, gap=0.1, seed=step)
        metrics = trainer.train([packed(samples, row_tokens=48)])
        found.append((metrics["loss"], metrics["grad_norm"]))
    return found


@pytest.mark.parametrize("activations", ["keep", "full"])
def test_the_curve_is_the_one_written_down(activations):
    found = curve(activations=activations)
    for step, (one, wanted) in enumerate(zip(found, GOLDEN, strict=True)):
        assert one == pytest.approx(wanted, rel=TOLERANCE, abs=2e-5), f"step {step}"
