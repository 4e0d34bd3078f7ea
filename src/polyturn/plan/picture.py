"""The GPUs of a plan as a picture in text, and in words how the weights get from trainer to engine."""

from __future__ import annotations

from collections.abc import Iterator

from polyturn.plan.hardware import Machine
from polyturn.plan.placement import role
from polyturn.plan.planner import GIB, GpuPlan, Plan

_WIDTH = 20
_MOST_LINES = 16
_MEANS = {
    "in_process": "each push copies every tensor into the engine, within this process",
    "single_copy": "the trainer's weights are views of the engine's: one copy of them, and the optimizer's step is the push",
    "nccl": "each push sends every tensor to all engines over one process group",
    "lora": "each push writes the adapters to a file that the engine loads; the base is on both sides",
    "restart": "each push saves the weights and starts the servers anew: slow, for finding faults",
}


def picture(plan: Plan, machine: Machine | None) -> list[str]:
    """A line a GPU: how full it is at the worst moment, and what it is for."""
    where = "GPUs at their worst moment" if machine is None else f"{machine.name}, GPUs at their worst moment"
    return [where, *_gpu_lines(plan, machine), _mode_line(plan)]


def _gpu_lines(plan: Plan, machine: Machine | None) -> Iterator[str]:
    holds: dict[int, GpuPlan] = {number: gpu for gpu in plan.gpus for number in gpu.numbers}
    roles = {seat.number: role([seat], plan.recipe) for seat in plan.seats}
    total = max(len(holds), 0 if machine is None else machine.total, max(holds) + 1)
    shown = range(min(total, _MOST_LINES))
    for number in shown:
        node = ""
        if machine is not None and machine.nodes > 1:
            node = f"node {number // machine.count} "
        gpu = holds.get(number)
        yield f"  {node}GPU {number:<3} {_bar(gpu, machine)}  {roles.get(number, 'free')}"
    if total > _MOST_LINES:
        yield f"  and {total - _MOST_LINES} more, of which {sum(number >= _MOST_LINES for number in holds)} are used"


def _bar(gpu: GpuPlan | None, machine: Machine | None) -> str:
    needed = 0.0 if gpu is None else gpu.needed
    if machine is None:
        return f"{needed / GIB:>7.1f} GiB"
    usable = machine.gpu.usable_bytes
    filled = min(_WIDTH, round(needed / usable * _WIDTH))
    mark = "!" if needed > usable else "#"
    return f"[{mark * filled:.<{_WIDTH}}] {needed / GIB:>7.1f} of {usable / GIB:.1f} GiB"


def _mode_line(plan: Plan) -> str:
    mode = plan.recipe.weight_sync.mode
    because = plan.reasons.get("weight_sync.mode")
    return f"weight_sync.mode={mode}{'' if because is None else f', because {because}'}: {_MEANS.get(mode, mode)}"
