"""The trainer's memory against the peaks that were measured on a GPU, and its parts by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from polyturn.config.memory import per_parameter
from polyturn.errors import ModelError
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.memory import Term, TrainerLoad, held_bytes, peak, trainer_terms
from polyturn.plan.models import ModelFacts, facts_from_config, model_facts

GIB = 1 << 30
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
CASES = [
    case
    for name in ("trainer_throughput.json", "trainer_throughput_4bit.json")
    for case in json.loads((RESULTS / name).read_text(encoding="utf-8"))["cases"]
    if "peak_gib" in case
]
MEDIAN, WORST = 0.03, 0.06
"""Largest error as a share of the measured peak; what was aimed at was 10 and 25 %."""


def measured(case: dict[str, Any]) -> tuple[ModelFacts, TrainerLoad]:
    """Model and load of a measured case, from its name: `1.5B/64x1k/selective/none/compiled`."""
    model, batch, *words = case["case"].split("/")
    name = "builtin:smollm2" if model == "135M" else f"Qwen/Qwen2.5-{model}"
    # All of them were measured in the Qwen2 architecture, which has biases.
    facts = facts_from_config({**CONFIGS[name], "model_type": "qwen2"}, name=model)
    samples, length = batch.removesuffix("k").split("x")
    rows_k = next((int(word.removeprefix("rows").removesuffix("k")) for word in words if word.startswith("rows")), 16)
    load = TrainerLoad(
        dtype="bfloat16",
        row_tokens=rows_k * 1024,
        trained_tokens=rows_k * 512,
        rows=int(samples) * int(length) // rows_k,
        optimizer="adamw_8bit" if "adamw_8bit" in words else "adamw",
        master_weights=next((word for word in words if word in ("none", "stochastic")), "float32"),
        activations=next((word for word in words if word in ("selective", "full")), "keep"),
        compiled="compiled" in words,
        quantize="4bit" if "4bit" in words else None,
        lora_rank=next((int(word.removeprefix("lora")) for word in words if word.startswith("lora")), None),
    )
    return facts, load


PAGE = Path(__file__).parents[3] / "docs" / "planner.md"


def test_the_page_has_these_numbers():
    text = PAGE.read_text(encoding="utf-8")
    for case in CASES:
        planned = peak(trainer_terms(*measured(case))) / GIB
        error = planned / case["peak_gib"] - 1
        assert f"| {case['case']} | {case['peak_gib']:.2f} | {planned:.2f} | {100 * error:+.1f} % |" in text


def errors() -> dict[str, float]:
    """Of every case, as a share of the measured peak; above 0 where the plan says more."""
    found = {}
    for case in CASES:
        found[case["case"]] = peak(trainer_terms(*measured(case))) / GIB / case["peak_gib"] - 1
    return found


def test_enough_was_measured():
    assert len(CASES) >= 8


def test_peaks_were_as_planned():
    found = errors()
    for name, error in found.items():
        print(f"{name:<32} {error:+.1%}")
    assert statistics.median(map(abs, found.values())) < MEDIAN
    assert max(map(abs, found.values())) < WORST, found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_held_between_steps(case):
    facts, load = measured(case)
    device = held_bytes(facts, load).device
    # The inputs of the last step and what cuBLAS works in are there as well.
    assert 0 <= case["held_gib"] - (device.total - device.gradients) / GIB < 0.15


def test_held_bytes_are_those_of_the_memory_page():
    facts = model_facts("Qwen/Qwen2.5-1.5B")
    load = TrainerLoad(dtype="bfloat16", row_tokens=1, trained_tokens=1, rows=2, master_weights="float32", offload=True)
    each = per_parameter(dtype="bfloat16", optimizer="adamw", master_weights="float32", offload=True)
    assert held_bytes(facts, load).cpu.total == pytest.approx(each.cpu.total * facts.parameters, rel=1e-6)
    assert held_bytes(facts, load).device.total == each.device.total * facts.parameters


def test_phases_share_their_memory():
    terms = [
        Term(name="a", bytes=1, formula=""),
        Term(name="b", bytes=10, formula="", phase="training"),
        Term(name="c", bytes=20, formula="", phase="training"),
        Term(name="d", bytes=25, formula="", phase="generating"),
    ]
    assert peak(terms) == 31
    assert peak(()) == 0


def load_of(**given: Any) -> TrainerLoad:
    base: dict[str, Any] = {"dtype": "bfloat16", "row_tokens": 8192, "trained_tokens": 8192, "rows": 4}
    return TrainerLoad(**(base | {"master_weights": "float32"} | given))


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"activations": "selective"}, {}),
        ({"activations": "full"}, {"activations": "selective"}),
        ({"optimizer": "adamw_8bit"}, {}),
        ({"optimizer": "sgd"}, {"optimizer": "adamw_8bit"}),
        ({"master_weights": "stochastic"}, {}),
        ({"offload": True}, {}),
        ({"lora_rank": 16}, {}),
        ({"lora_rank": 16, "quantize": "4bit"}, {"lora_rank": 16}),
        ({"lora_rank": 16, "lora_targets": ("q_proj",)}, {"lora_rank": 16}),
        ({"row_tokens": 4096, "trained_tokens": 4096}, {}),
        ({}, {"compiled": False}),
        ({}, {"float32_head": True}),
        ({}, {"reference": "same"}),
        ({"reference": "cpu"}, {"reference": "same"}),
        ({}, {"masked": True}),
        ({"rows": 1}, {}),
    ],
)
def test_what_saves_memory(less, more):
    facts = model_facts("Qwen/Qwen2.5-3B")
    assert peak(trainer_terms(facts, load_of(**less))) < peak(trainer_terms(facts, load_of(**more)))


def test_a_reference_in_cpu_memory_scores_before_anything_is_trained():
    facts = model_facts("Qwen/Qwen2.5-3B")
    with_reference, without = load_of(reference="cpu"), load_of()
    assert peak(trainer_terms(facts, with_reference)) == peak(trainer_terms(facts, without))


def test_adapters_by_hand():
    facts = model_facts("Qwen/Qwen2.5-0.5B")
    load = load_of(lora_rank=8, lora_targets=("q_proj", "v_proj"), master_weights="none")
    device = held_bytes(facts, load).device
    assert device.gradients == 2 * 24 * 8 * ((896 + 896) + (896 + 128))
    assert device.weights == 2 * facts.parameters + device.gradients


def test_a_wrong_target():
    with pytest.raises(ModelError, match=r"k_prj is no linear layer of Qwen/Qwen2\.5-3B; did you mean k_proj\?"):
        held_bytes(model_facts("Qwen/Qwen2.5-3B"), load_of(lora_rank=8, lora_targets=("k_prj",)))
