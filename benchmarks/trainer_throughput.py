"""Tokens a second, model FLOPs utilisation and peak memory of the trainer, for models of several sizes and two row lengths.

python benchmarks/trainer_throughput.py --out benchmarks/results/trainer_throughput.json [NAME ...]

The models are of the published shapes, with random weights in bfloat16; samples fill the rows they are packed into, and every
second token is trained. A step is everything `Trainer.train` does, from rows in CPU memory to updated weights and metrics;
packing is not in it.

    model FLOPs = 6 x weights that multiply x tokens + 12 x layers x hidden x tokens x (sample length / 2)   (causal)
    utilisation = model FLOPs / seconds / the device's dense bfloat16 peak (--peak-tflops, from its data sheet)

Frozen weights (LoRA) cost 4 in place of 6; what is computed again counts as nothing. Memory is the allocator's peak over the
measured steps; `held` is what is allocated between two steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from machine import describe_machine

from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.models.adapters import add_adapters
from polyturn.models.load import differentiable
from polyturn.trainer.attention import use_attention
from polyturn.trainer.layers import decoder_layers
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.pack import pack
from polyturn.types import TrainBatch, TrainSample

GIB = 1 << 30


class Shape(NamedTuple):
    """Sizes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 300, True),
    "deep": Shape(128, 256, 28, 4, 2, 512, False),
    "135M": Shape(576, 1536, 30, 9, 3, 49152, True),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
}
"""SmolLM2-135M, Qwen2.5 of three sizes, and two to try scripts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    model: str
    sample_tokens: int
    samples: int
    row_tokens: int = 16384
    activations: str = "keep"
    compiled: bool = True
    master_weights: str = "float32"
    optimizer: str = "adamw"
    lora: int | None = None
    """Rank of adapters; None trains all weights."""
    quantized: bool = False
    """Whether the decoder's linear layers are of 4 bits."""

    @property
    def name(self) -> str:
        """Such as `1.5B/1k/compiled`."""
        length = f"{self.sample_tokens // 1024}k" if self.sample_tokens >= 1024 else str(self.sample_tokens)
        words = [self.model, f"{self.samples}x{length}"]
        words += [f"rows{self.row_tokens // 1024}k"] if self.row_tokens != 16384 else []
        words += [self.activations] if self.activations != "keep" else []
        words += [f"lora{self.lora}"] if self.lora else []
        words += ["4bit"] if self.quantized else []
        words += [self.master_weights] if self.master_weights != "float32" else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        return "/".join([*words, "compiled" if self.compiled else "eager"])


CASES = [
    Case(model="1.5B", sample_tokens=1024, samples=64),
    Case(model="1.5B", sample_tokens=8192, samples=8),
    Case(model="135M", sample_tokens=1024, samples=64),
    Case(model="0.5B", sample_tokens=1024, samples=64),
    Case(model="1.5B", sample_tokens=1024, samples=16, compiled=False),
    Case(model="1.5B", sample_tokens=1024, samples=16),
    Case(model="7B", sample_tokens=1024, samples=16, lora=16),
    Case(model="7B", sample_tokens=1024, samples=16, lora=16, quantized=True),
    Case(model="1.5B", sample_tokens=1024, samples=64, master_weights="none"),
    Case(model="1.5B", sample_tokens=8192, samples=8, activations="selective"),
    Case(model="1.5B", sample_tokens=8192, samples=8, activations="full"),
    Case(model="135M", sample_tokens=8192, samples=8),
    Case(model="0.5B", sample_tokens=8192, samples=8),
    Case(model="1.5B", sample_tokens=1024, samples=16, row_tokens=1024),
    Case(model="1.5B", sample_tokens=1024, samples=64, master_weights="stochastic"),
    Case(model="1.5B", sample_tokens=1024, samples=64, master_weights="none", optimizer="adamw_8bit"),
    # A step of `peer_trl.py`: short answers to short questions.
    Case(model="135M", sample_tokens=64, samples=384, row_tokens=32768, activations="full"),
]
TRIALS = [
    Case(model="tiny", sample_tokens=1024, samples=2, row_tokens=2048, activations="selective", compiled=False, lora=4),
    Case(model="tiny", sample_tokens=1024, samples=2, row_tokens=2048, compiled=False, lora=4, quantized=True),
]


def config_of(name: str) -> transformers.Qwen2Config:
    """The configuration of a shape."""
    shape = SHAPES[name]
    return transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
        pad_token_id=0,
    )


def make_model(name: str, device: torch.device) -> torch.nn.Module:
    """A model of the shape, with random weights, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    model.tie_weights()
    return model.eval()


def quantize_layers(model: torch.nn.Module) -> None:
    """Hold the linear layers of the decoder in 4 bits, as `model.quantize=4bit` does for one that is loaded."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for layer in decoder_layers(model):
        for name, linear in [(name, one) for name, one in layer.named_modules() if isinstance(one, torch.nn.Linear)]:
            small = Linear4bit(
                linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype, device="meta", **options
            )
            small.weight = Params4bit(linear.weight.data, requires_grad=False, **options).to(linear.weight.device)
            small.bias = linear.bias
            layer.set_submodule(name, small)
    model.is_loaded_in_4bit = True  # PEFT asks
    differentiable(model)


def make_batch(case: Case, vocabulary: int, seed: int) -> TrainBatch:
    """Samples of random tokens that fill the rows."""
    rng = np.random.default_rng(seed)
    length = case.sample_tokens
    samples = []
    for index in range(case.samples):
        mask = np.arange(length) % 2 == 1
        samples.append(
            TrainSample(
                trajectory_id=f"t{index}",
                group_id="g",
                temperature=1.0,
                input_ids=rng.integers(0, vocabulary, length),
                loss_mask=mask,
                advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
                engine_logprobs=np.where(mask, -11.0, 0).astype(np.float32),
                turn_index=np.where(mask, 0, -1),
                policy_version=np.where(mask, 0, -1),
            )
        )
    return pack(samples, row_tokens=case.row_tokens, planned_trajectories=case.samples)


def model_flops(parameters: int, case: Case) -> float:
    """Of one step of a model with so many weights; the head multiplies for trained tokens only, which are half of them."""
    shape, tokens = SHAPES[case.model], case.samples * case.sample_tokens
    head = shape.vocabulary * shape.hidden
    embedding = 0 if shape.tied else head
    weights = parameters - head - embedding
    passes = 6.0 if case.lora is None else 4.0
    attention = 12 * shape.layers * shape.hidden * tokens * case.sample_tokens / 2
    return passes * weights * tokens + passes * head * tokens / 2 + attention


def make_trainer(case: Case, device: torch.device) -> tuple[Trainer, int, int]:
    """A trainer of the case, how many weights its model has, and how many of them are frozen."""
    torch._dynamo.reset()  # what was compiled for one length of rows would be compiled again for any length
    model = make_model(case.model, device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    frozen = 0
    if case.quantized:
        quantize_layers(model)
    if case.lora is not None:
        add_adapters(model, rank=case.lora, alpha=32.0, targets=None, base=case.model, seed=0)
        frozen, weights = weights, weights + sum(one.numel() for one in model.parameters() if one.requires_grad)
    use_attention(model, "auto")
    settings = TrainerSettings(
        learning_rate=1e-6,
        loss=resolve_loss("dapo", LossOptions(), fixed_length=case.sample_tokens, default_correction="none"),
        total_optimizer_steps=100,
        activations=case.activations,  # type: ignore[arg-type]
        compiled=case.compiled,
        master_weights=case.master_weights,  # type: ignore[arg-type]
        optimizer=case.optimizer,  # type: ignore[arg-type]
    )
    return Trainer(model, settings), weights, frozen


def measure(case: Case, device: torch.device, peak_tflops: float, *, warmup: int, steps: int) -> dict[str, Any]:
    """Train some steps and say how long they took and what they held."""
    trainer, weights, frozen = make_trainer(case, device)
    vocabulary, seconds = SHAPES[case.model].vocabulary, []
    for number in range(warmup + steps):
        batch = make_batch(case, vocabulary, number)
        if number == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        began = time.perf_counter()
        metrics = trainer.train([batch])
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        assert np.isfinite(metrics["loss"])
    middle, tokens = statistics.median(seconds[warmup:]), case.samples * case.sample_tokens
    return {
        "case": case.name,
        "parameters": weights,
        "frozen": frozen,
        "tokens_per_step": tokens,
        "seconds_per_step": [round(value, 4) for value in seconds],
        "tokens_per_s": round(tokens / middle),
        "model_tflops_per_s": round(model_flops(weights, case) / middle / 1e12, 1),
        "utilisation": round(model_flops(weights, case) / middle / 1e12 / peak_tflops, 4),
        **(memory(device) if device.type == "cuda" else {}),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> dict[str, float]:
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 2),
        "held_gib": round(torch.cuda.memory_allocated(device) / GIB, 2),
    }


def main() -> None:
    """Measure every case that is named, or all, and write after each: whoever stops it keeps what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all when none is named")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device, found = torch.device(options.device), []
    for case in [*CASES, *TRIALS]:
        if case.name not in (options.names or [case.name for case in CASES]):
            continue
        try:
            found.append(measure(case, device, options.peak_tflops, warmup=options.warmup, steps=options.steps))
        except torch.OutOfMemoryError as error:
            found.append({"case": case.name, "out_of_memory": str(error).splitlines()[0]})
        print(json.dumps(found[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        record = {**describe_machine(), "peak_tflops": options.peak_tflops, "cases": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
