"""The model card of an exported policy: what it was trained from, by which recipe, and how it was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from polyturn import __version__
from polyturn.config.schema import Recipe

_MEASURED = ("success", "success_low", "success_high", "reward", "turns_per_trajectory")
_FAMILIES = {"eval": "sampled", "eval_greedy": "greedy"}


def write_card(folder: Path, recipe: Recipe, metrics: Path, *, step: int) -> None:
    """Write `README.md` into the folder of a model that was trained for `step` steps. `metrics` need not be there."""
    adapter = recipe.model.lora is not None
    lines = [
        "---",
        "library_name: " + ("peft" if adapter else "transformers"),
        "tags: [polyturn, grpo, multi-turn]",
        "---",
        "",
        f"# {recipe.run.name}, step {step}",
        "",
        f"{'Low-rank adapters for' if adapter else 'Trained from'} `{recipe.model.path}` with Polyturn {__version__}: "
        f"{step} of {recipe.run.steps} steps in the environment `{recipe.environment.id}`, advantage "
        f"`{recipe.algorithm.advantage}`, loss `{recipe.algorithm.loss}`.",
        "",
        "## Evaluation",
        "",
        *_evaluation(metrics, step),
        "",
        "## Recipe",
        "",
        "```yaml",
        _yaml(recipe).rstrip(),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _evaluation(metrics: Path, step: int) -> list[str]:
    """A table of what was measured up to `step`, the weights before training included."""
    rows = []
    for measured in _lines(metrics):
        for family, mode in _FAMILIES.items():
            if f"{family}/success" in measured and measured["step"] <= step:
                values = [measured.get(f"{family}/{name}") for name in _MEASURED]
                rows.append((measured["step"], mode, values))
    if not rows:
        return ["Not measured during training."]
    table = ["| step | mode | " + " | ".join(_MEASURED) + " |", "| --- " * (2 + len(_MEASURED)) + "|"]
    for at, mode, values in rows:
        shown = ("" if value is None else f"{value:.4g}" for value in values)
        table.append(f"| {at} | {mode} | " + " | ".join(shown) + " |")
    return ["On held-out tasks of the same environment, with 95 % intervals of the success:", "", *table]


def _lines(metrics: Path) -> list[dict[str, Any]]:
    found = []
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # being written
    return found


def _yaml(recipe: Recipe) -> str:
    text, yaml = io.StringIO(), YAML()
    yaml.width = 1_000_000
    # Where it ran and who was told of it is nobody else's business.
    yaml.dump(recipe.model_dump(mode="json", exclude={"launch", "checkpoint", "sandbox"}, exclude_defaults=True), text)
    return text.getvalue()
