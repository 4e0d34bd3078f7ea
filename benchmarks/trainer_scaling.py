r"""How a training step scales over ranks: seconds, memory, and what gathering the weights for a push takes.

torchrun --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --parallel fsdp2 --out FILE.json

Each run adds a line to the file: run it for 1, 2, 4 ranks, with `ddp`, `zero1` and `fsdp2`. The work of a step is the same for
any number of ranks (strong scaling). `--context-ranks 2` cuts every row over two ranks; rows of 64k tokens, cut and whole:

for context in 2 1; do torchrun --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --samples 2 \
    --sample-tokens 65536 --row-tokens 65536 --activations full --context-ranks $context --out FILE.json; done

`--tensor-ranks 2` cuts every layer. Models, samples and rows are those of `trainer_throughput.py`. `whole_s` is the time in
which all tensors are gathered bucket by bucket on every rank, without a receiver. The gradient's norm of the first step is in
the file, so that lines can be held against each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from trainer_throughput import SHAPES, Case, make_batch, make_model, memory, synchronize

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.trainer.attention import use_attention
from polyturn.trainer.ranks import ProcessRanks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.transfer import BUCKET_BYTES, buckets


def main() -> None:
    """Be one rank; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--parallel", choices=["ddp", "zero1", "fsdp2"], default="fsdp2")
    parser.add_argument("--sync-every-row", action="store_true")
    parser.add_argument("--context-ranks", type=int, default=1)
    parser.add_argument("--tensor-ranks", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--activations", choices=["keep", "selective", "full"], default="keep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    case = Case(
        model=options.model,
        sample_tokens=options.sample_tokens,
        samples=options.samples,
        row_tokens=options.row_tokens,
        activations=options.activations,
        compiled=on_gpu,
    )
    ranks = ProcessRanks.join(deadline_s=600, start_deadline_s=600)
    trainer = make_trainer(case, options, device, ranks)
    if ranks.rank:
        trainer.serve()
        return
    cut = {"context_ranks": options.context_ranks, "tensor_ranks": options.tensor_ranks}
    line = measure(case, options, trainer, device) | {"ranks": ranks.size, **cut}
    trainer.end()
    found = json.loads(options.out.read_text())["lines"] if options.out.exists() else []
    options.out.write_text(json.dumps({**describe_machine(), "lines": [*found, line]}, indent=1) + "\n")
    print(json.dumps(line), flush=True)


def make_trainer(case: Case, options: argparse.Namespace, device: torch.device, ranks: ProcessRanks) -> Trainer:
    """The same weights on every rank, made on its GPU, since a CPU takes a minute for a large model."""
    torch.manual_seed(0)
    model = make_model(case.model, device)
    if options.parallel == "fsdp2":
        model = model.to("cpu")
    use_attention(model, "auto", on_gpu=device.type == "cuda")
    settings = TrainerSettings(
        learning_rate=1e-6,
        loss=resolve_loss("dapo", LossOptions(), fixed_length=case.sample_tokens, default_correction="none"),
        total_optimizer_steps=100,
        activations=options.activations,
        compiled=case.compiled,
        master_weights="float32",
        parallel="replicated" if options.parallel == "ddp" else options.parallel,
        sync_every_row=options.sync_every_row,
        context_ranks=options.context_ranks,
        tensor_ranks=options.tensor_ranks,
        device=str(device),
    )
    return Trainer(model, settings, ranks=ranks if ranks.size > 1 or options.parallel == "fsdp2" else None)


def measure(case: Case, options: argparse.Namespace, trainer: Trainer, device: torch.device) -> dict[str, Any]:
    """Train some steps, then gather the weights as a push does."""
    seconds, norms = [], []
    for number in range(options.warmup + options.steps):
        batch = make_batch(case, SHAPES[case.model].vocabulary, number)
        if number == options.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        began = time.perf_counter()
        norms.append(trainer.train([batch])["grad_norm"])
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds[options.warmup :])
    return {
        "case": case.name,
        "parallel": options.parallel + ("/every row" if options.sync_every_row else ""),
        "seconds_per_step": [round(value, 4) for value in seconds],
        "tokens_per_s": round(case.samples * case.sample_tokens / middle),
        "first_grad_norm": norms[0],
        "held_by_optimizer_gib": round(trainer.optimizer.held().device.total / (1 << 30), 4),
        "whole_s": [round(gathered(trainer, device), 4) for _ in range(3)],
        **(memory(device) if device.type == "cuda" else {}),
    }


def gathered(trainer: Trainer, device: torch.device) -> float:
    """Seconds to gather all tensors, a bucket at a time."""
    source = trainer.source()
    synchronize(device)
    began = time.perf_counter()
    for names in buckets(source.weights(), BUCKET_BYTES):
        source.gather(names)
    synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
