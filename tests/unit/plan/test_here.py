"""The plan that training starts with, by a driver's tool that answers as told, and what `trainer.memory=auto` chooses."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan import here as module
from polyturn.plan.auto_memory import fit_here, fit_memory
from polyturn.plan.before_training import plan_here
from polyturn.plan.changes import plan_on
from polyturn.plan.engine_report import EngineReport, planned_engine, report_lines
from polyturn.plan.hardware import load_hardware
from polyturn.plan.here import gpus_here, known_kind
from polyturn.plan.models import model_facts

GIB = 1 << 30
HARDWARE = load_hardware()


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A tool that says these lines, on a machine whose GPUs are 0 to n."""

    def made(*rows: str) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in range(len(rows))))
        tool: Path = tmp_path / "nvidia-smi"
        lines = "\n".join(rows)
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n", encoding="utf-8")
        tool.chmod(0o755)
        return str(tool)

    return made


def recipe_of(path: str = "Qwen/Qwen2.5-3B", **sections: dict[str, Any]) -> Recipe:
    model = {"path": path, "dtype": "bfloat16"} | sections.pop("model", {})
    return Recipe.model_validate({"run": {"steps": 10}, "model": model, "environment": {"id": "lookup"}} | sections)


def resolved(path: str = "Qwen/Qwen2.5-3B", **sections: dict[str, Any]) -> Recipe:
    return resolve(recipe_of(path, **sections), num_train_tasks=None, on_gpu=True).recipe


A100 = "GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960, 519"


def test_memory_and_kind_as_the_driver_reports_them(driver):
    found = gpus_here(["0", "1"], smi=driver(f"0, {A100}", f"1, {A100}"))
    assert found.machine is not None
    assert (found.machine.count, found.machine.gpu_name) == (2, "a100-40gb")
    assert found.machine.gpu.usable_bytes == (40960 - 519) << 20
    assert found.machine.gpu.bf16_tflops == 312


def test_the_smallest_stands_for_all(driver):
    found = gpus_here(["0", "1"], smi=driver("0, GPU-a, NVIDIA H200, 143771, 0", "1, GPU-b, NVIDIA H200, 100000, 0"))
    assert found.machine is not None
    assert found.machine.gpu.usable_bytes == 100_000 << 20


def test_gpus_by_the_start_of_their_name(driver):
    smi = driver("0, GPU-aaaa, NVIDIA L4, 23034, 0", "1, GPU-bbbb, NVIDIA L4, 23034, 0")
    found = gpus_here(["GPU-bb"], smi=smi)
    assert found.machine is not None
    assert found.machine.count == 1


@pytest.mark.parametrize("rows", [("0, GPU-a, NVIDIA H200, [N/A], [N/A]",), ("garbage",), ("0, GPU-a, NVIDIA H200, 143771",)])
def test_a_driver_that_does_not_tell(driver, rows):
    found = gpus_here(["0"], smi=driver(*rows))
    assert found.machine is None
    assert "memory of 0 of the 1 GPUs" in found.reason


def test_no_tool(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (said,) = plan_here(resolved(), num_tasks=None, smi="no-such-tool")
    assert said == "No plan of the memory: the driver's tool nvidia-smi does not answer (FileNotFoundError)."


@pytest.mark.parametrize(
    ("name", "mib", "kind"),
    [
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA T4", 15360, None),
    ],
)
def test_kinds_by_the_names_of_drivers(name, mib, kind):
    assert known_kind(name, mib) == kind


def test_the_examples():
    assert doctest.testmod(module).failed == 0


def test_what_does_not_fit_is_refused_with_the_way_out(driver):
    smi = driver("0, GPU-a, NVIDIA A10G, 23028, 300")
    recipe = resolved(engine={"kind": "vllm"})
    with pytest.raises(ConfigError, match="does not fit here: trainer-0 and the engine: ") as error:
        plan_here(recipe, num_tasks=None, smi=smi)
    assert "nearest that fits: trainer.activations=full" in str(error.value)
    assert str(error.value).endswith("--force tries it anyway")
    forced = plan_here(recipe, num_tasks=None, force=True, smi=smi)
    assert "is tried because of --force" in forced[-1]


def test_what_fits_is_said_with_its_numbers(driver):
    (said,) = plan_here(resolved("Qwen/Qwen2.5-0.5B"), num_tasks=None, smi=driver("0, GPU-a, NVIDIA H200, 143771, 600"))
    assert said.startswith("trainer-0 and the engine: ")
    assert said.endswith(" of 139.8 GiB planned (h200)")


def test_an_unknown_card_is_planned_by_its_memory(driver):
    (said,) = plan_here(resolved("Qwen/Qwen2.5-0.5B"), num_tasks=None, smi=driver("0, GPU-a, NVIDIA Z1, 143771, 600"))
    assert said.endswith("(NVIDIA Z1)")


def test_a_model_that_nobody_can_count_is_not_planned(driver):
    (said,) = plan_here(resolved("some/unknown-model"), num_tasks=None, smi=driver(f"0, {A100}"))
    assert said.startswith("No plan of the memory: model.path=some/unknown-model")


def test_nothing_is_said_where_nothing_is_trained_on_a_gpu(driver, monkeypatch):
    assert plan_here(resolved(trainer={"device": "cpu"}), num_tasks=None, smi=driver(f"0, {A100}")) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan_here(resolved(), num_tasks=None) == []


def test_auto_chooses_what_fits_and_says_why():
    recipe, machine = recipe_of(trainer={"memory": "auto"}, engine={"kind": "vllm"}), HARDWARE.gpus_alone("a100-80gb", 1)
    facts = model_facts(recipe.model.path)
    assert plan_on(recipe, facts, machine).problems(machine)
    fitted, reasons = fit_memory(recipe, facts, machine, num_tasks=None)
    assert plan_on(fitted, facts, machine).problems(machine) == ()
    assert set(reasons) == {"trainer.activations"}
    assert reasons["trainer.activations"].startswith("trainer.memory=auto: ")
    assert fit_memory(fitted, facts, machine, num_tasks=None) == (fitted, {})


def test_auto_leaves_alone_what_is_given():
    given = recipe_of(trainer={"memory": "auto", "activations": "keep", "row_tokens": 8192}, engine={"kind": "vllm"})
    machine = HARDWARE.machine("p5.48xlarge")
    fitted, reasons = fit_memory(given, model_facts(given.model.path), machine, num_tasks=None)
    assert (fitted.trainer.activations, fitted.trainer.row_tokens) == ("keep", 8192)
    assert set(reasons) <= {"trainer.offload_optimizer"}


def test_auto_where_nothing_fits_changes_nothing():
    given = recipe_of("Qwen/Qwen2.5-72B", trainer={"memory": "auto"}, engine={"kind": "vllm"})
    machine = HARDWARE.gpus_alone("a10g", 1)
    assert fit_memory(given, model_facts(given.model.path), machine, num_tasks=None) == (given, {})


def test_auto_looks_at_this_machine(driver, monkeypatch):
    given = recipe_of(trainer={"memory": "auto"}, engine={"kind": "vllm"})
    fitted, reasons = fit_here(given, num_tasks=None, smi=driver("0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 600"))
    assert fitted.trainer.activations != "keep"
    assert reasons
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fit_here(given, num_tasks=None) == (given, {})
    off = recipe_of(engine={"kind": "vllm"})
    assert fit_here(off, num_tasks=None) == (off, {})


def test_an_engines_report_beside_the_plan():
    """The published start of Qwen2.5-7B, whose numbers the plan gives back."""
    recipe = resolved(
        "Qwen/Qwen2.5-7B",
        engine={
            "kind": "vllm_server",
            "gpu_memory_utilization": 0.85,
            "max_model_len": 131_072,
            "extra_args": {"enforce_eager": True, "max_num_batched_tokens": 131_072},
        },
    )
    planned = planned_engine(
        recipe,
        model_facts("Qwen/Qwen2.5-7B"),
        gpu_name="NVIDIA A100-SXM4-40GB",
        total_bytes=HARDWARE.gpu("a100-40gb").usable_bytes,
        beside_trainer=False,
    )
    measured = EngineReport(
        budget_bytes=33.57 * GIB,
        weights_bytes=14.27 * GIB,
        activation_bytes=17.39 * GIB,
        non_torch_bytes=0.09 * GIB,
        kv_bytes=1.82 * GIB,
        blocks=2131,
        tokens=34_096,
    )
    head, *rows = report_lines(measured, planned)
    assert head.split() == ["engine,", "GiB", "measured", "planned", "error"]
    for row in rows:
        *_, here, there, error = row.split()
        assert here == there, row
        assert abs(float(error.rstrip("%"))) < 0.6


def test_a_report_with_holes():
    shown = report_lines(EngineReport(kv_bytes=2 * GIB, tokens=1000), None)
    assert [line.split() for line in shown[1:]] == [["KV", "cache", "2.00", "-"], ["KV", "tokens", "1,000", "-"]]
