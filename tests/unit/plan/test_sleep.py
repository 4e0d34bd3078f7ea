"""An engine that sleeps while the trainer works: what a plan counts, when `auto` comes to it, and what is refused."""

from __future__ import annotations

import pytest

from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.auto_sleep import sleep_on
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import Gpu, Machine
from polyturn.plan.models import model_facts
from polyturn.plan.nearest_fit import nearest_fit
from polyturn.plan.planner import GIB, GpuPlan, Plan

FACTS = model_facts("qwen2.5-1.5b")


def machine(gib: float, ram_gib: float = 500.0) -> Machine:
    gpu = Gpu(label_gib=gib, usable_mib=gib * 1024, bf16_tflops=989, bandwidth_gb_s=3350)
    return Machine(name="box", gpu_name="mine", gpu=gpu, count=1, ram_bytes=ram_gib * GIB)


def recipe(sleep: str = "auto", *, mode: str = "auto", every_steps: int = 1, share: float = 0.6, **engine) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"steps": 2},
            "model": {"path": "qwen2.5-1.5b", "dtype": "bfloat16"},
            "environment": {"id": "lookup"},
            "engine": {"kind": "vllm", "gpu_memory_utilization": share, "sleep": sleep} | engine,
            "weight_sync": {"mode": mode, "every_steps": every_steps},
            "evaluation": {"episodes": 0},
        }
    )


def gpu_of(plan: Plan) -> GpuPlan:
    (found,) = plan.gpus
    return found


def phases(plan: Plan) -> dict[str, str]:
    return {term.name: term.phase for term in gpu_of(plan).terms}


def test_what_is_given_back_is_there_while_it_generates_only():
    for mode in ("single_copy", "in_process"):
        asleep = phases(plan_on(recipe("on", mode=mode), FACTS, machine(100)))
        awake = phases(plan_on(recipe("off", mode=mode), FACTS, machine(100)))
        shared = mode == "single_copy"
        for name in ("KV cache", "engine activations"):
            assert (awake[name], asleep[name]) == ("always", "generating")
        assert asleep["engine weights"] == ("always" if shared else "generating")
        assert asleep["CUDA graphs"] == asleep["engine non-torch"] == "always"


def test_the_worst_moment_is_the_larger_of_both_phases():
    plan = plan_on(recipe("on", mode="in_process"), FACTS, machine(100))
    by_phase: dict[str, float] = {}
    for term in gpu_of(plan).terms:
        by_phase[term.phase] = by_phase.get(term.phase, 0) + term.bytes
    assert plan.needed == by_phase["always"] + max(by_phase["training"], by_phase["generating"])
    off = plan_on(recipe("off", mode="in_process"), FACTS, machine(100))
    assert off.needed == pytest.approx(sum(term.bytes for term in gpu_of(off).terms))


def test_auto_comes_to_it_where_nothing_else_fits():
    small, large = machine(80), machine(140)
    chosen, why = sleep_on(recipe(), FACTS, small, num_tasks=None)
    assert chosen.engine.sleep == "on"
    assert "when it sleeps while training" in why["engine.sleep"]
    assert not plan_on(chosen, FACTS, small).problems(small)
    assert sleep_on(recipe(), FACTS, large, num_tasks=None) == (recipe(), {})
    for given in ("on", "off"):
        assert sleep_on(recipe(given), FACTS, small, num_tasks=None) == (recipe(given), {})
    tiny = machine(10)
    assert sleep_on(recipe(), FACTS, tiny, num_tasks=None)[1] == {}, "it would not help"


def test_it_is_tried_before_anything_is_computed_twice():
    assert nearest_fit(recipe("off"), FACTS, machine(49)) == ("engine.sleep=on",)


def test_weights_that_wait_in_cpu_memory_are_counted_there():
    here = machine(100)
    assert plan_on(recipe("off"), FACTS, here).host_bytes(here) == 0
    assert plan_on(recipe("on", mode="in_process"), FACTS, here).host_bytes(here) == 0, "dropped, and pushed anew"
    for words in ({"mode": "single_copy"}, {"mode": "in_process", "every_steps": 2}):
        assert plan_on(recipe("on", **words), FACTS, here).host_bytes(here) > 2 * FACTS.parameters


def test_resolved():
    found = resolve(recipe(), num_train_tasks=None, on_gpu=True)
    assert found.recipe.engine.sleep == "off"
    assert "asks for it" in found.reasons["engine.sleep"]
    assert resolve(recipe("on"), num_train_tasks=None, on_gpu=True).recipe.engine.sleep == "on"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "vllm_server"}, "computes in processes of its own"),
        ({"device": "cuda:1"}, "whose memory nobody else needs"),
        ({"kind": "hf", "gpu_memory_utilization": None}, "engine.sleep=on is a setting of vLLM"),
    ],
)
def test_refused(engine, said):
    with pytest.raises(ConfigError, match=said):
        resolve(recipe("on", **engine), num_train_tasks=None, on_gpu=True)
