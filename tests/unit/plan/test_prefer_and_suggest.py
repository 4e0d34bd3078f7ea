"""What `--prefer` moves fits and goes the way it was asked to; what `--suggest` names fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settle
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import load_hardware
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.models import facts_from_config
from polyturn.plan.planner import GIB
from polyturn.plan.prefer import prefer
from polyturn.plan.report import suggestion_objects
from polyturn.plan.speed import step_time
from polyturn.plan.splits import splits
from polyturn.plan.study import study
from polyturn.plan.suggest import suggest, suggestion_lines, suggestion_recipe

HARDWARE = load_hardware()


def facts_of(path: str):
    return facts_from_config(CONFIGS[path], name=path)


def recipe_of(path: str = "Qwen/Qwen2.5-3B", **sections: dict[str, Any]) -> Recipe:
    model = {"path": path, "dtype": "bfloat16"} | sections.pop("model", {})
    rollout = {"max_trajectory_tokens": 2048} | sections.pop("rollout", {})
    base = {"run": {"steps": 10}, "model": model, "environment": {"id": "lookup"}, "rollout": rollout}
    return Recipe.model_validate(base | sections)


def test_speed_is_faster_and_leaves_what_is_learned_alone():
    recipe, facts, machine = (
        recipe_of(engine={"kind": "vllm_server"}),
        facts_of("Qwen/Qwen2.5-3B"),
        HARDWARE.machine("p4de.24xlarge"),
    )
    found = prefer(recipe, facts, machine, "speed")
    settled = [settle(given, facts, machine, num_tasks=None)[0] for given in (recipe, found.recipe)]
    before, after = (plan_on(given, facts, machine) for given in settled)
    assert after.problems(machine) == ()
    assert step_time(after, machine).seconds < step_time(before, machine).seconds
    assert after.recipe.rollout == before.recipe.rollout
    assert after.recipe.trainer.optimizer == before.recipe.trainer.optimizer
    assert any("placement" in line for line in found.lines)
    assert "micro-batch" in found.lines[-1]


@pytest.mark.parametrize(("goal", "nodes"), [("speed", 1), ("speed", 3), ("memory", 1), ("quality", 1)])
def test_what_is_left_to_the_machine_is_settled_in_every_plan_that_is_compared(goal, nodes):
    """This recipe needs shards there, which `trainer.parallel=auto` comes to. Compared without them nothing fitted, so nothing
    was ever better, and numbers were said of a plan that nobody had seen."""
    engine = {"kind": "vllm_server", "gpu_memory_utilization": 0.9}
    recipe = recipe_of(trainer={"num_ranks": 7, "row_tokens": 4096}, engine=engine)
    facts, machine = facts_of("Qwen/Qwen2.5-3B"), replace(HARDWARE.machine("p4d.24xlarge"), nodes=nodes)
    assert plan_on(recipe, facts, machine).problems(machine), "whole copies don't fit"
    before = study(recipe, facts, HARDWARE, machine)
    after = study(recipe, facts, HARDWARE, machine, goal=goal)
    assert before.verdict.fits
    assert after.verdict.fits
    assert f"fullest GPU {before.plan.needed / GIB:.1f} -> {after.plan.needed / GIB:.1f} GiB" in after.preferred.lines[-1]
    if goal == "speed":
        least = min(split.time.seconds for split in before.splits if split.fits)
        assert after.time.seconds < 1.05 * least < before.time.seconds
    if goal == "memory":
        assert after.plan.needed < before.plan.needed
    if goal == "quality":
        assert after.plan.recipe.rollout.group_size == 16


@pytest.mark.parametrize("nodes", [2, 3, 16])
def test_splits_of_many_gpus_are_some_evenly_apart(nodes):
    recipe = recipe_of(trainer={"num_ranks": 7}, engine={"kind": "vllm_server"})
    facts, machine = facts_of("Qwen/Qwen2.5-3B"), replace(HARDWARE.machine("p4d.24xlarge"), nodes=nodes)
    found = splits(recipe, facts, machine)
    assert 11 <= len(found) <= 17
    engines = [int(split.name.split(" + ")[1]) for split in found]
    assert engines == sorted(set(engines))
    assert (engines[0], engines[-1] >= machine.total - machine.total // 16 - 1) == (1, True)


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_memory_takes_less(kind):
    recipe, facts, machine = recipe_of(engine={"kind": kind}), facts_of("Qwen/Qwen2.5-3B"), HARDWARE.gpus_alone("a100-40gb", 1)
    found = prefer(recipe, facts, machine, "memory")
    before, after = (plan_on(given, facts, machine) for given in (recipe, found.recipe))
    assert after.needed < before.needed
    assert "trainer.activations=full" in found.changes
    assert after.short_contexts() == ()


def test_quality_has_more_siblings_and_a_longer_context_as_far_as_it_fits():
    recipe = recipe_of(trainer={"optimizer": "adamw_8bit"}, engine={"kind": "vllm_server"})
    facts, machine = facts_of("Qwen/Qwen2.5-3B"), HARDWARE.machine("p5.48xlarge")
    found = prefer(recipe, facts, machine, "quality")
    assert plan_on(found.recipe, facts, machine).problems(machine) == ()
    assert found.recipe.rollout.group_size == 16
    assert found.recipe.rollout.max_trajectory_tokens > 2048
    assert found.recipe.trainer.optimizer == "adamw"


def test_quality_stays_within_what_fits():
    engine, trainer = {"kind": "vllm_server", "devices": [0], "gpu_memory_utilization": 0.4}, {"devices": [0]}
    recipe, facts = recipe_of(model={"lora": {"rank": 16}}, engine=engine, trainer=trainer), facts_of("Qwen/Qwen2.5-3B")
    machine = HARDWARE.gpus_alone("a10g", 1)
    found = prefer(recipe, facts, machine, "quality")
    fitting = plan_on(found.recipe, facts, machine)
    assert found.changes == () or fitting.problems(machine) == ()


def test_nothing_to_move_is_said():
    facts, machine = facts_of("Qwen/Qwen2.5-72B"), HARDWARE.gpus_alone("a10g", 1)
    found = prefer(recipe_of("Qwen/Qwen2.5-72B", engine={"kind": "vllm"}), facts, machine, "speed")
    assert found.changes == ()
    assert "nothing known makes it fit" in found.lines[0]


def test_suggestions_fit_and_the_cheapest_comes_first():
    recipe, facts = suggestion_recipe("Qwen/Qwen2.5-7B", context=4096, group_size=8), facts_of("Qwen/Qwen2.5-7B")
    found = suggest(recipe, facts, HARDWARE)
    prices = [one.machine.total_price for one in found]
    assert prices == sorted(prices)
    assert all(one.plan.problems(one.machine) == () for one in found)
    assert all(one.machine.price is not None for one in found)
    assert {one.machine.name for one in found} >= {"p4d.24xlarge", "p5.48xlarge"}
    shown = suggestion_lines(found, facts, recipe, none="")
    assert len(shown) >= len(found) + 4
    assert suggestion_objects(found)[0]["machine"]["name"] == found[0].machine.name


def test_a_budget_leaves_out_what_costs_more():
    recipe, facts = suggestion_recipe("Qwen/Qwen2.5-7B", context=4096, group_size=8), facts_of("Qwen/Qwen2.5-7B")
    found = suggest(recipe, facts, HARDWARE, budget=10)
    assert found
    assert all(one.machine.total_price <= 10 for one in found)
    assert suggest(recipe, facts, HARDWARE, budget=0.5) == ()
    assert suggestion_lines((), facts, recipe, none="none of them")[-1] == "none of them"


def test_13_billion_and_up_are_not_served_by_one_small_gpu():
    facts = facts_of("Qwen/Qwen2.5-14B")
    found = suggest(suggestion_recipe("Qwen/Qwen2.5-14B", context=4096, group_size=8), facts, HARDWARE)
    small = [one for one in found if one.machine.gpu_name in ("a10g", "l4")]
    assert all("TP" in one.placement for one in small)


@pytest.mark.parametrize(("context", "group_size"), [(1, 8), (10**9, 8), (4096, 1), (4096, 10**6)])
def test_absurd_suggestions(context, group_size):
    with pytest.raises(ConfigError, match="give"):
        suggestion_recipe("Qwen/Qwen2.5-7B", context=context, group_size=group_size)


def test_adapters_of_a_small_model_find_a_small_card():
    """22 GiB hold both when the engine has 45 % of them, and neither with 30 nor with 50."""
    recipe = suggestion_recipe("Qwen/Qwen2.5-3B", context=4096, group_size=8)
    found = suggest(recipe, facts_of("Qwen/Qwen2.5-3B"), HARDWARE)
    assert found[0].machine.gpu_name == "l4"
    assert found[0].machine.total == 1
    assert "engine.gpu_memory_utilization=0.45" in found[0].overrides


def test_shards_are_suggested_where_whole_copies_don_t_fit():
    recipe = suggestion_recipe("Qwen/Qwen2.5-72B", context=1024, group_size=8)
    kinds = [one.machine.gpu_name for one in suggest(recipe, facts_of("Qwen/Qwen2.5-72B"), HARDWARE)]
    assert kinds[0] == "a100-80gb"
    assert "h100-80gb" in kinds
