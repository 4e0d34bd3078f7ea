"""What computing common beginnings once gives: seconds of a step with and without, over prompts, completions and group sizes.

python benchmarks/prefix_sharing.py --out benchmarks/results/prefix_sharing.json [--model tiny] [--device cpu]

One group, whose samples have the same prompt and completions of their own, all of them trained. `gain` is the ratio of the
shortest of some repetitions, `estimate` what `trajectories/sharing.py` says of these rows, and `gradient` how far the two
gradients are apart, as norms.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from trainer_throughput import SHAPES, make_model, synchronize

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.trainer.attention import use_attention
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.pack import lay_out, pack
from polyturn.types import TrainBatch, TrainSample


def make_samples(prompt: int, completion: int, group_size: int, vocabulary: int) -> list[TrainSample]:
    """Siblings of one random prompt."""
    rng = np.random.default_rng((prompt, completion, group_size))
    common, length = rng.integers(0, vocabulary, prompt), prompt + completion
    mask = np.arange(length) >= prompt
    return [
        TrainSample(
            trajectory_id=f"g/{number}",
            group_id="g",
            temperature=1.0,
            input_ids=np.concatenate([common, rng.integers(0, vocabulary, completion)]),
            loss_mask=mask,
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            engine_logprobs=np.where(mask, -5.0, 0).astype(np.float32),
            turn_index=np.where(mask, 0, -1),
            policy_version=np.where(mask, 0, -1),
        )
        for number in range(group_size)
    ]


def flat_gradient(trainer: Trainer) -> torch.Tensor:
    return torch.cat([gradient.float().flatten() for gradient in trainer.optimizer.gradients()])


def timed(trainer: Trainer, batch: TrainBatch, device: torch.device, repeats: int) -> tuple[float, torch.Tensor]:
    """Fewest seconds of forward and backward, and the gradient."""
    seconds = []
    for _ in range(repeats + 1):
        trainer.optimizer.zero_grad()
        synchronize(device)
        began = time.perf_counter()
        trainer.forward_backward(batch)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    gradient = flat_gradient(trainer)
    trainer.optimizer.zero_grad()
    return min(seconds[1:]), gradient


def main() -> None:
    """Measure every prompt, completion and group size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--completions", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    model = make_model(options.model, device)
    if device.type == "cpu":
        model = model.float()
    use_attention(model, "auto")
    settings = TrainerSettings(
        learning_rate=1e-6,
        loss=resolve_loss("dapo", LossOptions(), fixed_length=1024, default_correction="none"),
        total_optimizer_steps=100,
        compiled=device.type == "cuda",
        share_prefixes="on",
    )
    trainer, lines = Trainer(model, settings), []
    assert trainer.sharing is not None, "it was asked for"
    for prompt in options.prompts:
        for completion in options.completions:
            for size in options.group_sizes:
                samples = make_samples(prompt, completion, size, SHAPES[options.model].vocabulary)
                found: dict[str, Any] = {
                    "prompt": prompt,
                    "completion": completion,
                    "group_size": size,
                    "row_tokens": options.row_tokens,
                }
                gradients = []
                for name, sharing in (("plain", None), ("shared", trainer.sharing)):
                    batch = pack(samples, row_tokens=options.row_tokens, planned_trajectories=size, sharing=sharing)
                    seconds, gradient = timed(trainer, batch, device, options.repeats)
                    found |= {f"{name}_tokens": batch.num_tokens, f"{name}_s": round(seconds, 4)}
                    gradients.append(gradient)
                found["gain"] = round(found["plain_s"] / found["shared_s"], 2)
                rows = [lay_out(samples, row_tokens=options.row_tokens, sharing=sharing) for sharing in (None, trainer.sharing)]
                found["estimate"] = round(trainer.sharing.gain(*rows), 2)
                found["gradient"] = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
                lines.append(found)
                print(json.dumps(found), flush=True)
                options.out.write_text(
                    json.dumps({**describe_machine(), "model": options.model, "lines": lines}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
