"""Who shares a GPU, what does not fit and why, and that what is offered in its place does fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.config.schema import Recipe
from polyturn.config.yaml_lines import parse_yaml
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settle
from polyturn.plan.changes import changed, plan_on
from polyturn.plan.hardware import Machine, load_hardware
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.models import facts_from_config
from polyturn.plan.nearest_fit import nearest_fit, smallest_gpu
from polyturn.plan.planner import HOST, PINNED, Plan, make_plan
from polyturn.plan.report import verdict_lines
from polyturn.plan.study import study

HARDWARE = load_hardware()


def recipe_of(path: str, **sections: dict[str, Any]) -> Recipe:
    model = {"path": path, "dtype": "bfloat16"} | sections.pop("model", {})
    return Recipe.model_validate({"run": {"steps": 10}, "model": model, "environment": {"id": "lookup"}} | sections)


def facts_of(path: str):
    return facts_from_config(CONFIGS[path], name=path)


def plan_of(path: str, **sections: dict[str, Any]) -> Plan:
    return make_plan(recipe_of(path, **sections), facts_of(path))


def applied(recipe: Recipe, overrides: tuple[str, ...]) -> Recipe:
    """The recipe with overrides as the command line would take them."""
    pairs = (override.split("=", 1) for override in overrides)
    return changed(recipe, {key: parse_yaml(value).data if value[0] != "[" else (0,) for key, value in pairs})


def test_an_engine_in_the_drivers_process_shares_its_gpu():
    plan = plan_of("Qwen/Qwen2.5-3B", trainer={"num_ranks": 3})
    assert [(gpu.role, gpu.count) for gpu in plan.gpus] == [("trainer-0 and the engine", 1), ("trainer-1 to trainer-2", 2)]
    assert plan.gpus[0].needed > plan.gpus[1].needed
    assert plan.num_gpus == 3


@pytest.mark.parametrize("kind", ["vllm", "vllm_server"])
def test_where_no_gpu_is_named_an_engine_is_as_large_as_its_context_asks(kind):
    plan = plan_of("Qwen/Qwen2.5-3B", engine={"kind": kind}, rollout={"max_trajectory_tokens": 4096})
    assert any(gpu.engine is not None for gpu in plan.gpus)
    assert plan.short_contexts() == ()


def test_servers_have_gpus_of_their_own():
    plan = plan_of("Qwen/Qwen2.5-3B", trainer={"num_ranks": 7}, engine={"kind": "hf_server"})
    assert [(gpu.role, gpu.count) for gpu in plan.gpus] == [("trainer-0 to trainer-6", 7), ("engine-0", 1)]
    assert not any("engine" in term.name or term.phase == "generating" for term in plan.gpus[0].terms)
    assert not any(term.phase == "training" for term in plan.gpus[1].terms)


def test_training_and_generating_share_memory():
    plan = plan_of("Qwen/Qwen2.5-3B")
    (gpu,) = plan.gpus
    sums = {phase: sum(t.bytes for t in gpu.terms if t.phase == phase) for phase in ("always", "training", "generating")}
    assert gpu.needed == sums["always"] + max(sums["training"], sums["generating"])


def test_more_servers_hold_fewer_sequences_each():
    one = plan_of("Qwen/Qwen2.5-3B", engine={"kind": "hf_server"})
    four = plan_of("Qwen/Qwen2.5-3B", engine={"kind": "hf_server", "num_servers": 4})
    assert four.gpus[1].needed < one.gpus[1].needed


def test_too_few_gpus():
    recipe = recipe_of("Qwen/Qwen2.5-0.5B", trainer={"num_ranks": 8}, engine={"kind": "hf_server"})
    machine, facts = HARDWARE.machine("p4de.24xlarge"), facts_of("Qwen/Qwen2.5-0.5B")
    problems = make_plan(recipe, facts).problems(machine)
    assert problems[0] == "the run needs 9 GPUs, one for each rank and each part of a server; p4de.24xlarge has 8"
    assert "trainer.num_ranks=7" in (nearest_fit(recipe, facts, machine) or ())


def test_a_whole_3b_model_beside_an_engine_in_24_gib_gets_something_smaller():
    recipe, facts = recipe_of("Qwen/Qwen2.5-3B"), facts_of("Qwen/Qwen2.5-3B")
    machine = HARDWARE.machine("g5.2xlarge")
    (problem,) = make_plan(recipe, facts).problems(machine)
    assert problem.startswith("trainer-0 and the engine: ")
    overrides = nearest_fit(recipe, facts, machine)
    assert overrides
    assert make_plan(applied(recipe, overrides), facts).problems(machine) == ()


def test_nothing_makes_72b_fit_on_a_small_card():
    facts = facts_of("Qwen/Qwen2.5-72B")
    assert nearest_fit(recipe_of("Qwen/Qwen2.5-72B"), facts, HARDWARE.machine("g5.2xlarge")) is None


def test_a_context_longer_than_the_models():
    recipe = recipe_of("builtin:smollm2", rollout={"max_trajectory_tokens": 10_000})
    facts, machine = facts_of("builtin:smollm2"), HARDWARE.gpus_alone("b300", 1)
    assert "rollout.max_trajectory_tokens=10000: builtin:smollm2 has 8,192 positions" in make_plan(recipe, facts).problems(
        machine
    )
    assert "rollout.max_trajectory_tokens=8192" in (nearest_fit(recipe, facts, machine) or ())


@pytest.mark.parametrize("lora", [None, {"rank": 16}])
def test_a_shorter_context_is_tried_with_all_that_saves_memory(lora):
    recipe = recipe_of(
        "Qwen/Qwen2.5-7B",
        model={"lora": lora},
        engine={"kind": "vllm_server"},
        rollout={"max_trajectory_tokens": 131_072},
    )
    facts, machine = facts_of("Qwen/Qwen2.5-7B"), HARDWARE.gpus_alone("a100-40gb", 2)
    overrides = nearest_fit(recipe, facts, machine)
    assert overrides is not None
    after = applied(recipe, overrides)
    assert plan_on(after, facts, machine).problems(machine) == ()
    assert after.rollout.max_trajectory_tokens >= 16_384
    assert after.trainer.activations == "full"


def test_an_offload_needs_memory_of_the_machine_itself():
    recipe = recipe_of("Qwen/Qwen2.5-3B", trainer={"offload_optimizer": True, "activations": "full"}, engine={"kind": "vllm"})
    facts = facts_of("Qwen/Qwen2.5-3B")
    small, large, unknown = HARDWARE.machine("g5.2xlarge"), HARDWARE.machine("p5.4xlarge"), HARDWARE.gpus_alone("a10g", 1)
    assert (
        plan_on(recipe, facts, small)
        .problems(small)[-1]
        .endswith("GiB of CPU memory are needed for what the trainer keeps there, and g5.2xlarge has 32")
    )
    assert plan_on(recipe, facts, large).problems(large) == ()
    assert not any("CPU memory" in said for said in plan_on(recipe, facts, unknown).problems(unknown))
    within = recipe_of("Qwen/Qwen2.5-3B", engine={"kind": "vllm"})
    for machine in (small, unknown):
        assert "trainer.offload_optimizer=true" not in (nearest_fit(within, facts, machine) or ())


def test_an_offload_on_every_rank_of_a_node_adds_up():
    sections = {"trainer": {"offload_optimizer": True, "num_ranks": 7}, "engine": {"kind": "vllm_server"}}
    machine = HARDWARE.machine("p4d.24xlarge")
    seven = plan_on(recipe_of("Qwen/Qwen2.5-3B", **sections), facts_of("Qwen/Qwen2.5-3B"), machine)
    sections["trainer"]["num_ranks"] = 1
    one = plan_on(recipe_of("Qwen/Qwen2.5-3B", **sections), facts_of("Qwen/Qwen2.5-3B"), machine)
    assert seven.host_bytes(machine) - HOST == pytest.approx(7 * (one.host_bytes(machine) - HOST))
    assert one.host_bytes(machine) - HOST == pytest.approx(PINNED * 18 * facts_of("Qwen/Qwen2.5-3B").parameters, rel=0.01)


def test_the_smallest_gpu():
    small = recipe_of("Qwen/Qwen2.5-0.5B", trainer={"activations": "full"}, engine={"max_batch_size": 8})
    name = smallest_gpu(small, facts_of("Qwen/Qwen2.5-0.5B"), HARDWARE)
    assert name in ("a10g", "l4")
    assert smallest_gpu(recipe_of("Qwen/Qwen2.5-72B"), facts_of("Qwen/Qwen2.5-72B"), HARDWARE) is None


def test_what_was_never_measured_is_said():
    plan = plan_of("mistralai/Mixtral-8x7B-v0.1", trainer={"activations": "full"}, model={"dtype": "float32"})
    said = " ".join(plan.caveats)
    assert all(words in said for words in ("float32", "attention with a mask", "experts"))
    assert len(plan_of("Qwen/Qwen2.5-7B").caveats) == 1


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"trainer": {"device": "cpu"}}, "use trainer.device=auto"),
        ({"run": {"epochs": 2.0}}, "with --tasks N"),
        ({"trainer": {"row_tokens": 100}}, "a row must hold a whole trajectory"),
    ],
)
def test_what_can_not_be_planned(sections, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_of("Qwen/Qwen2.5-0.5B", **sections)


def test_epochs_with_the_number_of_tasks():
    recipe = recipe_of("Qwen/Qwen2.5-0.5B", run={"epochs": 2.0})
    assert make_plan(recipe, facts_of("Qwen/Qwen2.5-0.5B"), num_tasks=160).recipe.run.steps == 20


@settings(max_examples=40, deadline=None)
@given(
    path=st.sampled_from(["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-1.7B", "builtin:smollm2"]),
    machine=st.sampled_from(["g5.2xlarge", "g6.12xlarge", "p4d.24xlarge", "p5.48xlarge"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    ranks=st.integers(1, 9),
    kind=st.sampled_from(["hf", "hf_server", "vllm", "vllm_server"]),
    context=st.sampled_from([512, 4096, 32_768]),
    parts=st.sampled_from([1, 2]),
    mode=st.sampled_from(["auto", "auto", "single_copy", "restart"]),
)
def test_what_is_offered_fits_and_all_of_it_is_needed(path, machine, dtype, ranks, kind, context, parts, mode):
    ranks = 1 if kind == "vllm" else ranks
    parts = parts if kind == "vllm_server" else 1
    recipe = recipe_of(
        path,
        model={"dtype": dtype},
        trainer={"num_ranks": ranks},
        engine={"kind": kind, "tensor_parallel_size": parts},
        weight_sync={"mode": mode if kind.startswith("vllm") and not (kind == "vllm" and mode == "restart") else "auto"},
        rollout={"max_trajectory_tokens": context},
    )
    facts, place = facts_of(path), HARDWARE.machine(machine)
    if _fits(recipe, facts, place):
        return
    overrides = nearest_fit(recipe, facts, place)
    if overrides is None:
        return
    assert _fits(applied(recipe, overrides), facts, place)
    for left_out in overrides:
        fewer = tuple(override for override in overrides if override != left_out)
        assert not _fits(applied(recipe, fewer), facts, place), f"{left_out} is not needed"


def _fits(recipe: Recipe, facts: Any, machine: Machine) -> bool:
    try:
        settled, _ = settle(recipe, facts, machine, num_tasks=None)
        return not plan_on(settled, facts, machine).problems(machine)
    except ConfigError:
        return False


@pytest.mark.parametrize(
    ("path", "machine", "sections", "wanted"),
    [
        # Four ranks hold shards of a base that two can't; the machine has the GPUs.
        (
            "Qwen/Qwen2.5-72B",
            "p5.48xlarge",
            {"trainer": {"num_ranks": 2, "row_tokens": 4096}, "engine": {"kind": "vllm_server", "tensor_parallel_size": 4}},
            {"trainer.num_ranks=4", "trainer.activations=full", "model.lora.rank=16"},
        ),
        # Adapters reach a server as files, so it can lie on the one GPU that there is.
        (
            "Qwen/Qwen2.5-3B",
            "g5.2xlarge",
            {"model": {"lora": {"rank": 16}}, "engine": {"kind": "vllm_server"}},
            {"trainer.devices=[0]", "engine.devices=[0]"},
        ),
        # What the recipe asks to generate with does not fit in any size; what would be suggested for that machine does.
        (
            "Qwen/Qwen2.5-32B",
            "g6e.48xlarge",
            {"trainer": {"num_ranks": 2}, "engine": {"kind": "hf_server"}},
            {"engine.kind=vllm_server", "engine.tensor_parallel_size=4", "model.lora.rank=16"},
        ),
    ],
)
def test_placements_that_a_machine_has_room_for_are_offered(path, machine, sections, wanted):
    """`nothing known makes it fit` was said of all, and of the second a machine with as large a GPU was named."""
    recipe = recipe_of(path, **({"rollout": {"max_trajectory_tokens": 1024}} | sections))
    found = study(recipe, facts_of(path), HARDWARE, HARDWARE.machine(machine))
    assert not found.verdict.fits
    assert wanted <= set(found.verdict.overrides)


def test_the_smallest_gpu_is_that_of_what_would_run_there():
    """Shards come by themselves where whole copies don't fit, so they count."""
    recipe = recipe_of("Qwen/Qwen2.5-3B", trainer={"num_ranks": 7, "row_tokens": 4096}, engine={"kind": "vllm_server"})
    facts = facts_of("Qwen/Qwen2.5-3B")
    assert smallest_gpu(recipe, facts, HARDWARE) == "a100-40gb"
    assert smallest_gpu(changed(recipe, {"trainer.parallel": "ddp"}), facts, HARDWARE) == "a100-80gb"
    found = study(recipe, facts, HARDWARE, None)
    assert (
        "GiB with whole copies (a smaller GPU gets shards); the smallest" in verdict_lines(found.plan, None, found.verdict)[-1]
    )


@pytest.mark.parametrize(
    ("budget", "where"), [(10.0, "the cheapest machine on which it fits: "), (0.5, "no machine of that price")]
)
def test_a_machine_that_costs_too_much_is_not_said_to_be_too_small(budget, where):
    recipe = recipe_of("Qwen/Qwen2.5-3B", trainer={"num_ranks": 7, "row_tokens": 4096}, engine={"kind": "vllm_server"})
    machine = HARDWARE.machine("p4d.24xlarge")
    found = study(recipe, facts_of("Qwen/Qwen2.5-3B"), HARDWARE, machine, budget=budget)
    lines = verdict_lines(found.plan, machine, found.verdict)
    assert not found.verdict.fits
    assert lines[:2] == [
        f"too dear: --budget-per-hour={budget:g}: p4d.24xlarge costs $21.96 an hour",
        "the GPUs of p4d.24xlarge are large enough",
    ]
    assert lines[2].startswith(where)
    assert found.verdict.elsewhere is None or found.verdict.elsewhere.machine.total_price <= budget
