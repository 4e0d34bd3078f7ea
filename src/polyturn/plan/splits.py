"""Other ways to give the GPUs of a machine to trainer and engines, and how long a step would take with each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settled_plan
from polyturn.plan.changes import Change, changed, differences, overrides, plan_on
from polyturn.plan.hardware import Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.placement import is_paged, tensor_parallel
from polyturn.plan.speed import FILL, StepTime, step_time

MOST_GPUS = 128
_MOST_SPLITS = 16
SHARED = 0.45
"""Share of a GPU for an engine beside a trainer of adapters, whose own share is mostly the base."""
_WORTH = 0.97
"""A split is better that takes at most this share of the time: estimates are no finer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to give out the GPUs."""

    name: str
    """Such as `7 + 1`, trainer first, or `8 shared`."""
    time: StepTime
    problems: tuple[str, ...]
    overrides: tuple[str, ...]
    planned: bool
    """Whether it is the recipe's own."""

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return not self.problems


def splits(
    recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None = None, fill: float = FILL
) -> tuple[Split, ...]:
    """All splits of the machine's GPUs, the recipe's own among them where it has all GPUs."""
    own = plan_on(recipe, facts, machine, num_tasks=num_tasks)
    found = []
    for name, change in split_changes(recipe, machine):
        try:
            plan = settled_plan(changed(recipe, change), facts, machine, num_tasks=num_tasks)
        except ConfigError:
            continue
        found.append(
            Split(
                name=name,
                time=step_time(plan, machine, fill=fill),
                problems=plan.problems(machine),
                overrides=overrides(differences(recipe, change)),
                planned=plan.seats == own.seats,
            )
        )
    return tuple(found)


def better(found: tuple[Split, ...], planned: StepTime, *, fits: bool) -> Split | None:
    """The fastest split that fits, where it is faster than what is planned, or that does not fit."""
    fitting = [split for split in found if split.fits and not split.planned]
    best = min(fitting, key=lambda split: split.time.seconds, default=None)
    if best is None or (fits and best.time.seconds > _WORTH * planned.seconds):
        return None
    return best


def split_lines(found: tuple[Split, ...], best: Split | None, machine: Machine) -> list[str]:
    """A table, and when more engines pay."""
    if not found:
        return []
    rows = [f"splits of the {machine.total} GPUs, trainer + engines; seconds a step = rollouts + training and push"]
    for split in found:
        rolled = split.time.of("sample") + split.time.of("prompts")
        words = "" if split.fits else "  does not fit"
        words += "  as planned" if split.planned else ""
        rows.append(
            f"  {split.name:<9} {split.time.seconds:>9.1f} = {rolled:>7.1f} + {split.time.seconds - rolled:>7.1f}{words}"
        )
    rows.append("More GPUs for engines pay while rollouts take longer than training does, and the other way round.")
    if best is not None:
        rows.append(f"faster: {best.name}, with {' '.join(best.overrides)}")
    return rows


def split_changes(recipe: Recipe, machine: Machine) -> Iterator[tuple[str, Change]]:
    """Splits by name, as changes to the recipe: all of them, or some evenly apart; none of one GPU, or of too many to try."""
    if not 1 < machine.total <= MOST_GPUS:
        return
    total, parts = machine.total, tensor_parallel(recipe)
    server = "vllm_server" if is_paged(recipe) else "hf_server"
    apart: Change = {"engine.kind": server, "engine.devices": None, "trainer.devices": None, "weight_sync.mode": "auto"}
    most = (total - 1) // parts
    step = max(1, -(-most // _MOST_SPLITS))
    for servers in sorted({1, *range(step, most + 1, step)} if most else ()):
        ranks = total - servers * parts
        yield (
            f"{ranks} + {servers * parts}",
            apart | {"trainer.num_ranks": ranks, "engine.num_servers": servers},
        )
    if server == "vllm_server" and parts == 1 and recipe.model.lora is not None:
        all_gpus = tuple(range(total))
        shared: Change = {"engine.devices": all_gpus, "trainer.devices": all_gpus, "engine.gpu_memory_utilization": SHARED}
        yield f"{total} shared", apart | shared | {"trainer.num_ranks": total, "engine.num_servers": total}
