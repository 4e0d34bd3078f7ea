"""What an engine says of its memory when it has started, beside what the planner expected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from polyturn.config.schema import Recipe
from polyturn.engine.base import Engine
from polyturn.engine.vllm import VllmEngine
from polyturn.errors import ConfigError, ModelError
from polyturn.plan.engine_memory import PagedEngine
from polyturn.plan.engine_report import EngineReport, planned_engine, report_lines
from polyturn.plan.models import model_facts


def show_engine(recipe: Recipe, folder: str, engine: Engine, say: Callable[[str], None]) -> dict[str, float]:
    """Print the report of an engine that has one, and return it as metrics. `folder` is that of the policy's model."""
    if not isinstance(engine, VllmEngine) or engine.report is None:
        return {}
    for line in report_lines(engine.report, _planned(recipe, folder, engine.device)):
        say(line)
    return {f"engine/{name}": float(value) for name, value in as_numbers(engine.report).items()}


def as_numbers(report: EngineReport) -> dict[str, float]:
    """Those of its fields that were measured."""
    fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
    return {name: value for name, value in fields.items() if value is not None}


def _planned(recipe: Recipe, folder: str, device: torch.device) -> PagedEngine | None:
    """What the planner says of this GPU; None on a CPU, and for a model that it can't count."""
    if device.type != "cuda":
        return None
    seen = torch.cuda.get_device_properties(device)
    beside = recipe.engine.device is None
    try:
        facts = model_facts(folder)
        return planned_engine(recipe, facts, gpu_name=seen.name, total_bytes=seen.total_memory, beside_trainer=beside)
    except (ConfigError, ModelError):
        return None
