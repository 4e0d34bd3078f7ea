"""Everything there is to say about a recipe on a machine: the plan, the verdict, time, money, and other splits of the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyturn.config.schema import Recipe
from polyturn.plan.automatic import settle
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import Hardware, Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.money import Cost, cost_of
from polyturn.plan.nearest_fit import nearest_fit, only_needed, smallest_gpu
from polyturn.plan.planner import Plan
from polyturn.plan.prefer import Goal, Preferred, prefer
from polyturn.plan.speed import FILL, StepTime, step_time
from polyturn.plan.splits import Split, better, splits
from polyturn.plan.suggest import Suggestion, cheapest, suggest_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan fits, and what would."""

    problems: tuple[str, ...] = ()
    overrides: tuple[str, ...] | None = None
    """What makes it fit on the same machine; None when nothing known does, or nothing has to."""
    smallest_gpu: str | None = None
    """Kind of GPU with the least memory on which the recipe fits as it is."""
    elsewhere: Suggestion | None = None
    """The cheapest machine on which it fits in some way, where nothing known makes it fit on this one, or it costs too much."""
    too_dear: bool = False
    """Whether it fits, and an hour costs more than it may."""

    @property
    def fits(self) -> bool:
        """Whether there was no problem."""
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A recipe on a machine. Without a machine there is no time, no cost and no split."""

    plan: Plan
    machine: Machine | None
    verdict: Verdict
    num_tasks: int | None
    time: StepTime | None = None
    cost: Cost | None = None
    splits: tuple[Split, ...] = ()
    faster: Split | None = None
    preferred: Preferred | None = None


def study(
    recipe: Recipe,
    facts: ModelFacts,
    hardware: Hardware,
    machine: Machine | None,
    *,
    num_tasks: int | None = None,
    fill: float = FILL,
    goal: Goal | None = None,
    budget: float | None = None,
) -> Study:
    """Plan `recipe`, moved towards `goal` where one is given, and judge it. Raises ConfigError for what can't be planned.

    `budget` is the most that an hour may cost, `fill` the share of their limits that trajectories reach.
    """
    preferred = None
    if goal is not None and machine is not None:
        preferred = prefer(recipe, facts, machine, goal, num_tasks=num_tasks, fill=fill)
        recipe = preferred.recipe
    asked, chosen = recipe, dict[str, str]()
    if machine is not None:
        recipe, found_out = settle(recipe, facts, machine, num_tasks=num_tasks)
        chosen.update(found_out)
    plan = plan_on(recipe, facts, machine, num_tasks=num_tasks)
    plan = replace(plan, reasons={**plan.reasons, **chosen})
    smallest = smallest_gpu(asked, facts, hardware, num_tasks=num_tasks)
    if machine is None:
        return Study(
            plan=plan, machine=None, verdict=Verdict(problems=plan.refused, smallest_gpu=smallest), num_tasks=num_tasks
        )
    problems = plan.problems(machine)
    found = _what_fits(recipe, facts, machine, num_tasks, fill) if problems else None
    elsewhere = None
    dear = _too_dear(machine, budget)
    if (problems and found is None) or dear:
        elsewhere = cheapest(recipe, facts, hardware, budget=budget, num_tasks=num_tasks, fill=fill)
    time = step_time(plan, machine, fill=fill)
    others = splits(asked, facts, machine, num_tasks=num_tasks, fill=fill)
    return Study(
        plan=plan,
        machine=machine,
        verdict=Verdict(
            problems=(*problems, *dear),
            overrides=found,
            smallest_gpu=smallest,
            elsewhere=elsewhere,
            too_dear=bool(dear) and not problems,
        ),
        num_tasks=num_tasks,
        time=time,
        cost=cost_of(plan, machine, time, num_tasks=num_tasks),
        splits=others,
        faster=better(others, time, fits=not problems),
        preferred=preferred,
    )


def _what_fits(
    recipe: Recipe, facts: ModelFacts, machine: Machine, num_tasks: int | None, fill: float
) -> tuple[str, ...] | None:
    """The nearest way that fits there, or else what would be suggested for that machine, perhaps with another engine."""
    found = nearest_fit(recipe, facts, machine, num_tasks=num_tasks)
    if found is not None:
        return found
    other = suggest_on(recipe, facts, machine, num_tasks=num_tasks, fill=fill)
    return None if other is None else only_needed(recipe, facts, machine, other.change, num_tasks=num_tasks)


def _too_dear(machine: Machine, budget: float | None) -> tuple[str, ...]:
    price = machine.total_price
    if budget is None or price is None or price <= budget:
        return ()
    return (f"--budget-per-hour={budget:g}: {machine.name} costs ${price:.2f} an hour",)
