"""Seconds of a step: held against what was measured, and in the right direction where nothing was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.config.schema import Recipe
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import Machine, load_hardware
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.models import facts_from_config
from polyturn.plan.money import cost_lines, cost_of
from polyturn.plan.planner import GIB
from polyturn.plan.speed import StepTime, active_parameters, push_seconds, step_time, utilisation
from polyturn.plan.splits import better, split_lines, splits

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
HARDWARE = load_hardware()
MEASURED_CASES = {
    "135M/64x1k/compiled": ("builtin:smollm2", 64, 1024, {}),
    "0.5B/64x1k/compiled": ("Qwen/Qwen2.5-0.5B", 64, 1024, {}),
    "1.5B/64x1k/compiled": ("Qwen/Qwen2.5-1.5B", 64, 1024, {}),
    "1.5B/16x1k/compiled": ("Qwen/Qwen2.5-1.5B", 16, 1024, {}),
    "1.5B/8x8k/compiled": ("Qwen/Qwen2.5-1.5B", 8, 8192, {}),
    "1.5B/8x8k/selective/compiled": ("Qwen/Qwen2.5-1.5B", 8, 8192, {}),
    "1.5B/8x8k/full/compiled": ("Qwen/Qwen2.5-1.5B", 8, 8192, {}),
    "1.5B/16x1k/rows1k/compiled": ("Qwen/Qwen2.5-1.5B", 16, 1024, {}),
    "1.5B/16x1k/eager": ("Qwen/Qwen2.5-1.5B", 16, 1024, {}),
    "0.5B/8x8k/compiled": ("Qwen/Qwen2.5-0.5B", 8, 8192, {}),
    "135M/8x8k/compiled": ("builtin:smollm2", 8, 8192, {}),
    "7B/16x1k/lora16/compiled": ("Qwen/Qwen2.5-7B", 16, 1024, {"lora": {"rank": 16}}),
}


def facts_of(path: str):
    return facts_from_config(CONFIGS[path], name=path)


def recipe_of(path: str, **sections: dict[str, Any]) -> Recipe:
    model = {"path": path, "dtype": "bfloat16"} | sections.pop("model", {})
    return Recipe.model_validate({"run": {"steps": 100}, "model": model, "environment": {"id": "lookup"}} | sections)


def time_of(path: str, machine: Machine, *, fill: float = 1.0, **sections: dict[str, Any]) -> StepTime:
    recipe = recipe_of(path, **sections)
    return step_time(plan_on(recipe, facts_of(path), machine), machine, fill=fill)


@pytest.mark.parametrize("case", MEASURED_CASES)
def test_training_against_the_measured_steps(case):
    cases = json.loads((RESULTS / "trainer_throughput.json").read_text())["cases"]
    (measured,) = [found for found in cases if found["case"] == case]
    path, samples, length, model = MEASURED_CASES[case]
    words = case.split("/")
    planned = time_of(
        path,
        HARDWARE.gpus_alone("h200", 1),
        model=model,
        rollout={
            "group_size": 4,
            "groups_per_step": samples // 4,
            "max_trajectory_tokens": length,
            "max_turns": 1,
            "max_turn_tokens": length // 2,
        },
        trainer={
            "row_tokens": 1024 if "rows1k" in words else 16384,
            "activations": next((word for word in words if word in ("selective", "full")), "keep"),
            "compile": "off" if "eager" in words else "on",
        },
        engine={"kind": "hf" if model else "vllm"},
    )
    seconds = measured["tokens_per_step"] / measured["tokens_per_s"]
    assert planned.of("train") == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("path", "prompts", "tokens", "per_s"),
    [("builtin:smollm2", 256, 128, 12_300), ("builtin:smollm2", 1024, 256, 26_000), ("Qwen/Qwen2.5-3B", 128, 512, 18_600)],
)
def test_sampling_within_a_factor_of_two_of_three_runs(path, prompts, tokens, per_s):
    planned = time_of(
        path,
        HARDWARE.gpus_alone("h100-80gb", 1),
        rollout={
            "group_size": 8,
            "groups_per_step": prompts // 8,
            "max_turns": 1,
            "max_turn_tokens": tokens,
            "max_trajectory_tokens": tokens + 16,
            "concurrency": 1024,
        },
        engine={"kind": "vllm", "max_batch_size": 1024, "gpu_memory_utilization": 0.9},
    )
    assert 0.5 < planned.of("sample") / (prompts * tokens / per_s) < 2


def test_a_push_of_3_gb_over_nvlink_takes_a_fifth_of_a_second():
    recipe = recipe_of("Qwen/Qwen2.5-1.5B", engine={"kind": "vllm_server"})
    machine = HARDWARE.machine("p5.48xlarge")
    seconds, words = push_seconds(plan_on(recipe, facts_of("Qwen/Qwen2.5-1.5B"), machine), machine)
    assert seconds == pytest.approx(0.2, abs=0.03)
    assert words.startswith("3.09 GB at 22 GB/s")


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({"engine": {"kind": "vllm"}, "weight_sync": {"mode": "single_copy"}}, 0.0),
        ({"engine": {"kind": "vllm"}, "weight_sync": {"mode": "in_process"}}, 0.01),
        ({"engine": {"kind": "vllm_server"}, "model": {"lora": {"rank": 16}}}, 0.2),
        ({"engine": {"kind": "vllm_server"}, "weight_sync": {"mode": "restart"}}, 130.0),
    ],
)
def test_what_a_push_takes_by_mode(sections, most):
    recipe = recipe_of("Qwen/Qwen2.5-1.5B", **sections)
    machine = HARDWARE.machine("p5.48xlarge")
    seconds, _ = push_seconds(plan_on(recipe, facts_of("Qwen/Qwen2.5-1.5B"), machine), machine)
    assert 0.9 * most <= seconds <= most or seconds <= most < 1


def test_ranks_that_have_their_own_layers_sum_less():
    """Two groups of two sum half of the layers, and all of the rest, where four copies sum everything."""
    machine, servers = HARDWARE.machine("g5.48xlarge"), {"kind": "vllm_server"}
    copies = time_of("Qwen/Qwen2.5-3B", machine, engine=servers, trainer={"num_ranks": 4, "parallel": "ddp"}).of("train")
    cut = {"num_ranks": 4, "parallel": "ddp", "tensor_ranks": 2}
    layers = time_of("Qwen/Qwen2.5-3B", machine, engine=servers, trainer=cut).of("train")
    parts = time_of("Qwen/Qwen2.5-3B", machine, engine=servers, trainer={"num_ranks": 4, "parallel": "zero1"}).of("train")
    assert layers < copies < parts, "the last gather new weights besides"


def test_what_makes_a_step_faster():
    machine = HARDWARE.machine("p4de.24xlarge")
    servers = {"kind": "vllm_server"}
    one = time_of("Qwen/Qwen2.5-3B", machine, engine=servers)
    assert time_of("Qwen/Qwen2.5-3B", machine, engine=servers, trainer={"num_ranks": 4}).of("train") < one.of("train") / 3
    assert time_of("Qwen/Qwen2.5-3B", machine, engine=servers | {"num_servers": 4}).of("prompts") < one.of("prompts") / 3
    assert time_of("Qwen/Qwen2.5-3B", machine, engine=servers | {"num_servers": 4}).of("sample") < one.of("sample")
    assert time_of("Qwen/Qwen2.5-3B", machine, engine=servers, trainer={"activations": "full"}).of("train") > one.of("train")
    assert time_of("Qwen/Qwen2.5-3B", machine, engine=servers, fill=0.25).seconds < one.seconds / 2
    slow = HARDWARE.machine("g5.48xlarge")
    assert time_of("Qwen/Qwen2.5-3B", slow, engine=servers).seconds > one.seconds


def test_short_rows_are_held_up_by_launching():
    machine = HARDWARE.gpus_alone("h200", 1)
    rollout = {"max_trajectory_tokens": 512, "max_turn_tokens": 64}
    long = time_of("builtin:smollm2", machine, engine={"kind": "vllm"}, rollout=rollout, trainer={"row_tokens": 16384})
    short = time_of("builtin:smollm2", machine, engine={"kind": "vllm"}, rollout=rollout, trainer={"row_tokens": 512})
    assert short.of("train") > 10 * long.of("train")
    assert "to launch" in next(part.formula for part in short.parts if part.name == "train")


def test_utilisation_stays_within_what_was_measured():
    assert utilisation(1e6) == 0.25
    assert utilisation(1e12) == 0.51
    assert 0.37 < utilisation(1e9) < 0.48


def test_a_token_passes_some_experts():
    facts = facts_of("mistralai/Mixtral-8x7B-v0.1")
    assert 12e9 < active_parameters(facts) < 13e9
    dense = facts_of("Qwen/Qwen2.5-7B")
    assert active_parameters(dense) == dense.layer_weights


def test_seven_and_one_is_worse_where_rollouts_take_most_of_a_step():
    machine, facts = HARDWARE.machine("p4de.24xlarge"), facts_of("Qwen/Qwen2.5-1.5B")
    recipe = recipe_of(
        "Qwen/Qwen2.5-1.5B",
        trainer={"num_ranks": 7},
        engine={"kind": "vllm_server"},
        rollout={"groups_per_step": 64, "group_size": 16, "max_turns": 8, "max_turn_tokens": 512},
    )
    found = splits(recipe, facts, machine)
    by_name = {split.name: split for split in found}
    assert [split.name for split in found if split.planned] == ["7 + 1"]
    assert by_name["6 + 2"].time.seconds < by_name["7 + 1"].time.seconds
    own = step_time(plan_on(recipe, facts, machine), machine)
    best = better(found, own, fits=True)
    assert best is not None
    assert best.fits
    assert best.time.seconds == min(split.time.seconds for split in found if split.fits)
    assert any(line.startswith(f"faster: {best.name}, with ") for line in split_lines(found, best, machine))


def test_seven_and_one_is_best_of_the_separate_splits_where_training_takes_most():
    machine, facts = HARDWARE.machine("p4de.24xlarge"), facts_of("Qwen/Qwen2.5-1.5B")
    recipe = recipe_of(
        "Qwen/Qwen2.5-1.5B",
        trainer={"num_ranks": 7, "num_iterations": 4},
        engine={"kind": "vllm_server"},
        rollout={"groups_per_step": 32, "max_turns": 2, "max_turn_tokens": 64, "max_trajectory_tokens": 8192},
    )
    separate = [split for split in splits(recipe, facts, machine) if "shared" not in split.name]
    assert min(separate, key=lambda split: split.time.seconds).name in ("7 + 1", "6 + 2")
    by_name = {split.name: split.time.seconds for split in separate}
    assert by_name["7 + 1"] < by_name["4 + 4"]


def test_one_gpu_has_no_splits():
    recipe = recipe_of("Qwen/Qwen2.5-0.5B", engine={"kind": "vllm"})
    assert splits(recipe, facts_of("Qwen/Qwen2.5-0.5B"), HARDWARE.gpus_alone("h200", 1)) == ()


def test_money_by_hand():
    recipe = recipe_of("Qwen/Qwen2.5-1.5B", trainer={"num_ranks": 7}, engine={"kind": "vllm_server"})
    machine = HARDWARE.machine("ml.p4d.24xlarge").times(2)
    plan = plan_on(recipe, facts_of("Qwen/Qwen2.5-1.5B"), machine)
    time = step_time(plan, machine)
    cost = cost_of(plan, machine, time, num_tasks=1000)
    assert cost.price_per_hour == pytest.approx(2 * 25.25)
    assert cost.per_100_steps == pytest.approx(50.5 * time.seconds / 36)
    assert cost.steps_per_epoch == 63
    assert cost.hours_per_epoch == pytest.approx(63 * time.seconds / 3600)
    assert cost.epoch == pytest.approx(63 * time.seconds / 3600 * 50.5)
    assert cost.whole_run == pytest.approx(50.5 * (100 * time.seconds + 4 * cost.checkpoint_wait_s + cost.export_s) / 3600)
    assert cost.state_bytes == pytest.approx(14 * plan.facts.parameters, rel=0.001)
    assert cost.checkpoints == {"disk": (25, 3)}
    assert cost.checkpoint_wait_s == pytest.approx(cost.state_bytes / 2e10)
    said = "\n".join(cost_lines(cost, steps=100, num_tasks=1000))
    assert "$50.50 an hour (list price of 2026-01-21, on demand)" in said
    assert "An epoch of 1,000 tasks is 63 steps" in said
    assert "Spot: " in said


@pytest.mark.parametrize(
    ("sections", "bytes_each", "tiers"),
    [
        ({}, 14, {"disk": (25, 3)}),
        ({"checkpoint": {"contents": "model"}}, 6, {"disk": (25, 3)}),
        ({"trainer": {"num_ranks": 2, "parallel": "fsdp2"}}, 14, {"disk": (25, 3)}),
        ({"trainer": {"num_ranks": 2, "parallel": "zero1"}}, 14, {"disk": (25, 3)}),
        (
            {"checkpoint": {"every": {"memory": 1, "disk": 10}, "url": "s3://bucket/x"}},
            14,
            {"memory": (1, 1), "disk": (10, 3), "s3": (10, 3)},
        ),
        ({"checkpoint": {"every": {"disk": None}}}, 14, {}),
    ],
    ids=str,
)
def test_checkpoints_by_hand(sections, bytes_each, tiers):
    machine = HARDWARE.gpus_alone("h200", 4)
    recipe = recipe_of("Qwen/Qwen2.5-1.5B", **{"engine": {"kind": "vllm_server"}} | sections)
    plan = plan_on(recipe, facts_of("Qwen/Qwen2.5-1.5B"), machine)
    cost = cost_of(plan, machine, step_time(plan, machine))
    assert cost.state_bytes == pytest.approx(bytes_each * plan.facts.parameters, rel=0.001)
    assert cost.checkpoints == tiers
    said = "\n".join(cost_lines(cost, steps=100, num_tasks=None))
    if tiers:
        every, kept = tiers["disk"]
        assert f"to disk every {every} steps ({kept} kept: {kept * cost.state_bytes / GIB:,.1f} GiB)" in said
    else:
        assert "There are no checkpoints (checkpoint.every is null in all tiers)" in said


def test_a_checkpoint_of_adapters_holds_adapters_alone():
    machine = HARDWARE.gpus_alone("h200", 1)
    recipe = recipe_of("Qwen/Qwen2.5-1.5B", model={"path": "Qwen/Qwen2.5-1.5B", "lora": {"rank": 16}}, engine={"kind": "hf"})
    plan = plan_on(recipe, facts_of("Qwen/Qwen2.5-1.5B"), machine)
    cost = cost_of(plan, machine, step_time(plan, machine))
    numbers = 28 * 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 2 * (1536 + 8960) + (8960 + 1536))
    assert cost.state_bytes == pytest.approx(14 * numbers, rel=0.001)


def test_no_price_is_said():
    machine = HARDWARE.gpus_alone("h200", 1)
    plan = plan_on(recipe_of("Qwen/Qwen2.5-0.5B", engine={"kind": "vllm"}), facts_of("Qwen/Qwen2.5-0.5B"), machine)
    cost = cost_of(plan, machine, step_time(plan, machine))
    assert (cost.per_100_steps, cost.whole_run, cost.epoch) == (None, None, None)
    assert cost_lines(cost, steps=100, num_tasks=None)[0].startswith("No price of this machine is known")
