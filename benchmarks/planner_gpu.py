"""The planner against a GPU: peaks of training and starts of vLLM, for models and settings that it was not fitted to.

    python benchmarks/planner_gpu.py --out benchmarks/results/planner_gpu.json [--cases NAME ...] [--limit-s 540]

Shapes are those of published models, with random weights (training) or dummy ones (vLLM). A case is a process of its own, and
is in the file as soon as it is measured. A step is `Trainer.train` as a recipe builds it; nearly all tokens are trained.

- `planned_gib` and `measured_gib` of training: the peak of PyTorch's allocator. `on_card_gib`: with CUDA's context and what the
  allocator holds besides, against `planned_on_card_gib`.
- of vLLM: all that is not KV cache (weights, activation peak, outside PyTorch, CUDA graphs) as its start reports it; `items`
  has each of them, and `tokens` those that its cache holds.
- *Said fits and ran out*: training runs first with its process limited to the memory of the smallest card on which the plan
  says `fits`. When that runs out it is counted, and the peak is measured without the limit. Of vLLM: a start that fails where
  the plan has room for the context.

At the end: median and worst error, over all cases and by kind, and the count.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import Record, Told, end_on_signal, options_of, python, run_chosen

from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.errors import DeviceMemoryError, EngineError
from polyturn.plan.engine_report import planned_engine
from polyturn.plan.hardware import Gpu
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.memory import CONTEXT, peak, trainer_terms
from polyturn.plan.models import ModelFacts, facts_from_config
from polyturn.plan.planner import HEADROOM, make_plan, trainer_load

GIB = 1 << 30
STEPS = 3
_CPU_BYTES = 8.0 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A trainer alone on a GPU; `sections` are those of its recipe. A step has two rows."""

    model: str
    row_tokens: int = 8192
    sample_tokens: int = 2048
    dtype: str = "bfloat16"
    lora: int | None = None
    beta: float = 0.0
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A start of vLLM alone on a GPU."""

    model: str
    share: float
    context: int
    sequences: int = 256
    extra: dict[str, Any] = field(default_factory=dict)


EAGER = {"enforce_eager": True}
CASES: dict[str, Training | Engine] = {
    "train/Qwen3-0.6B": Training(model="Qwen/Qwen3-0.6B"),
    "engine/Qwen2.5-1.5B": Engine(model="Qwen/Qwen2.5-1.5B", share=0.5, context=4096),
    "train/Qwen2.5-3B/selective": Training(
        model="Qwen/Qwen2.5-3B", row_tokens=4096, trainer={"activations": "selective", "master_weights": "stochastic"}
    ),
    "engine/Qwen2.5-7B/32k": Engine(
        model="Qwen/Qwen2.5-7B", share=0.6, context=32768, extra={**EAGER, "max_num_batched_tokens": 32768}
    ),
    "train/Llama-3.1-8B/lora32": Training(
        model="meta-llama/Llama-3.1-8B", row_tokens=4096, lora=32, trainer={"activations": "selective"}
    ),
    "train/Qwen3-1.7B/full": Training(model="Qwen/Qwen3-1.7B", row_tokens=16384, trainer={"activations": "full"}),
    "engine/Qwen3-1.7B/many": Engine(
        model="Qwen/Qwen3-1.7B", share=0.3, context=2048, sequences=1024, extra={**EAGER, "max_num_batched_tokens": 4096}
    ),
    "train/Qwen2.5-0.5B/reference": Training(model="Qwen/Qwen2.5-0.5B", row_tokens=12288, beta=0.05),
    "train/Qwen2.5-1.5B/long": Training(model="Qwen/Qwen2.5-1.5B", row_tokens=24576, sample_tokens=24576),
    "engine/Llama-3.1-8B": Engine(model="meta-llama/Llama-3.1-8B", share=0.4, context=8192, extra=EAGER),
    "train/Qwen3-4B/lora16": Training(model="Qwen/Qwen3-4B", row_tokens=8192, lora=16),
    "train/Qwen2.5-1.5B/offload": Training(model="Qwen/Qwen2.5-1.5B", trainer={"offload_optimizer": True}),
    "train/Qwen2.5-0.5B/float32": Training(model="Qwen/Qwen2.5-0.5B", row_tokens=4096, dtype="float32"),
    "train/SmolLM2-135M/eager": Training(model="HuggingFaceTB/SmolLM2-135M", trainer={"compile": "off"}),
}
"""In the order of what is wanted most."""
TRIALS: dict[str, Training | Engine] = {
    "train/tiny": Training(model="builtin:tiny", row_tokens=256, sample_tokens=64, dtype="float32", trainer={"compile": "off"}),
    "train/tiny/lora4": Training(
        model="builtin:tiny", row_tokens=256, sample_tokens=64, dtype="float32", lora=4, trainer={"compile": "off"}
    ),
    "engine/tiny": Engine(model="builtin:tiny", share=0.2, context=256, sequences=16, extra=EAGER),
}
"""To try everything on a CPU, where nothing is measured."""


def facts_of(model: str) -> ModelFacts:
    return facts_from_config(CONFIGS[model], name=model)


def config_of(model: str) -> Any:
    """The same sizes as transformers wants them."""
    import transformers

    sizes = {key: value for key, value in CONFIGS[model].items() if value is not None}
    kind = sizes.pop("model_type")
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    return transformers.AutoConfig.for_model(kind, **sizes, architectures=[architecture], pad_token_id=0)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value / GIB, 3)


def error_of(planned: float, measured: float | None) -> float | None:
    """Of the plan, relative to what was measured; above 0 where the plan says more."""
    return None if not measured else round(planned / measured - 1, 4)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def training_recipe(case: Training, *, on_gpu: bool) -> Recipe:
    """Resolved; its engine is on another GPU, so that the plan's first one has the trainer only."""
    recipe = Recipe.model_validate(
        {
            "run": {"steps": STEPS},
            "model": {
                "path": case.model,
                "dtype": case.dtype,
                **({} if case.lora is None else {"lora": {"rank": case.lora}}),
            },
            "environment": {"id": "lookup"},
            "rollout": {
                "group_size": max(2, case.row_tokens // case.sample_tokens),
                "groups_per_step": 2,
                "max_trajectory_tokens": case.sample_tokens,
                "max_turn_tokens": case.sample_tokens,
            },
            "engine": {"kind": "vllm_server"},
            "algorithm": {"loss": "dapo", **({"loss_options": {"beta": case.beta}} if case.beta else {})},
            "trainer": {"row_tokens": case.row_tokens, **case.trainer},
            "evaluation": {"episodes": 0},
        }
    )
    return resolve(recipe, num_train_tasks=None, on_gpu=on_gpu).recipe


def batch_of(case: Training, recipe: Recipe, vocabulary: int, seed: int) -> Any:
    """Rows that are full, of samples of which all but the first tokens are trained."""
    import numpy as np

    from polyturn.trajectories.pack import pack
    from polyturn.types import TrainSample

    rng, length, samples = np.random.default_rng(seed), case.sample_tokens, []
    for index in range(recipe.rollout.group_size * recipe.rollout.groups_per_step):
        mask = np.arange(length) >= 16
        samples.append(
            TrainSample(
                trajectory_id=f"t{index}",
                group_id=f"g{index // recipe.rollout.group_size}",
                temperature=1.0,
                input_ids=rng.integers(0, vocabulary, length),
                loss_mask=mask,
                advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
                engine_logprobs=np.where(mask, -math.log(vocabulary), 0).astype(np.float32),
                turn_index=np.where(mask, 0, -1),
                policy_version=np.where(mask, 0, -1),
            )
        )
    return pack(samples, row_tokens=case.row_tokens, planned_trajectories=len(samples))


def train(case: Training, recipe: Recipe, device: Any) -> None:
    """Some steps by the recipe's trainer; what they hold is freed afterwards."""
    import torch
    import transformers

    from polyturn.loop.build import build_trainer
    from polyturn.models.adapters import add_adapters
    from polyturn.trainer.attention import use_attention

    torch._dynamo.reset()
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config_of(case.model)).eval()
    finally:
        torch.set_default_dtype(before)
    if case.lora is not None:
        add_adapters(model, rank=case.lora, alpha=32.0, targets=None, base=case.model, seed=0)
    use_attention(model, "auto")
    trainer = build_trainer(recipe, model)
    for step in range(STEPS):
        trainer.train([batch_of(case, recipe, facts_of(case.model).vocabulary, step)])


def own_bytes_on_card() -> int:
    """What this process has of its GPU, whoever else is there."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    found = {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}
    free, total = torch.cuda.mem_get_info()
    return int(found.get(os.getpid()) or total - free)


def measure_training(case: Training, told: Told) -> None:
    """Plan, train within the smallest card that is said to be enough, say both peaks."""
    import torch

    on_gpu = torch.cuda.is_available()
    recipe, facts = training_recipe(case, on_gpu=on_gpu), facts_of(case.model)
    plan = make_plan(recipe, facts, gpu_of(_total()), total=2)
    (own,) = (gpu for gpu in plan.gpus if gpu.role.startswith("trainer"))
    planned = peak(trainer_terms(facts, trainer_load(recipe)))
    smallest = own.needed / (1 - HEADROOM)
    told(
        kind="training",
        planned_gib=rounded(planned),
        planned_on_card_gib=rounded(own.needed),
        smallest_card_gib=rounded(smallest),
        terms={term.name: rounded(term.bytes) for term in own.terms},
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        train(case, recipe, device)
        told(ran=True)
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, (smallest - CONTEXT) / _total()))
    ran_out = None
    try:
        train(case, recipe, device)
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        ran_out = str(error).splitlines()[0]
    told(said_fits_and_ran_out=ran_out is not None, out_of_memory=ran_out)
    if ran_out is not None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(1.0)
        train(case, recipe, device)
    measured, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    outside = own_bytes_on_card() - torch.cuda.memory_reserved()
    told(
        measured_gib=rounded(measured),
        error=error_of(planned, measured),
        context_gib=rounded(outside),
        on_card_gib=rounded(reserved + outside),
        error_on_card=error_of(own.needed, reserved + outside),
        ran=True,
    )


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def engine_recipe(case: Engine, *, on_gpu: bool) -> Recipe:
    """Resolved, with one engine in the driver's process."""
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": case.model, "dtype": "bfloat16" if on_gpu else "float32"},
            "environment": {"id": "lookup"},
            "rollout": {"max_trajectory_tokens": case.context},
            "engine": {
                "kind": "vllm",
                "gpu_memory_utilization": case.share,
                "max_batch_size": case.sequences,
                "extra_args": {"load_format": "dummy", **case.extra},
            },
            "evaluation": {"episodes": 0},
        }
    )
    return resolve(recipe, num_train_tasks=None, on_gpu=on_gpu).recipe


def measure_engine(case: Engine, told: Told) -> None:
    """Plan, start, say both."""
    import torch

    from polyturn.engine.vllm_core import VllmCore, VllmSettings
    from polyturn.loop.engine_start import as_numbers

    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "none"
    recipe, facts = engine_recipe(case, on_gpu=on_gpu), facts_of(case.model)
    planned = planned_engine(recipe, facts, gpu_name=name, total_bytes=_total(), beside_trainer=False)
    refused = planned.refusal(case.context)
    told(
        kind="engine",
        planned_gib=rounded(planned.at_least),
        planned_tokens=planned.tokens,
        refused=refused,
        items={term.name: {"planned_gib": rounded(term.bytes)} for term in planned.terms},
    )
    with tempfile.TemporaryDirectory() as folder:
        config_of(case.model).save_pretrained(folder)
        settings = VllmSettings(
            folder=Path(folder),
            dtype=recipe.model.dtype,
            max_model_len=case.context,
            max_num_seqs=case.sequences,
            gpu_memory_utilization=case.share,
            device="cuda" if on_gpu else "cpu",
            extra=recipe.engine.extra_args,
        )
        try:
            core = VllmCore(settings)
        except (EngineError, RuntimeError, ValueError) as error:
            told(said_fits_and_ran_out=refused is None, out_of_memory=f"{type(error).__name__}: {error}"[:400])
            return
    report = core.report()
    told(report=as_numbers(report), said_fits_and_ran_out=False)
    measured = {
        "engine weights": report.weights_bytes,
        "engine activations": report.activation_bytes,
        "engine non-torch": report.non_torch_bytes,
        "CUDA graphs": report.graph_bytes,
    }
    terms = {term.name: term.bytes for term in planned.terms}
    items = {
        item: {
            "planned_gib": rounded(terms.get(item, 0.0)),
            "measured_gib": rounded(size),
            "error": error_of(terms.get(item, 0.0), size),
        }
        for item, size in measured.items()
    }
    # What the start took from the budget: all of it but the cache.
    spent = None if report.budget_bytes is None or report.kv_bytes is None else report.budget_bytes - report.kv_bytes
    told(
        items=items,
        measured_gib=rounded(spent),
        error=error_of(planned.at_least, spent),
        measured_tokens=report.tokens,
        error_of_tokens=error_of(planned.tokens, report.tokens) if on_gpu else None,
        ran=True,
    )
    core.close()


# ── all of them ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gpu_of(total: float) -> Gpu:
    """A card with so much memory, whose speeds nobody reads."""
    return Gpu(label_gib=total / GIB, usable_mib=total / (1 << 20), bf16_tflops=1, bandwidth_gb_s=1)


def _total() -> float:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else _CPU_BYTES


def summary(record: Record) -> dict[str, Any]:
    """Errors over all cases that were measured, and how many ran out of memory that were said to fit."""
    found = {name: record.of(name) for name in CASES}
    sums: dict[str, Any] = {"said_fits_and_ran_out": sum(bool(one.get("said_fits_and_ran_out")) for one in found.values())}
    for kind in ("all", "training", "engine"):
        errors = {
            name: abs(one["error"])
            for name, one in found.items()
            if one.get("error") is not None and kind in ("all", one["kind"])
        }
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            sums[kind] = {
                "cases": len(errors),
                "median_error": round(statistics.median(errors.values()), 4),
                "worst_error": errors[worst],
                "worst_case": worst,
            }
    return sums


def main() -> None:
    """Run the cases that are named, or all."""
    options = options_of(__doc__, [*CASES, *TRIALS], case_limit_s=180.0, wanted=list(CASES)).parse_args()
    if options.inside:
        end_on_signal()
        case = (CASES | TRIALS)[options.inside]
        if isinstance(case, Training):
            measure_training(case, Told(options.out))
        else:
            measure_engine(case, Told(options.out))
        return
    from machine import PACKAGES, describe_machine

    about = {**describe_machine(packages=PACKAGES), "headroom": HEADROOM}
    record = run_chosen(options, lambda name, file: python(__file__, "--inside", name, "--out", str(file)), about)
    found = summary(record)
    record.add(summary=found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
