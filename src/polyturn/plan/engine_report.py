"""What an engine that pages its cache reports at its start, beside what was planned."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.plan.engine_load import paged_load, share_of
from polyturn.plan.engine_memory import PagedEngine, budget_of, paged_engine
from polyturn.plan.hardware import Gpu
from polyturn.plan.here import known_kind
from polyturn.plan.memory import adapter_numbers
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import trainer_load

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Measured at the start of an engine, on one of its GPUs. What it did not report is None."""

    budget_bytes: float | None = None
    """What it may take."""
    weights_bytes: float | None = None
    activation_bytes: float | None = None
    """Peak of its trial batch."""
    non_torch_bytes: float | None = None
    graph_bytes: float | None = None
    kv_bytes: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    """That its cache holds."""


def planned_engine(
    recipe: Recipe, facts: ModelFacts, *, gpu_name: str, total_bytes: float, beside_trainer: bool
) -> PagedEngine:
    """The plan of a resolved recipe's engine on a GPU of that name (the driver's) and memory. Raises ConfigError."""
    mib = total_bytes / (1 << 20)
    gpu = Gpu(label_gib=mib / 1024, usable_mib=mib, bf16_tflops=1, bandwidth_gb_s=1)  # whose speeds nobody reads
    adapters = adapter_numbers(facts, trainer_load(recipe))
    load = paged_load(recipe, gpu, gpu_name=known_kind(gpu_name, mib) or gpu_name.lower(), adapters=adapters)
    return paged_engine(facts, load, budget=budget_of(share_of(recipe, beside_trainer=beside_trainer), total_bytes))


def report_lines(measured: EngineReport, planned: PagedEngine | None) -> list[str]:
    """Both side by side, a line an item in GiB; `planned` is None where there is no plan."""
    terms = {} if planned is None else {term.name: term.bytes for term in planned.terms}
    rows: list[tuple[str, float | None, float | None]] = [
        ("budget", measured.budget_bytes, None if planned is None else planned.budget),
        ("weights", measured.weights_bytes, terms.get("engine weights")),
        ("activation peak", measured.activation_bytes, terms.get("engine activations")),
        ("non-torch", measured.non_torch_bytes, terms.get("engine non-torch")),
        ("CUDA graphs", measured.graph_bytes, terms.get("CUDA graphs")),
        ("KV cache", measured.kv_bytes, None if planned is None else planned.kv_bytes),
    ]
    found = [f"{'engine, GiB':<18}{'measured':>10}{'planned':>10}{'error':>9}"]
    for name, here, there in rows:
        if here is not None or there is not None:
            found.append(f"  {name:<16}{_gib(here):>10}{_gib(there):>10}{_error(here, there):>9}")
    counts = (
        ("KV blocks", measured.blocks, None if planned is None else planned.blocks),
        ("KV tokens", measured.tokens, None if planned is None else planned.tokens),
    )
    for name, number, expected in counts:
        if number is not None or expected is not None:
            found.append(f"  {name:<16}{_count(number):>10}{_count(expected):>10}{_error(number, expected):>9}")
    return found


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / _GIB:.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _error(measured: float | None, planned: float | None) -> str:
    """Of the plan, relative to the measurement."""
    if not measured or planned is None:
        return ""
    return f"{planned / measured - 1:+.1%}"
