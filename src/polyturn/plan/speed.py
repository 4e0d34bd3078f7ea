"""Seconds of a training step, from throughput that was measured elsewhere and is assumed to hold here.

    trainer   operations of the model / (peak of the GPU x utilisation), but at least some milliseconds a layer and row
    engine    a token for everybody costs: weights and cached keys and values read once, a floor, some microseconds a sequence
    sync      by mode: nothing, a copy on the GPU, a transfer, files, a restart

Utilisation is what `benchmarks/trainer_throughput.py` measured on an H200, by size of the model (docs/performance.md); the
engine's floor and overhead were set so that three runs of vLLM on an H100 come out within a factor of two. A step is rollouts,
then training, then a push; nothing overlaps. Not in it: tools and other replies of the environment, evaluation, start.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from polyturn.config.memory import ELEMENT_BYTES
from polyturn.config.schema import Recipe, filled
from polyturn.plan.hardware import Machine
from polyturn.plan.memory import adapter_numbers
from polyturn.plan.models import ModelFacts
from polyturn.plan.placement import is_paged, num_engines, tensor_parallel
from polyturn.plan.planner import Plan, trainer_load

FILL = 0.5
"""Share of their limits that trajectories reach, where nobody says."""
_UTILISATION = ((0.135e9, 0.25), (0.494e9, 0.37), (1.54e9, 0.48), (7.6e9, 0.51))
"""Parameters, and share of the bfloat16 peak; between them by the logarithm of the parameters. The first: while it computes."""
_EAGER = 0.37 / 0.48
_LAUNCH_S = 0.08 / 28
"""Of a layer and row, whatever is in it."""
_AGAIN = {"keep": 0.0, "selective": 0.02, "full": 0.22}
"""What computing again costs, as a share of a step."""
_PREFILL = 0.4
_READS = 0.8
"""Share of the memory's bandwidth that reading weights reaches."""
_FLOOR_S, _SEQUENCE_S = 0.003, 30e-6
_HF_LAYER_S = 1e-3
"""Of a layer and token in transformers, where kernels are launched one by one."""
_LINKS = {True: 150e9, False: 12e9, None: 12e9}
"""Bytes a second between two GPUs of a node: with NVLink, over PCIe, unknown."""
_EFA = 0.7
_DEFAULT_NETWORK_GBIT = 10.0
_NCCL_FIXED_S, _NCCL_BYTES_S = 0.06, 22e9
"""3.09 GB were pushed in 0.2 s over NVLink, 0.06 s of which were pause, start and finish."""
_ALL_REDUCE_S = {True: 15e-6, False: 60e-6, None: 60e-6}
"""To add up something small over the GPUs of one engine, with NVLink and without: assumed. Twice a layer and token."""
DISK = 1e9
"""Bytes a second that a file is written with: assumed."""
_SERVER_START_S = 120.0
_CPU_MEMORY = 10e9
_OFFLOAD_BYTES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of one part of a step, and what they come from."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step, by parts."""

    parts: tuple[Part, ...]
    tokens: float
    """Of all trajectories of a step."""
    sampled: float
    fill: float

    @property
    def seconds(self) -> float:
        """One part after the other."""
        return sum(part.seconds for part in self.parts)

    def of(self, name: str) -> float:
        """Seconds of one part."""
        return sum(part.seconds for part in self.parts if part.name == name)


def step_time(plan: Plan, machine: Machine, *, fill: float = FILL) -> StepTime:
    """Seconds of one step on `machine`, where trajectories reach `fill` of their limits."""
    rollout = plan.recipe.rollout
    trajectories = rollout.groups_per_step * rollout.group_size
    length = fill * rollout.max_trajectory_tokens
    sampled = min(length, fill * rollout.max_turns * rollout.max_turn_tokens)
    decode, prefill = _rollout(plan, machine, trajectories, length, sampled)
    return StepTime(
        parts=(decode, prefill, _training(plan, machine, trajectories, length, sampled), *_around(plan, machine)),
        tokens=trajectories * length,
        sampled=trajectories * sampled,
        fill=fill,
    )


def utilisation(parameters: float) -> float:
    """Share of the peak that a trainer of a model of this size reaches.

    >>> round(utilisation(3e9), 2)
    0.49
    """
    if parameters <= _UTILISATION[0][0]:
        return _UTILISATION[0][1]
    for (small, low), (large, high) in itertools.pairwise(_UTILISATION):
        if parameters <= large:
            return low + (high - low) * math.log(parameters / small) / math.log(large / small)
    return _UTILISATION[-1][1]


def active_parameters(facts: ModelFacts) -> float:
    """Weights of the layers that a token is multiplied with: of its own experts only."""
    experts = next((linear.outputs for linear in facts.linears if linear.name == "router"), 0)
    share = facts.experts_per_token / experts if experts else 1.0
    return sum(linear.parameters * (share if linear.expert and linear.name != "router" else 1.0) for linear in facts.linears)


def _training(plan: Plan, machine: Machine, trajectories: int, length: float, sampled: float) -> Part:
    """Forward and backward over all rows, by the ranks together, and the optimizer."""
    recipe, facts = plan.recipe, plan.facts
    trainer, ranks = recipe.trainer, recipe.trainer.num_ranks
    passes = (4 if recipe.model.lora else 6) * trainer.num_iterations
    if trainer.num_iterations > 1 or trainer.optimizer_steps_per_batch > 1:
        passes += 2  # the probabilities before the first step
    if recipe.algorithm.loss_options.beta > 0:
        passes += 2
    head = facts.vocabulary * facts.hidden * sampled
    operations = (
        passes
        * trajectories
        * (active_parameters(facts) * length + head + facts.layers * facts.heads * facts.head_dim * length * length)
    )
    peak_share = utilisation(facts.parameters) * (1.0 if trainer.compile != "off" else _EAGER)
    again = 1 + _AGAIN[trainer.activations]
    computed = operations * again / (machine.gpu.bf16_tflops * 1e12 * peak_share) / ranks
    rows = (
        math.ceil(trajectories * length / filled(trainer.row_tokens) * trainer.context_ranks * trainer.tensor_ranks / ranks)
        * trainer.num_iterations
    )
    launched = rows * facts.layers * _LAUNCH_S
    optimizer = _optimizer(plan, machine)
    return Part(
        name="train",
        seconds=max(computed, launched) + optimizer,
        formula=f"{operations / 1e12:,.0f} TFLOP{f' x {again:.2g} ({trainer.activations})' if again > 1 else ''} at "
        f"{peak_share:.0%} of {machine.gpu.bf16_tflops:g} TFLOP/s on {ranks} GPU{'s' if ranks > 1 else ''}"
        + (f", or {rows:,} rows of {facts.layers} layers x {_LAUNCH_S * 1e3:.1f} ms to launch" if launched > computed else "")
        + (f"; {optimizer:.2f} s to sum gradients and step" if optimizer >= 0.005 else ""),
    )


def _optimizer(plan: Plan, machine: Machine) -> float:
    """Summing gradients over the ranks, and a step, once for each optimizer step."""
    recipe, facts = plan.recipe, plan.facts
    trainer, ranks = recipe.trainer, recipe.trainer.num_ranks
    load = trainer_load(recipe)
    trained: float = adapter_numbers(facts, load) or facts.parameters
    width = 4 if trainer.master_weights == "float32" or trainer.offload_optimizer else ELEMENT_BYTES[recipe.model.dtype]
    summed = 2 * (ranks - 1) / ranks * trained * width / link(machine, ranks)
    if load.layers_alone and trainer.tensor_ranks > 1:
        trained, summed = _cut_layers(facts, trainer.tensor_ranks, width, ranks, machine)
    if trainer.parallel == "zero1":
        summed += (ranks - 1) / ranks * trained * ELEMENT_BYTES[recipe.model.dtype] / link(machine, ranks)
    if trainer.parallel in ("zero1", "fsdp2", "deepspeed"):
        trained = math.ceil(trained / (trainer.shard_ranks or ranks))
    stepped = trained * (_OFFLOAD_BYTES / _CPU_MEMORY if trainer.offload_optimizer else 36 / (machine.gpu.bandwidth_gb_s * 1e9))
    return (summed + stepped) * trainer.num_iterations * trainer.optimizer_steps_per_batch


def _cut_layers(facts: ModelFacts, parts: int, width: float, ranks: int, machine: Machine) -> tuple[float, float]:
    """Parameters that a rank steps where each layer is cut over so many, and seconds to sum their gradients over all ranks."""
    own, groups = facts.parameters - facts.layer_weights * (1 - 1 / parts), ranks // parts
    everywhere = facts.parameters - facts.layer_weights
    among = 2 * (parts - 1) / parts * everywhere * width / link(machine, parts)
    return own, among + 2 * (groups - 1) / groups * own * width / link(machine, ranks)


def link(machine: Machine, gpus: int) -> float:
    """Bytes a second between neighbours of a ring of so many GPUs: the slowest link of it."""
    inside = _LINKS[machine.nvlink]
    if gpus <= machine.count:
        return inside
    network = (machine.efa_gbit_s or _DEFAULT_NETWORK_GBIT) / 8 * 1e9 * _EFA
    return min(inside, network)


def _rollout(plan: Plan, machine: Machine, trajectories: int, length: float, sampled: float) -> tuple[Part, Part]:
    """Sampling and reading prompts, by all engines together."""
    recipe, facts = plan.recipe, plan.facts
    engines, parts = max(1, num_engines(recipe), len(recipe.engine.urls)), tensor_parallel(recipe)
    batch = max(1.0, min(trajectories, recipe.rollout.concurrency) / engines)
    batch = min(batch, recipe.engine.max_batch_size, _cached(plan, length))
    token_s, words = _token_seconds(plan, machine, batch, length, parts)
    rounds = trajectories * sampled / engines / batch
    one_after_the_other = max(rounds, sampled)
    read = trajectories * (length if is_paged(recipe) else length * _turns(recipe, sampled))
    prefill = 2 * read * active_parameters(facts) / (machine.gpu.bf16_tflops * 1e12 * _PREFILL * engines * parts)
    if parts > 1:
        prefill += 2 * facts.layers * read / engines * facts.hidden * 2 * 2 * (parts - 1) / parts / link(machine, parts)
    return (
        Part(
            name="sample",
            seconds=one_after_the_other * token_s,
            formula=f"{one_after_the_other:,.0f} tokens one after the other, for {batch:,.0f} sequences at once on "
            f"{engines} engine{'s' if engines > 1 else ''}, {token_s * 1e3:.1f} ms each: {words}",
        ),
        Part(
            name="prompts",
            seconds=prefill,
            formula=f"{read:,.0f} tokens x 2 x {active_parameters(facts) / 1e9:.2f} billion at {_PREFILL:.0%} of the peak"
            + ("" if is_paged(recipe) else "; this engine reads a trajectory anew each turn"),
        ),
    )


def _token_seconds(plan: Plan, machine: Machine, batch: float, length: float, parts: int) -> tuple[float, str]:
    """One more token for all sequences of a batch."""
    facts, width = plan.facts, ELEMENT_BYTES[plan.recipe.model.dtype]
    bandwidth = machine.gpu.bandwidth_gb_s * 1e9 * _READS
    weights = facts.parameters * width / parts / bandwidth
    cached = batch * length / 2 * facts.kv_bytes_per_token(width, latent=True) / parts / bandwidth
    paged = is_paged(plan.recipe)
    floor = (_FLOOR_S if paged else _HF_LAYER_S * facts.layers) + batch * _SEQUENCE_S
    if parts > 1:
        floor += 2 * facts.layers * (_ALL_REDUCE_S[machine.nvlink] + batch * facts.hidden * width / link(machine, parts))
    return (
        weights + cached + floor,
        f"{weights * 1e3:.1f} to read weights, {cached * 1e3:.1f} keys and values, {floor * 1e3:.1f} to launch and pick",
    )


def _cached(plan: Plan, length: float) -> float:
    """Sequences of the usual length that the engine's cache holds."""
    held = [gpu.engine.tokens / length for gpu in plan.gpus if gpu.engine is not None]
    return max(1.0, min(held)) if held else math.inf


def _turns(recipe: Recipe, sampled: float) -> float:
    """Turns of a trajectory of so many sampled tokens, the first counted as whole, each a prompt half as long on average."""
    return max(1.0, (1 + sampled / recipe.rollout.max_turn_tokens) / 2)


def _around(plan: Plan, machine: Machine) -> tuple[Part, ...]:
    """The push, spread over the steps between two of them."""
    seconds, formula = push_seconds(plan, machine)
    every = plan.recipe.weight_sync.every_steps
    return (Part(name="push", seconds=seconds / every, formula=formula + (f", every {every} steps" if every > 1 else "")),)


def push_seconds(plan: Plan, machine: Machine) -> tuple[float, str]:
    """One push of the weights, and what it is made of."""
    recipe, facts = plan.recipe, plan.facts
    whole = facts.parameters * ELEMENT_BYTES[recipe.model.dtype]
    adapters = adapter_numbers(facts, trainer_load(recipe)) * ELEMENT_BYTES[recipe.model.dtype]
    mode = recipe.weight_sync.mode
    if mode == "single_copy":
        return 0.0, "the weights are there once"
    if mode == "in_process":
        size = adapters or whole
        return 2 * size / (machine.gpu.bandwidth_gb_s * 1e9), f"{size / 1e9:.2f} GB read and written on the GPU"
    if mode == "lora":
        return 0.1 + adapters / DISK, f"{adapters / 1e6:.1f} MB of adapters as a file, {DISK / 1e9:g} GB/s, and 0.1 s"
    if mode == "restart":
        return _SERVER_START_S + whole / DISK, f"{whole / 1e9:.2f} GB to disk and {_SERVER_START_S:g} s for a server to start"
    rate = min(_NCCL_BYTES_S, link(machine, plan.num_gpus))
    return (
        _NCCL_FIXED_S + whole / rate,
        f"{whole / 1e9:.2f} GB at {rate / 1e9:.3g} GB/s, and {_NCCL_FIXED_S:g} s to pause, start and finish",
    )
