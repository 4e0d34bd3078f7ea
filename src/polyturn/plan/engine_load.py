"""What a recipe asks of its engines, as the memory formulas want it."""

from __future__ import annotations

import math

from polyturn.config.arithmetic import batch_arithmetic
from polyturn.config.schema import Recipe, filled
from polyturn.plan.engine_memory import HfLoad, PagedLoad
from polyturn.plan.hardware import Gpu
from polyturn.plan.placement import num_engines, tensor_parallel

OWN_SHARE, BESIDE_TRAINER = 0.9, 0.3
"""Share of a GPU that vLLM plans with where the recipe doesn't say."""
_LARGE, _LARGEST = 70 << 30, 160 << 30
_BATCHED = {"vllm": (8192, 16384, 16384), "vllm_server": (2048, 8192, 16384)}
"""Tokens of vLLM's trial batch, by its own rule: below 70 GiB of memory or on an A100; from there on; from 160 GiB on."""


def share_of(recipe: Recipe, *, beside_trainer: bool) -> float:
    """Share of its GPU that a paged engine takes."""
    given = recipe.engine.gpu_memory_utilization
    return given if given is not None else BESIDE_TRAINER if beside_trainer else OWN_SHARE


def context_of(recipe: Recipe) -> int:
    """Longest prompt and completion together that a paged engine makes room for."""
    return recipe.engine.max_model_len or recipe.rollout.max_trajectory_tokens


def at_once(recipe: Recipe) -> int:
    """Requests that one engine gets at once, at most: by a training step, or by an evaluation."""
    evaluation = recipe.evaluation
    played = max(batch_arithmetic(recipe, None).trajectories_per_step, evaluation.episodes * evaluation.samples_per_task)
    engines = max(1, num_engines(recipe), len(recipe.engine.urls))
    return min(math.ceil(min(played, recipe.rollout.concurrency) / engines), recipe.engine.max_batch_size)


def hf_load(recipe: Recipe) -> HfLoad:
    """What one `hf` engine is asked for, at most."""
    return HfLoad(dtype=recipe.model.dtype, sequences=at_once(recipe), context=recipe.rollout.max_trajectory_tokens)


def paged_load(recipe: Recipe, gpu: Gpu | None, *, gpu_name: str = "", adapters: float = 0) -> PagedLoad:
    """What one paged engine is asked for on such GPUs."""
    extra = recipe.engine.extra_args
    dtype = recipe.model.dtype if recipe.engine.dtype == "auto" else recipe.engine.dtype
    return PagedLoad(
        context=context_of(recipe),
        batched_tokens=batched_tokens(recipe, gpu, gpu_name),
        sequences=recipe.engine.max_batch_size,
        tensor_parallel=tensor_parallel(recipe),
        dtype="bfloat16" if dtype == "float16" else dtype,
        graphs=not extra.get("enforce_eager", False),
        adapters=adapters,
    )


def batched_tokens(recipe: Recipe, gpu: Gpu | None, gpu_name: str = "") -> int:
    """Tokens of the trial batch: as named, else vLLM's own number, or a whole context where that is longer.

    vLLM cuts longer prompts into chunks unless it is told not to, so the last is the worst case; a named number is certain.
    """
    named = recipe.engine.extra_args.get("max_num_batched_tokens")
    if type(named) is int and named > 0:
        return named
    small, large, largest = _BATCHED["vllm" if recipe.engine.kind == "vllm" else "vllm_server"]
    usual = small
    if gpu is not None and gpu.usable_bytes >= _LARGE and "a100" not in gpu_name:
        usual = largest if gpu.usable_bytes >= _LARGEST else large
    context = context_of(recipe)
    return max(context, min(usual, recipe.engine.max_batch_size * context))


def rows_of_step(recipe: Recipe) -> int:
    """Rows that one rank computes in an optimizer step, at most, where trajectories fill their rows."""
    rollout, trainer = recipe.rollout, recipe.trainer
    groups = math.ceil(rollout.groups_per_step / trainer.optimizer_steps_per_batch)
    most = (
        math.ceil(groups * rollout.group_size * trainer.context_ranks * trainer.tensor_ranks / trainer.num_ranks)
        * rollout.max_trajectory_tokens
    )
    return math.ceil(most / filled(trainer.row_tokens))
