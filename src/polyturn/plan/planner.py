"""From a recipe and a kind of GPU to what every GPU must hold, and whether it can."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polyturn.config.memory import ELEMENT_BYTES
from polyturn.config.resolve import Resolved, resolve
from polyturn.config.schema import Recipe, filled
from polyturn.errors import ConfigError
from polyturn.plan.engine_load import at_once, context_of, hf_load, paged_load, share_of
from polyturn.plan.engine_memory import BLOCK_TOKENS, DOUBT, PagedEngine, budget_of, hf_terms, paged_engine
from polyturn.plan.hardware import Gpu, Machine
from polyturn.plan.memory import Term, TrainerLoad, adapter_numbers, held_bytes, own_terms, peak, trainer_terms
from polyturn.plan.models import ModelFacts
from polyturn.plan.placement import Seat, is_paged, is_server, refusals, role, seats, tensor_parallel

GIB = 1 << 30
HEADROOM = 0.03
"""Share of a GPU that a plan leaves free: as much as it was off where it was held against measurements."""
PINNED = 1.4
"""Pinned memory is taken in powers of two, at most twice what is needed; assumed on average."""
HOST = 8.0 * GIB
"""CPU memory of everything else: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What one kind of GPU of a run holds."""

    role: str
    """Such as `trainer-0 and the engine`, `trainer-1 to trainer-3`."""
    numbers: tuple[int, ...]
    """GPUs that hold the same."""
    terms: tuple[Term, ...]
    engine: PagedEngine | None = None
    """Of a GPU with an engine that pages its cache."""
    sleep: str | None = None
    """What sleeping does for memory where the engine is in the trainer's process."""

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.numbers)

    @property
    def needed(self) -> float:
        """Bytes at the worst moment."""
        return peak(self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved recipe and its GPUs."""

    recipe: Recipe
    facts: ModelFacts
    seats: tuple[Seat, ...]
    gpus: tuple[GpuPlan, ...]
    gpu: Gpu | None
    """The kind it was made for. Without one, engines that take a share get as much as they need at least."""
    refused: tuple[str, ...]
    """What can't be had on any machine, a sentence each."""
    reasons: Mapping[str, str]
    """Why each derived value is what it is, by dotted key."""
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
        return self.needed <= room(gpu) and not (self.refused or self.short_contexts())

    def problems(self, machine: Machine) -> tuple[str, ...]:
        """Why the run does not fit on `machine`, a sentence each; nothing when it does."""
        found = [*self.refused, *self.short_contexts(), *self._too_few(machine)]
        for gpu in self.gpus:
            if gpu.needed > room(machine.gpu):
                found.append(
                    f"{gpu.role}: {gpu.needed / GIB:.1f} GiB are needed, and {machine.gpu_name} leaves a process "
                    f"{machine.gpu.usable_bytes / GIB:.1f} GiB, of which {HEADROOM:.0%} stay free"
                )
        needed = self.host_bytes(machine)
        if machine.ram_bytes is not None and needed > machine.ram_bytes:
            found.append(
                f"{needed / GIB:.0f} GiB of CPU memory are needed for what the trainer keeps there, and {machine.name} has "
                f"{machine.ram_bytes / GIB:.0f}"
            )
        return tuple(found)

    def host_bytes(self, machine: Machine) -> float:
        """CPU memory of the fullest node: what an offload, a waiting reference and a sleeping engine take, in pinned pages."""
        load = trainer_load(self.recipe)
        kept = held_bytes(self.facts, load).cpu.total
        if self.recipe.engine.sleep == "on" and (self._shares_weights or self.recipe.weight_sync.every_steps > 1):
            # vLLM copies them there, also those that are back at once.
            kept += max(gpu.engine.weights for gpu in self.gpus if gpu.engine is not None)
        if load.reference == "cpu":
            kept += self.facts.parameters * ELEMENT_BYTES[load.dtype]
        if not kept:
            return 0.0
        ranks = max(Counter(seat.number // machine.count for seat in self.seats if seat.rank is not None).values())
        return ranks * kept * PINNED + HOST

    @property
    def _shares_weights(self) -> bool:
        return self.recipe.weight_sync.mode == "single_copy"

    def short_contexts(self) -> tuple[str, ...]:
        """Trajectories that are longer than the model's positions, or than an engine can hold."""
        longest, positions = self.recipe.rollout.max_trajectory_tokens, self.facts.max_positions
        found = []
        if positions is not None and longest > positions:
            found.append(f"rollout.max_trajectory_tokens={longest}: {self.facts.name} has {positions:,} positions")
        for gpu in self.gpus:
            refusal = None if gpu.engine is None else gpu.engine.refusal(context_of(self.recipe))
            if refusal is not None:
                found.append(f"{gpu.role}: {refusal}")
        return tuple(found)

    def _too_few(self, machine: Machine) -> list[str]:
        """GPUs and servers that the machine has no place for."""
        parts, found = tensor_parallel(self.recipe), []
        if self.num_gpus > machine.total:
            found.append(
                f"the run needs {_gpus(self.num_gpus)}, one for each rank and each part of a server; {machine.name} has "
                f"{machine.total}"
            )
        elif (last := max(number for gpu in self.gpus for number in gpu.numbers)) >= machine.total:
            found.append(f"the recipe names GPU {last}, and {machine.name} has {machine.total}, counted from 0")
        if parts > machine.count:
            found.append(
                f"engine.tensor_parallel_size={parts}: a server lies on one node, and {machine.name} has {_gpus(machine.count)}"
            )
        return found


def room(gpu: Gpu) -> float:
    """Bytes of a GPU that a plan may fill."""
    return gpu.usable_bytes * (1 - HEADROOM)


def make_plan(
    recipe: Recipe,
    facts: ModelFacts,
    gpu: Gpu | None = None,
    *,
    gpu_name: str = "",
    total: int | None = None,
    num_tasks: int | None = None,
) -> Plan:
    """What `recipe` (resolved or not) takes on `total` GPUs such as `gpu`. A recipe by epochs needs its number of tasks.

    Raises ConfigError for a recipe that can't be trained, or not on a GPU.
    """
    if recipe.trainer.device == "cpu":
        raise ConfigError("trainer.device=cpu: a plan is of GPUs; use trainer.device=auto to plan for them")
    if recipe.run.epochs is not None and num_tasks is None:
        raise ConfigError(
            f"run.epochs={recipe.run.epochs:g}: how many steps that is depends on the training tasks; say how many there are "
            "with --tasks N"
        )
    found, unreachable = _resolved(recipe, num_tasks)
    load = trainer_load(found.recipe)
    alike: dict[tuple[bool, bool], list[Seat]] = {}
    where = seats(found.recipe, total)
    for seat in where:
        alike.setdefault((seat.rank is not None, seat.engine is not None), []).append(seat)
    return Plan(
        recipe=found.recipe,
        facts=facts,
        seats=where,
        gpus=tuple(_gpu_plan(found.recipe, facts, load, group, gpu, gpu_name) for group in alike.values()),
        gpu=gpu,
        refused=(*unreachable, *refusals(found.recipe, facts)),
        reasons=found.reasons,
        caveats=_caveats(found.recipe, facts, load),
    )


def _resolved(recipe: Recipe, num_tasks: int | None) -> tuple[Resolved, tuple[str, ...]]:
    """The resolved recipe. A way to push weights that can't be had is a reason to refuse, and the usual one is planned with."""
    try:
        return resolve(recipe, num_train_tasks=num_tasks, on_gpu=True), ()
    except ConfigError as error:
        usual = recipe.weight_sync.model_copy(update={"mode": "auto"})
        try:
            found = resolve(recipe.model_copy(update={"weight_sync": usual}), num_train_tasks=num_tasks, on_gpu=True)
        except ConfigError:
            raise error from None
        return found, (str(error),)


def _gpu_plan(
    recipe: Recipe, facts: ModelFacts, load: TrainerLoad, alike: list[Seat], gpu: Gpu | None, gpu_name: str
) -> GpuPlan:
    """What GPUs hold that have the same tasks."""
    trains, generates = alike[0].rank is not None, alike[0].engine is not None
    trainer = trainer_terms(facts, load) if trains else ()
    engine: tuple[Term, ...] = ()
    paged = None
    if generates and is_paged(recipe):
        paged = _paged(recipe, facts, load, gpu, gpu_name, beside_trainer=trains)
        engine = (*paged.terms, _cache_term(paged, recipe))
        if recipe.weight_sync.mode == "single_copy":
            trainer = tuple(_shared(term, facts, load) for term in trainer)
        if trains and recipe.engine.sleep == "on":
            engine = tuple(_given_back(term, recipe) for term in engine)
    elif generates:
        engine = hf_terms(facts, hf_load(recipe), shares_base=load if load.lora_rank and trains else None)
    both = trainer + engine
    processes = 2 if trains and generates and is_server(recipe) else 1
    return GpuPlan(
        role=role(alike, recipe),
        numbers=tuple(seat.number for seat in alike),
        terms=both + own_terms(both, processes),
        engine=paged,
        sleep=_sleep_words(recipe, paged) if trains and recipe.engine.kind == "vllm" and paged is not None else None,
    )


def _sleep_words(recipe: Recipe, paged: PagedEngine) -> str:
    """What stays of the engine while it sleeps."""
    shared = recipe.weight_sync.mode == "single_copy"
    kept = f"{(paged.asleep + (paged.weights if shared else 0)) / GIB:.2f}"
    back = "the cache is there again after a push" if shared else "weights and cache are there again from a push on"
    if recipe.engine.sleep == "on":
        return f"the engine sleeps while it trains and keeps {kept} (engine.sleep=on); {back}."
    return f"with engine.sleep=on the engine would keep {kept} while it trains."


def _paged(
    recipe: Recipe, facts: ModelFacts, load: TrainerLoad, gpu: Gpu | None, gpu_name: str, *, beside_trainer: bool
) -> PagedEngine:
    """A paged engine with its share of `gpu`, or with what its load needs where no GPU is named."""
    asked = paged_load(recipe, gpu, gpu_name=gpu_name, adapters=adapter_numbers(facts, load))
    if gpu is not None:
        return paged_engine(facts, asked, budget=budget_of(share_of(recipe, beside_trainer=beside_trainer), gpu.usable_bytes))
    bare = paged_engine(facts, asked, budget=0)
    return paged_engine(facts, asked, budget=bare.at_least + DOUBT + bare.bytes_per_token * (asked.context + BLOCK_TOKENS))


def _cache_term(paged: PagedEngine, recipe: Recipe) -> Term:
    context, wanted = context_of(recipe), at_once(recipe)
    fitting = min(paged.sequences(context), wanted)
    return Term(
        name="KV cache",
        bytes=max(0.0, paged.kv_bytes),
        formula=f"what is left of the budget of {paged.budget / GIB:.2f}: {paged.blocks:,} blocks = {paged.tokens:,} tokens of "
        f"{paged.bytes_per_token:,} bytes; {fitting:,} of {wanted:,} sequences at once at the full {context:,}",
    )


def _shared(term: Term, facts: ModelFacts, load: TrainerLoad) -> Term:
    """The trainer's weights where they are views of the engine's, but for what a server of several parts cuts otherwise."""
    if term.name != "weights":
        return term
    if load.tensor_ranks == 1:
        return replace(term, bytes=0, formula="views of the engine's weights, which are there once")
    ends = (facts.embedding + facts.head) * ELEMENT_BYTES[load.dtype]
    return replace(term, bytes=ends, formula="embedding and head; the layers are views of the engine's, which are there once")


def _given_back(term: Term, recipe: Recipe) -> Term:
    """What is there while the engine generates only, where it sleeps while training: all that vLLM gives back."""
    kept = {"engine non-torch", "CUDA graphs"} | ({"engine weights"} if recipe.weight_sync.mode == "single_copy" else set())
    return term if term.name in kept else replace(term, phase="generating")


def _shards(recipe: Recipe) -> int:
    """Ranks that one copy of the weights is cut over, beside those that compute a layer together."""
    trainer = recipe.trainer
    if trainer.parallel not in ("fsdp2", "deepspeed"):
        return 1
    return trainer.shard_ranks or trainer.num_ranks // trainer.tensor_ranks


def trainer_load(recipe: Recipe) -> TrainerLoad:
    """How a rank of a resolved recipe trains, at most."""
    rollout, trainer, model = recipe.rollout, recipe.trainer, recipe.model
    groups = math.ceil(rollout.groups_per_step / trainer.optimizer_steps_per_batch)
    together = trainer.context_ranks * trainer.tensor_ranks
    most = math.ceil(groups * rollout.group_size * together / trainer.num_ranks) * rollout.max_trajectory_tokens
    row = min(filled(trainer.row_tokens), most)
    assert trainer.master_weights != "auto", "the recipe is resolved"
    has_reference = recipe.algorithm.loss_options.beta > 0 and model.lora is None
    return TrainerLoad(
        dtype=model.dtype,
        row_tokens=math.ceil(row / trainer.context_ranks),
        trained_tokens=math.ceil(row / trainer.context_ranks),
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
        shards=_shards(recipe),
        context_ranks=trainer.context_ranks,
        tensor_ranks=trainer.tensor_ranks,
        sync_every_row=trainer.sync_every_row or trainer.parallel == "deepspeed",
        copies_beside=trainer.parallel == "deepspeed",
        layers_alone=trainer.parallel == "ddp",
        state_ranks=trainer.num_ranks if trainer.parallel == "zero1" else 1,
    )


def _caveats(recipe: Recipe, facts: ModelFacts, load: TrainerLoad) -> tuple[str, ...]:
    unmeasured = {
        "the hf engine's KV cache, prefill and logits: worst cases, not measured": not is_paged(recipe),
        "the paged engine, but for five starts of dense models on one GPU each": is_paged(recipe),
        "tensor parallelism of the engine": tensor_parallel(recipe) > 1,
        "activations of float32 weights, and attention with a mask, but for one case": load.dtype == "float32" or load.masked,
        "shards: their own sizes are exact, what is whole for a while was never measured": recipe.trainer.parallel == "fsdp2",
        "layers that are cut over ranks": load.tensor_ranks > 1,
        "keys and values of other ranks": load.context_ranks > 1,
        "activations of experts": facts.experts_per_token > 0,
        "activations of latent attention": facts.latent_numbers is not None,
        "activations where heads x head size is not the hidden size, but for two cases that were within 4 %": (
            facts.heads * facts.head_dim != facts.hidden
        ),
        "what computing with quantized layers takes, but for one case in 4 bits": load.quantize is not None,
    }
    return tuple(words for words, holds in unmeasured.items() if holds)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
