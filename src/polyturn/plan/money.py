"""What a step, a run and a whole data set cost, from seconds a step and the price of an hour."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.config.memory import ELEMENT_BYTES
from polyturn.plan.hardware import Machine
from polyturn.plan.memory import held_bytes
from polyturn.plan.planner import GIB, Plan, trainer_load
from polyturn.plan.speed import StepTime

_HOUR_S = 3600.0
_DISK = 1e9
"""Bytes a second that a file is written with: assumed."""
SPOT = (
    "Spot: AWS speaks of up to 70 % less and publishes no discount by type; a reclaim comes with two minutes' notice, and "
    "a run that was ended starts anew, since Polyturn has no checkpoints yet."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Dollars and hours. What hangs on a price, a run's length or the number of tasks is None without it."""

    price_per_hour: float | None
    """Of all nodes."""
    price_date: str | None
    per_100_steps: float | None
    hours: float | None
    """Of the whole run, without evaluations."""
    whole_run: float | None
    steps_per_epoch: int | None
    hours_per_epoch: float | None
    epoch: float | None
    state_bytes: float
    """Weights, masters and the optimizer's averages: what a full checkpoint would hold."""
    export_s: float
    """To write the weights once, at the end."""


def cost_of(plan: Plan, machine: Machine, time: StepTime, *, num_tasks: int | None = None) -> Cost:
    """What the run of `plan` costs on `machine`."""
    price, recipe = machine.total_price, plan.recipe
    held = held_bytes(plan.facts, trainer_load(recipe))
    state = sum(held.total - held.gradients for held in (held.device, held.cpu))
    export = plan.facts.parameters * ELEMENT_BYTES[recipe.model.dtype] / _DISK
    steps = recipe.run.steps
    hours = None if steps is None else (steps * time.seconds + export) / _HOUR_S
    per_epoch = None if num_tasks is None else math.ceil(num_tasks / recipe.rollout.groups_per_step)
    epoch_hours = None if per_epoch is None else per_epoch * time.seconds / _HOUR_S
    return Cost(
        price_per_hour=price,
        price_date=machine.price_date,
        per_100_steps=_times(price, 100 * time.seconds / _HOUR_S),
        hours=hours,
        whole_run=_times(price, hours),
        steps_per_epoch=per_epoch,
        hours_per_epoch=epoch_hours,
        epoch=_times(price, epoch_hours),
        state_bytes=state,
        export_s=export,
    )


def cost_lines(cost: Cost, *, steps: int | None, num_tasks: int | None) -> list[str]:
    """The same as sentences."""
    found = []
    if cost.price_per_hour is None:
        found.append("No price of this machine is known; name an --instance, or give one in a --hardware file.")
    else:
        found.append(
            f"${cost.price_per_hour:.2f} an hour (list price of {cost.price_date}, on demand): "
            f"${cost.per_100_steps:,.2f} for 100 steps."
        )
    if cost.hours is not None:
        found.append(f"The run of {steps:,} steps takes {cost.hours:,.1f} hours{_dollars(cost.whole_run)}, evaluation apart.")
    if cost.steps_per_epoch is not None:
        found.append(
            f"An epoch of {num_tasks:,} tasks is {cost.steps_per_epoch:,} steps, {cost.hours_per_epoch:,.1f} hours"
            f"{_dollars(cost.epoch)}."
        )
    found.append(
        f"Weights are written once, at the end: {cost.export_s:,.0f} s at 1 GB/s (assumed). A full state would be "
        f"{cost.state_bytes / GIB:,.1f} GiB; there are no checkpoints yet."
    )
    return [*found, *([SPOT] if cost.price_per_hour is not None else [])]


def _times(price: float | None, hours: float | None) -> float | None:
    return None if price is None or hours is None else price * hours


def _dollars(amount: float | None) -> str:
    return "" if amount is None else f", ${amount:,.2f}"
