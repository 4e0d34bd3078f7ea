"""What a step, a run and a whole data set cost, from seconds a step and the price of an hour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polyturn.config.memory import ELEMENT_BYTES
from polyturn.config.schema import Recipe
from polyturn.plan.hardware import Machine
from polyturn.plan.memory import adapter_numbers, held_bytes
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import GIB, Plan, trainer_load
from polyturn.plan.speed import DISK, StepTime

_HOUR_S = 3600.0
_COPY = 2e10
"""Bytes a second from a GPU to pinned memory: assumed."""
SPOT = (
    "Spot: AWS speaks of up to 70 % less and publishes no discount by type; a reclaim comes with two minutes' notice, in "
    "which a run saves itself and ends; what it goes on from must lie outside the machine (checkpoint.url)."
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
    """Of a checkpoint: weights, masters and, with `checkpoint.contents=all`, the optimizer's averages."""
    checkpoints: Mapping[str, tuple[int, int]]
    """By tier: every how many steps one goes there, and how many of the newest stay."""
    checkpoint_wait_s: float
    """That training waits for one, to be copied from the GPU; it is written beside the training."""
    checkpoint_write_s: float
    export_s: float
    """To write the weights once, at the end."""


def cost_of(plan: Plan, machine: Machine, time: StepTime, *, num_tasks: int | None = None) -> Cost:
    """What the run of `plan` costs on `machine`."""
    price, recipe = machine.total_price, plan.recipe
    state, cadence = _state_bytes(plan.facts, recipe), recipe.checkpoint.cadence()
    export = plan.facts.parameters * ELEMENT_BYTES[recipe.model.dtype] / DISK
    steps, wait = recipe.run.steps, state / _COPY
    saves = 0 if steps is None or not cadence else math.ceil(steps / min(cadence.values()))
    hours = None if steps is None else (steps * time.seconds + saves * wait + export) / _HOUR_S
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
        checkpoints={tier: (every, recipe.checkpoint.kept(tier)) for tier, every in cadence.items()},
        checkpoint_wait_s=wait,
        checkpoint_write_s=state / DISK,
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
    found.append(f"The model is written at the end, in {cost.export_s:,.0f} s at 1 GB/s (assumed).")
    found.append(_checkpoint_line(cost))
    return [*found, *([SPOT] if cost.price_per_hour is not None else [])]


def _checkpoint_line(cost: Cost) -> str:
    size = f"{cost.state_bytes / GIB:,.1f} GiB"
    if not cost.checkpoints:
        return f"There are no checkpoints (checkpoint.every is null in all tiers); one would hold {size}."
    tiers = ", ".join(
        f"to {name} every {'step' if every == 1 else f'{every} steps'} ({kept} kept: {kept * cost.state_bytes / GIB:,.1f} GiB)"
        for name, (every, kept) in cost.checkpoints.items()
    )
    return (
        f"A checkpoint holds {size} and goes {tiers}. Training waits {cost.checkpoint_wait_s:,.1f} s for one at 20 GB/s, and "
        f"it is written beside the training in {cost.checkpoint_write_s:,.0f} s at 1 GB/s (both assumed)."
    )


def _state_bytes(facts: ModelFacts, recipe: Recipe) -> float:
    """Of all ranks together, each thing once. Activations and gradients are no part of it."""
    load = replace(trainer_load(recipe), shards=1, tensor_ranks=1, state_ranks=1, copies_beside=False)
    placed = held_bytes(facts, load)
    whole = sum(held.total - held.gradients for held in (placed.device, placed.cpu))
    if recipe.checkpoint.contents == "model":
        whole -= sum(held.optimizer_state for held in (placed.device, placed.cpu))
    if recipe.model.lora is not None:  # of the frozen weights nothing is saved
        whole -= placed.device.weights - adapter_numbers(facts, load) * ELEMENT_BYTES[load.dtype]
    return whole


def _times(price: float | None, hours: float | None) -> float | None:
    return None if price is None or hours is None else price * hours


def _dollars(amount: float | None) -> str:
    return "" if amount is None else f", ${amount:,.2f}"
