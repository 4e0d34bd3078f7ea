"""From a recipe and a machine to what every GPU must hold, and whether it can.

A run with an engine in the driver's process trains and generates on one GPU, one after the other; servers have GPUs of their
own, the last ones, and trainer ranks the first ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.config.arithmetic import batch_arithmetic
from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe, filled
from polyturn.errors import ConfigError
from polyturn.plan.engine_memory import HfLoad, hf_terms
from polyturn.plan.hardware import Gpu, Machine
from polyturn.plan.memory import Term, TrainerLoad, own_terms, peak, trainer_terms
from polyturn.plan.models import ModelFacts

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What one kind of GPU of a run holds."""

    role: str
    """Such as `trainer-0 and the engine`, `trainer-1 to trainer-3`."""
    count: int
    """GPUs that hold the same."""
    terms: tuple[Term, ...]

    @property
    def needed(self) -> float:
        """Bytes at the worst moment."""
        return peak(self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved recipe and its GPUs."""

    recipe: Recipe
    facts: ModelFacts
    gpus: tuple[GpuPlan, ...]
    caveats: tuple[str, ...]
    """What of these numbers was never measured."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the run."""
        return sum(gpu.count for gpu in self.gpus)

    @property
    def needed(self) -> float:
        """Bytes of the GPU that needs most."""
        return max(gpu.needed for gpu in self.gpus)

    def fits_on(self, gpu: Gpu) -> bool:
        """Whether such GPUs, as many as are needed, are large enough, and the model's context too."""
        return self.needed <= gpu.usable_bytes and not self.wrong_context()

    def problems(self, machine: Machine) -> tuple[str, ...]:
        """Why the run does not fit on `machine`, a sentence each; nothing when it does."""
        found = list(self.wrong_context())
        if self.num_gpus > machine.count:
            found.append(
                f"the run needs {_gpus(self.num_gpus)}, one for each rank and server; {machine.name} has {machine.count}"
            )
        for gpu in self.gpus:
            if gpu.needed > machine.gpu.usable_bytes:
                found.append(
                    f"{gpu.role}: {gpu.needed / GIB:.1f} GiB are needed, and {machine.gpu_name} leaves a process "
                    f"{machine.gpu.usable_bytes / GIB:.1f} GiB"
                )
        return tuple(found)

    def wrong_context(self) -> tuple[str, ...]:
        """Trajectories that are longer than the model's positions."""
        longest, positions = self.recipe.rollout.max_trajectory_tokens, self.facts.max_positions
        if positions is None or longest <= positions:
            return ()
        return (f"rollout.max_trajectory_tokens={longest}: {self.facts.name} has {positions:,} positions",)


def make_plan(recipe: Recipe, facts: ModelFacts, *, num_tasks: int | None = None) -> Plan:
    """What `recipe` (resolved or not) takes on GPUs. `num_tasks` are its training tasks, which a run by epochs needs.

    Raises ConfigError for a recipe that can't be trained, or not on a GPU.
    """
    if recipe.trainer.device == "cpu":
        raise ConfigError("trainer.device=cpu: a plan is of GPUs; use trainer.device=auto to plan for them")
    if recipe.run.epochs is not None and num_tasks is None:
        raise ConfigError(
            f"run.epochs={recipe.run.epochs:g}: how many steps that is depends on the training tasks; say how many there are "
            "with --tasks N"
        )
    resolved = resolve(recipe, num_train_tasks=num_tasks, on_gpu=True).recipe
    load = trainer_load(resolved)
    trainer, ranks = trainer_terms(facts, load), resolved.trainer.num_ranks
    has_servers = resolved.engine.kind == "hf_server"
    servers = resolved.engine.num_servers if has_servers else 0
    engine = hf_terms(facts, hf_load(resolved, max(1, servers)), shares_base=load if load.lora_rank else None)
    gpus = []
    if not has_servers:
        both = trainer + engine
        gpus.append(GpuPlan(role="trainer-0 and the engine", count=1, terms=both + own_terms(both)))
    alone = ranks if has_servers else ranks - 1
    if alone:
        terms = trainer + own_terms(trainer)
        gpus.append(GpuPlan(role=_names("trainer", ranks - alone, ranks), count=alone, terms=terms))
    if servers:
        gpus.append(GpuPlan(role=_names("engine", 0, servers), count=servers, terms=engine + own_terms(engine)))
    return Plan(recipe=resolved, facts=facts, gpus=tuple(gpus), caveats=_caveats(facts, load))


def trainer_load(recipe: Recipe) -> TrainerLoad:
    """How a rank of a resolved recipe trains, at most."""
    rollout, trainer, model = recipe.rollout, recipe.trainer, recipe.model
    groups = math.ceil(rollout.groups_per_step / trainer.optimizer_steps_per_batch)
    most = math.ceil(groups * rollout.group_size / trainer.num_ranks) * rollout.max_trajectory_tokens
    row = min(filled(trainer.row_tokens), most)
    assert trainer.master_weights != "auto", "the recipe is resolved"
    has_reference = recipe.algorithm.loss_options.beta > 0 and model.lora is None
    return TrainerLoad(
        dtype=model.dtype,
        row_tokens=row,
        trained_tokens=row,
        rows=math.ceil(most / row),
        optimizer=trainer.optimizer,
        master_weights=trainer.master_weights,
        offload=trainer.offload_optimizer,
        activations=trainer.activations,
        compiled=trainer.compile != "off",
        float32_head=trainer.float32_head,
        masked=model.attention in ("sdpa", "eager") or (model.attention == "auto" and model.dtype == "float32"),
        lora_rank=None if model.lora is None else model.lora.rank,
        lora_targets=None if model.lora is None else model.lora.targets,
        quantize=model.quantize,
        reference=trainer.reference_device if has_reference else "none",
    )


def hf_load(recipe: Recipe, engines: int) -> HfLoad:
    """What one of `engines` is asked for at once, at most: by a training step, or by an evaluation."""
    evaluation = recipe.evaluation
    played = max(batch_arithmetic(recipe, None).trajectories_per_step, evaluation.episodes * evaluation.samples_per_task)
    at_once = math.ceil(min(played, recipe.rollout.concurrency) / engines)
    return HfLoad(
        dtype=recipe.model.dtype,
        sequences=min(at_once, recipe.engine.max_batch_size),
        context=recipe.rollout.max_trajectory_tokens,
    )


def _caveats(facts: ModelFacts, load: TrainerLoad) -> tuple[str, ...]:
    unmeasured = {
        "the hf engine's KV cache, prefill and logits: worst cases, not measured": True,
        "activations of float32 weights": load.dtype == "float32",
        "attention with a mask": load.masked,
        "activations of experts": facts.experts_per_token > 0,
        "activations of latent attention": facts.latent_numbers is not None,
        "activations where heads x head size is not the hidden size": facts.heads * facts.head_dim != facts.hidden,
        "what computing with quantized layers takes": load.quantize is not None,
    }
    return tuple(words for words, holds in unmeasured.items() if holds)


def _names(role: str, first: int, end: int) -> str:
    return f"{role}-{first}" if end - first == 1 else f"{role}-{first} to {role}-{end - 1}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
