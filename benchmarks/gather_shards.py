"""Whole tensors from shards: all of a model's in one collective, as a push gathers them, and one after the other.

    torchrun --nproc-per-node 2 benchmarks/gather_shards.py --out benchmarks/results/gather_shards.json

For FSDP2 alone, and over cut layers where there are ranks for it: seconds of torch's `full_tensor` for each tensor and of
`trainer.gathering` for all, in turns, shortest of three. Both must give the same bits. `--model` as in `trainer_throughput.py`,
or `layers`: 28 layers of 64 hidden numbers, where next to nothing travels.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import describe_machine
from trainer_throughput import SHAPES, make_model, synchronize

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.trainer.gathering import whole_tensors
from polyturn.trainer.ranks import ProcessRanks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "num_attention_heads": 4, "vocab_size": 512}
ROUNDS = 3


def main() -> None:
    """Be one rank; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["layers", *SHAPES], default="layers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = ProcessRanks.join(deadline_s=300, start_deadline_s=300)
    lines = [measure(options.model, ranks, device, cut) for cut in (1, 2) if ranks.size % cut == 0]
    if ranks.rank == 0:
        options.out.write_text(json.dumps({**describe_machine(), "lines": lines}, indent=1) + "\n")
        print("\n".join(map(json.dumps, lines)), flush=True)
    ranks.gather(None, "all to be done")
    ranks.leave()


def measure(name: str, ranks: ProcessRanks, device: torch.device, tensor_ranks: int) -> dict[str, Any]:
    """Seconds of both ways."""
    torch.manual_seed(0)
    if name == "layers":
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    else:
        model = make_model(name, device).to("cpu")
    settings = TrainerSettings(
        learning_rate=1e-6,
        loss=resolve_loss("dapo", LossOptions(), fixed_length=512, default_correction="none"),
        total_optimizer_steps=1,
        parallel="fsdp2",
        tensor_ranks=tensor_ranks,
        device=str(device),
    )
    shards: dict[str, Any] = {name: tensor.detach() for name, tensor in Trainer(model, settings, ranks=ranks).weights().items()}
    ways = {
        "each_s": lambda: {name: shard.full_tensor() for name, shard in shards.items()},
        "together_s": lambda: whole_tensors(shards),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found = {}
    for _ in range(ROUNDS):
        for way, gather in ways.items():
            ranks.gather(None, "all to begin")
            synchronize(device)
            began = time.perf_counter()
            found[way] = gather()
            synchronize(device)
            seconds[way].append(time.perf_counter() - began)
    one, other = found.values()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), "the same bits"
    return {
        "model": name,
        "ranks": ranks.size,
        "tensor_ranks": tensor_ranks,
        "tensors": len(shards),
        "mib": round(sum(tensor.numel() * tensor.element_size() for tensor in one.values()) / (1 << 20), 1),
        **{way: round(min(taken), 4) for way, taken in seconds.items()},
    }


if __name__ == "__main__":
    main()
