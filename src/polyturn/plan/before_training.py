"""The plan that training starts with, of the GPUs of this machine."""

from __future__ import annotations

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError, ModelError
from polyturn.plan.changes import plan_on
from polyturn.plan.here import gpus_here
from polyturn.plan.models import model_facts
from polyturn.plan.nearest_fit import nearest_fit
from polyturn.plan.planner import GIB
from polyturn.processes.gpus import visible_gpus


def plan_here(recipe: Recipe, *, num_tasks: int | None, force: bool = False, smi: str = "nvidia-smi") -> list[str]:
    """What to say before training by a resolved recipe; nothing on a machine without GPUs.

    Raises ConfigError when the run does not fit on its GPUs and `force` is not set.
    """
    visible = visible_gpus(smi=smi)
    if recipe.trainer.device == "cpu" or not visible:
        return []
    here = gpus_here(visible, smi=smi)
    if here.machine is None:
        return [f"No plan of the memory: {here.reason}."]
    machine = here.machine
    try:
        facts = model_facts(recipe.model.path)
    except ModelError as error:
        return [f"No plan of the memory: {error}."]
    plan = plan_on(recipe, facts, machine, num_tasks=num_tasks)
    needs = [
        f"{gpu.role}: {gpu.needed / GIB:.1f} of {machine.gpu.usable_bytes / GIB:.1f} GiB planned ({machine.gpu_name})"
        for gpu in plan.gpus
    ]
    problems = plan.problems(machine)
    if not problems:
        return needs
    if force:
        return [*needs, *(f"does not fit, and is tried because of --force: {problem}" for problem in problems)]
    overrides = nearest_fit(recipe, facts, machine, num_tasks=num_tasks)
    way_out = "nothing known makes it fit" if overrides is None else f"nearest that fits: {' '.join(overrides)}"
    raise ConfigError("\n".join(f"does not fit here: {problem}; {way_out}; --force tries it anyway" for problem in problems))
