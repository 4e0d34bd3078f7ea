"""The seconds of a run's first steps on a GPU, with what is compiled in them: once for rows of any length, or again and again.

    python benchmarks/first_steps.py --out benchmarks/results/first_steps.json [--shares off]

Groups of 8 siblings with a common prompt, of completions that get longer and then shorter, are packed into rows, and each step
is a forward and backward pass over such rows. For every step: how many tokens its rows have, graphs that were compiled until
its end (`graphs`), and its seconds. torch keeps what it compiled on disk: for a cold start, give it an empty folder in
TORCHINDUCTOR_CACHE_DIR and in TRITON_CACHE_DIR. To see an older trainer, put its `src` first in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine
from torch._dynamo.utils import counters
from trainer_throughput import make_model, synchronize

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.trainer.attention import use_attention
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.pack import pack
from polyturn.types import TrainSample

STEPS = ((6, 256), (28, 256), (28, 256), (27, 256), (43, 256), (41, 200), (30, 150), (12, 90), (20, 30), (2, 16))
"""Groups of a step, and the limit of their completions."""
SIBLINGS = 8


def groups(step: int, count: int, limit: int, vocabulary: int) -> list[TrainSample]:
    """`count` groups of siblings: a prompt of about 30 tokens, completions of 3 up to `limit`, many of them at it."""
    rng, samples = np.random.default_rng(step), []
    for group in range(count):
        prompt = rng.integers(0, vocabulary, int(rng.integers(27, 33)))
        for sibling in range(SIBLINGS):
            length = int(min(limit, rng.integers(3, limit * 2)))
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, length)])
            mask = np.arange(len(ids)) >= len(prompt)
            samples.append(
                TrainSample(
                    trajectory_id=f"{step}/{group}/{sibling}",
                    group_id=f"{step}/{group}",
                    temperature=1.0,
                    input_ids=ids,
                    loss_mask=mask,
                    advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                    engine_logprobs=np.where(mask, -11.0, 0).astype(np.float32),
                    turn_index=np.where(mask, 0, -1),
                    policy_version=np.where(mask, 0, -1),
                )
            )
    return samples


def main() -> None:
    """Take the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="135M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--row-tokens", type=int, default=32768)
    parser.add_argument("--shares", choices=["on", "off"], default="on", help="whether common prompts are computed once")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = make_model(options.model, device)
    use_attention(model, "auto")
    settings = TrainerSettings(
        learning_rate=1e-6,
        loss=resolve_loss("dapo", LossOptions(), fixed_length=512, default_correction="none"),
        total_optimizer_steps=len(STEPS),
        activations="full",
        compiled=True,
        share_prefixes=options.shares,
    )
    trainer = Trainer(model, settings)
    found = []
    for step, (count, limit) in enumerate(STEPS, 1):
        samples = groups(step, count, limit, model.config.vocab_size)
        batch = pack(samples, row_tokens=options.row_tokens, planned_trajectories=len(samples), sharing=trainer.sharing)
        synchronize(device)
        began = time.perf_counter()
        trainer.optimizer.zero_grad()
        trainer.forward_backward(batch)
        synchronize(device)
        seconds = time.perf_counter() - began
        rows = [len(row.input_ids) for row in batch.rows]
        found.append({"rows": rows, "graphs": counters["stats"]["unique_graphs"], "seconds": round(seconds, 3)})
        print(json.dumps(found[-1]), flush=True)
    whole = round(sum(one["seconds"] for one in found), 2)
    result = {**describe_machine(), "model": options.model, "shares": options.shares, "seconds": whole, "steps": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
