"""`--suggest MODEL`: on which machines a model can be trained, and at which price, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, RolloutSection, RunSection
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settled_plan
from polyturn.plan.changes import Change, changed, differences, overrides
from polyturn.plan.hardware import Hardware, Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import GIB, Plan
from polyturn.plan.speed import FILL, StepTime, step_time

_TURN_TOKENS = 1024
_PARTS = (1, 2, 4, 8)
_HALF: Change = {"model.dtype": "bfloat16", "weight_sync.mode": "auto", "engine.device": None}
_HOW: tuple[tuple[str, Change], ...] = (
    ("all weights", {}),
    ("all weights, recomputed", {"trainer.activations": "full"}),
    ("8-bit AdamW", {"trainer.activations": "full", "trainer.optimizer": "adamw_8bit"}),
    (
        "8-bit AdamW, rounded at random",
        {"trainer.activations": "full", "trainer.optimizer": "adamw_8bit", "trainer.master_weights": "stochastic"},
    ),
    ("LoRA r16", {"trainer.activations": "full", "model.lora.rank": 16}),
    ("LoRA r16, 4-bit base", {"trainer.activations": "full", "model.lora.rank": 16, "model.quantize": "4bit"}),
)
"""Ways to train, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A machine on which a model fits, with the best way to train it there."""

    machine: Machine
    how: str
    placement: str
    plan: Plan
    time: StepTime
    change: Change
    """To the recipe that was asked about."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The change, as the command line takes it."""
        return overrides(self.change)

    @property
    def per_100_steps(self) -> float:
        """Dollars."""
        assert self.machine.total_price is not None
        return self.machine.total_price * 100 * self.time.seconds / 3600


def suggestion_recipe(path: str, *, context: int, group_size: int) -> Recipe:
    """The recipe that suggestions are for: 16 groups of `group_size`, trajectories of `context` tokens, vLLM."""
    if not 64 <= context <= 1 << 22:
        raise ConfigError(f"--context={context}: give the tokens of a trajectory, from 64 to {1 << 22:,}")
    if not 2 <= group_size <= 4096:
        raise ConfigError(f"--group-size={group_size}: a trajectory is compared with its siblings; give from 2 to 4,096")
    return Recipe(
        run=RunSection(steps=100),
        model=ModelSection(path=path, dtype="bfloat16"),
        environment=EnvironmentSection(id="lookup"),
        rollout=RolloutSection(
            group_size=group_size, max_trajectory_tokens=context, max_turn_tokens=min(_TURN_TOKENS, context)
        ),
    )


def suggest(
    recipe: Recipe,
    facts: ModelFacts,
    hardware: Hardware,
    *,
    nodes: int = 1,
    budget: float | None = None,
    num_tasks: int | None = None,
    fill: float = FILL,
) -> tuple[Suggestion, ...]:
    """The machines with a price, of at most `budget` dollars an hour, on which `recipe` fits somehow; the cheapest first."""
    machines = _affordable(hardware, nodes, budget)
    return tuple(_suggestions(recipe, facts, machines, num_tasks, fill))


def cheapest(
    recipe: Recipe,
    facts: ModelFacts,
    hardware: Hardware,
    *,
    budget: float | None = None,
    num_tasks: int | None = None,
    fill: float = FILL,
) -> Suggestion | None:
    """The first of `suggest`, without a look at dearer machines."""
    return next(_suggestions(recipe, facts, _affordable(hardware, 1, budget), num_tasks, fill), None)


def _suggestions(
    recipe: Recipe, facts: ModelFacts, machines: list[Machine], num_tasks: int | None, fill: float
) -> Iterator[Suggestion]:
    for machine in machines:
        found = suggest_on(recipe, facts, machine, num_tasks=num_tasks, fill=fill)
        if found is not None:
            yield found


def _affordable(hardware: Hardware, nodes: int, budget: float | None) -> list[Machine]:
    """Machines with a price, of at most `budget` dollars an hour, the cheapest first."""
    machines = [hardware.machine(name).times(nodes) for name in hardware.instances]
    priced = [(machine.total_price, machine) for machine in machines if machine.total_price is not None]
    return [machine for price, machine in sorted(priced, key=lambda pair: pair[0]) if budget is None or price <= budget]


def suggestion_lines(found: tuple[Suggestion, ...], facts: ModelFacts, recipe: Recipe, *, none: str) -> list[str]:
    """The table. `none` is what to say when it is empty."""
    rollout = recipe.rollout
    rows = [
        f"{facts.name}, trajectories of {rollout.max_trajectory_tokens:,} tokens, {rollout.groups_per_step} groups of "
        f"{rollout.group_size} a step, on demand, list prices"
    ]
    if not found:
        return [*rows, none]
    rows.append(f"  {'instance':<19}{'GPUs':<16}{'$/h':>7}{'s/step':>9}{'$/100':>9}{'GiB of':>15}  placement, how")
    for one in found:
        gib = f"{one.plan.needed / GIB:.1f} of {one.machine.gpu.usable_bytes / GIB:.1f}"
        nodes = f"{one.machine.nodes} x " if one.machine.nodes > 1 else ""
        rows.append(
            f"  {nodes + one.machine.name:<19}{f'{one.machine.total} x {one.machine.gpu_name}':<16}"
            f"{one.machine.total_price:>7.2f}{one.time.seconds:>9.1f}{one.per_100_steps:>9.2f}{gib:>15}  "
            f"{one.placement}, {one.how}"
        )
    rows.append(f"prices of EC2 on {found[0].machine.price_date}; SageMaker jobs (ml.) cost 15 to 25 % more, an estimate")
    dtype = ("model.dtype=bfloat16",) if recipe.model.dtype == "bfloat16" else ()
    own = (f"model.path={recipe.model.path}", *dtype)
    rows.append(f"cheapest: {' '.join((*own, *found[0].overrides))}")
    quickest = min(found, key=lambda one: one.per_100_steps)
    if quickest is not found[0]:
        rows.append(f"cheapest for 100 steps: {quickest.machine.name} with {' '.join((*own, *quickest.overrides))}")
    return rows


def suggest_on(
    recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None = None, fill: float = FILL
) -> Suggestion | None:
    """The best way in which `recipe` fits on `machine`: the best method, and of it the fastest placement. None without any."""
    for how, method in _HOW:
        fitting = []
        for placement, place in _placements(machine, adapters="model.lora.rank" in method):
            change = _HALF | method | place
            try:
                plan = settled_plan(changed(recipe, change), facts, machine, num_tasks=num_tasks)
            except ConfigError:
                continue
            if not plan.problems(machine):
                time = step_time(plan, machine, fill=fill)
                fitting.append(
                    Suggestion(
                        machine=machine,
                        how=how,
                        placement=placement,
                        plan=plan,
                        time=time,
                        change=differences(recipe, change),
                    )
                )
        if fitting:
            return min(fitting, key=lambda one: one.time.seconds)
    return None


def _placements(machine: Machine, *, adapters: bool) -> Iterator[tuple[str, Change]]:
    """One GPU for both, and the splits people use: one, two, half of the GPUs for engines, of one or several GPUs each."""
    for share in (0.3, 0.4, 0.45, 0.5) if machine.total == 1 else (0.3, 0.5):
        one: Change = {"engine.kind": "vllm", "engine.gpu_memory_utilization": share, "trainer.num_ranks": 1}
        one |= {"engine.tensor_parallel_size": 1, "engine.num_servers": 1}
        if adapters:  # which reach vLLM as files, so that it is a process of its own
            one |= {"engine.kind": "vllm_server", "engine.devices": (0,), "trainer.devices": (0,)}
        yield "shared GPU", one
    total = machine.total
    for engines in sorted({1, 2, total // 2, 3 * total // 4}):
        for parts in _PARTS:
            ranks = total - engines
            if engines and ranks >= 1 and engines % parts == 0 and parts <= machine.count:
                yield (
                    f"{ranks} + {engines}{f' (TP {parts})' if parts > 1 else ''}",
                    {
                        "engine.kind": "vllm_server",
                        "engine.num_servers": engines // parts,
                        "engine.tensor_parallel_size": parts,
                        "trainer.num_ranks": ranks,
                    },
                )
