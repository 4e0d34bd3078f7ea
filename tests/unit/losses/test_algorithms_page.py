"""docs/algorithms.md says what the code does: names, options, defaults and numbers of the presets."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from numerics.builders import make_inputs
from polyturn.advantages import ESTIMATORS
from polyturn.config.presets import LOSS_PRESETS, resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.losses import policy_loss
from polyturn.losses.clip import CLIP_RULES
from polyturn.losses.sampler import CORRECTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|")]


def rows_that_start(*cells: str) -> list[str]:
    return [row for row in ROWS if row.startswith("| " + " | ".join(cells) + " |")]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_a_formula_and_its_options(name: str) -> None:
    assert sum(row.startswith(f"| `{name}` | ") for row in ROWS) >= 2, "no row in the table of formulas"
    for option in fields(ESTIMATORS[name]):
        default = option.default if option.default is not MISSING else option.default_factory()
        assert rows_that_start(f"`{name}`", f"`{option.name}`", f"`{default}`"), f"no row for {name}.{option.name} = {default}"


def test_no_option_is_described_that_does_not_exist() -> None:
    start = ROWS.index("| estimator | option | default | meaning |") + 2
    described = set()
    for row in ROWS[start:]:
        cells = [cell.strip("` ") for cell in row.strip("|").split("|")]
        if cells[0] not in ESTIMATORS:
            break
        described.add((cells[0], cells[1]))
    assert described == {(name, option.name) for name, chosen in ESTIMATORS.items() for option in fields(chosen)}


@pytest.mark.parametrize("name", LOSS_PRESETS)
def test_every_preset_is_described_as_it_is(name: str) -> None:
    options = resolve_loss(name, LossOptions(), fixed_length=1, default_correction="none")

    def cell(value: object) -> str:
        return "-" if value is None else str(value)

    numbers = [
        f"{value:.4f}".rstrip("0") if isinstance(value, float) else value for value in (options.clip_low, options.clip_high)
    ]
    numbers = [f"{value}0" if str(value).endswith(".") else value for value in numbers]
    cells = [options.ratio_level, options.clip_rule, *numbers, options.aggregation]
    assert rows_that_start(f"`{name}`", *map(cell, cells)), f"no row for {name} with {cells}"


@pytest.mark.parametrize("name", [*CLIP_RULES, *CORRECTIONS, "fixed", "token", "sequence"])
def test_every_value_of_an_axis_has_a_row(name: str) -> None:
    assert rows_that_start(f"`{name}`") or [row for row in ROWS if row.startswith(f"| `{name}` |")]


@pytest.mark.parametrize("option", LossOptions.model_fields)
def test_every_loss_option_is_named(option: str) -> None:
    assert f"`{option}`" in PAGE or option in ("fixed_length",)
    assert option in PAGE


def test_every_metric_is_named() -> None:
    options = resolve_loss("grpo", LossOptions(beta=0.1), fixed_length=1, default_correction="none")
    result = policy_loss(make_inputs([-1.0], [1.0], reference=[-1.0]), options)
    for name in [*result.metrics, *result.maxima]:
        assert f"`{name}`" in PAGE
