"""A plan as lines to read and as an object for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyturn.config.arithmetic import batch_arithmetic, sentences
from polyturn.plan.hardware import Machine
from polyturn.plan.planner import GIB, GpuPlan, Plan

_PHASES = {"always": "", "training": "while it trains", "scoring": "while it scores", "generating": "while it generates"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan fits, and what would."""

    problems: tuple[str, ...] = ()
    overrides: tuple[str, ...] | None = None
    """What makes it fit on the same machine; None when nothing known does, or nothing has to."""
    smallest_gpu: str | None = None
    """Kind of GPU with the least memory on which the recipe fits as it is."""

    @property
    def fits(self) -> bool:
        """Whether there was no problem."""
        return not self.problems


def lines(plan: Plan, machine: Machine | None, verdict: Verdict, *, num_tasks: int | None = None) -> list[str]:
    """The report, a line an item."""
    found = [_model_line(plan)]
    if machine is not None:
        found.append(_machine_line(machine))
    usable = None if machine is None else machine.gpu.usable_bytes
    for gpu in plan.gpus:
        found += ["", *_table(gpu, usable)]
    # Nobody counted the tasks, which need not mean that they have no end.
    found += ["", *(sentence.replace(", from a source without end", "") for sentence in sentences(plan.recipe, num_tasks))]
    found += ["", *(f"not measured: {words}" for words in plan.caveats)]
    return [*found, "", *_verdict_lines(plan, machine, verdict)]


def as_object(plan: Plan, machine: Machine | None, verdict: Verdict, *, num_tasks: int | None = None) -> dict[str, Any]:
    """The same for JSON; memory in bytes."""
    arithmetic = batch_arithmetic(plan.recipe, num_tasks)
    return {
        "model": {"name": plan.facts.name, "parameters": plan.facts.parameters, "max_positions": plan.facts.max_positions},
        "machine": None
        if machine is None
        else {
            "name": machine.name,
            "gpu": machine.gpu_name,
            "gpus": machine.count,
            "usable_bytes": machine.gpu.usable_bytes,
            "price_per_hour": machine.price,
            "price_date": machine.price_date,
        },
        "gpus": [
            {
                "role": gpu.role,
                "count": gpu.count,
                "needed_bytes": round(gpu.needed),
                "terms": [
                    {"name": term.name, "bytes": round(term.bytes), "phase": term.phase, "formula": term.formula}
                    for term in gpu.terms
                ],
            }
            for gpu in plan.gpus
        ],
        "batch": {name: getattr(arithmetic, name) for name in arithmetic.__dataclass_fields__},
        "not_measured": list(plan.caveats),
        "fits": None if machine is None else verdict.fits,
        "problems": list(verdict.problems),
        "overrides": None if verdict.overrides is None else list(verdict.overrides),
        "smallest_gpu": verdict.smallest_gpu,
    }


def _model_line(plan: Plan) -> str:
    facts = plan.facts
    return (
        f"model: {facts.name}, {facts.parameters:,} parameters (embedding {facts.embedding:,}, head "
        f"{f'{facts.head:,}' if facts.head else 'the same'}, layers {facts.layer_weights:,}, norms {facts.norm_weights:,})"
    )


def _machine_line(machine: Machine) -> str:
    gpu = machine.gpu
    links = {True: ", NVLink", False: ", no NVLink", None: ""}[machine.nvlink]
    price = "" if machine.price is None else f", ${machine.price:.2f} an hour on {machine.price_date}"
    return (
        f"machine: {machine.name}, {machine.count} x {machine.gpu_name} of {gpu.usable_bytes / GIB:.1f} GiB "
        f"({gpu.usable_from}){links}{price}"
    )


def _table(gpu: GpuPlan, usable: int | None) -> list[str]:
    """A line a term in GiB, and the worst moment."""
    rows = [f"{gpu.role}{'' if gpu.count == 1 else f' ({gpu.count} GPUs, each)'}, GiB"]
    for term in gpu.terms:
        when = f" [{_PHASES[term.phase]}]" if _PHASES[term.phase] else ""
        rows.append(f"  {term.name:<18} {term.bytes / GIB:>9.2f}  {term.formula}{when}")
    rows.append(f"  {'worst moment':<18} {gpu.needed / GIB:>9.2f}  what is there always, and the largest of the phases")
    if usable is not None:
        rows.append(f"  {'left':<18} {(usable - gpu.needed) / GIB:>9.2f}  of {usable / GIB:.2f} that a process can have")
    return rows


def _verdict_lines(plan: Plan, machine: Machine | None, verdict: Verdict) -> list[str]:
    needs = f"{plan.num_gpus} x {plan.needed / GIB:.1f} GiB"
    smallest = (
        "it fits on no known kind of GPU as it is"
        if verdict.smallest_gpu is None
        else f"the smallest known kind of GPU on which it fits as it is: {verdict.smallest_gpu}"
    )
    if machine is None:
        return [f"needs {needs}; {smallest}"]
    if verdict.fits:
        return [f"fits: {needs} on {machine.name}"]
    found = [f"does not fit: {problem}" for problem in verdict.problems]
    found.append(
        f"nothing known makes it fit on {machine.name}"
        if verdict.overrides is None
        else f"nearest that fits there: {' '.join(verdict.overrides)}"
    )
    return [*found, smallest]
