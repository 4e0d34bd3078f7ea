"""Which GPU has which role, what can't be placed so, and the picture of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import load_hardware
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.models import facts_from_config
from polyturn.plan.picture import picture
from polyturn.plan.placement import refusals, seats
from polyturn.plan.planner import GIB, Plan, make_plan

HARDWARE = load_hardware()


def recipe_of(path: str = "Qwen/Qwen2.5-1.5B", **sections: dict[str, Any]) -> Recipe:
    model = {"path": path, "dtype": "bfloat16"} | sections.pop("model", {})
    return Recipe.model_validate({"run": {"steps": 10}, "model": model, "environment": {"id": "lookup"}} | sections)


def facts_of(path: str = "Qwen/Qwen2.5-1.5B"):
    return facts_from_config(CONFIGS[path], name=path)


def plan_of(path: str = "Qwen/Qwen2.5-1.5B", *, gpu: str = "a100-80gb", **sections: dict[str, Any]) -> Plan:
    return make_plan(recipe_of(path, **sections), facts_of(path), HARDWARE.gpu(gpu), gpu_name=gpu)


def roles(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(gpu.role, gpu.numbers) for gpu in plan.gpus]


def term(plan: Plan, gpu: int, name: str) -> float:
    return next(found.bytes for found in plan.gpus[gpu].terms if found.name == name)


def test_vllm_in_the_drivers_process_shares_the_trainers_gpu():
    plan = plan_of(engine={"kind": "vllm"})
    assert roles(plan) == [("trainer-0 and the engine", (0,))]
    assert plan.gpus[0].engine is not None
    assert plan.gpus[0].engine.budget == pytest.approx(0.3 * HARDWARE.gpu("a100-80gb").usable_bytes)


def test_a_device_of_its_own():
    plan = plan_of(engine={"kind": "vllm", "device": "cuda:1"})
    assert roles(plan) == [("trainer-0", (0,)), ("the engine", (1,))]
    assert plan.gpus[1].engine is not None
    assert plan.gpus[1].engine.budget == pytest.approx(0.9 * HARDWARE.gpu("a100-80gb").usable_bytes)
    assert plan.recipe.weight_sync.mode == "in_process"


def test_the_trainer_makes_room_for_an_engine_on_the_first_gpu():
    assert roles(plan_of(engine={"kind": "vllm", "device": "cuda:0"})) == [("the engine", (0,)), ("trainer-0", (1,))]


def test_servers_lie_after_the_ranks_with_as_many_gpus_as_they_have_parts():
    plan = plan_of(
        "Qwen/Qwen2.5-14B",
        engine={"kind": "vllm_server", "num_servers": 2, "tensor_parallel_size": 2},
        trainer={"num_ranks": 4},
    )
    assert roles(plan) == [("trainer-0 to trainer-3", (0, 1, 2, 3)), ("engine-0 to engine-1 on 2 GPUs each", (4, 5, 6, 7))]
    assert [seat.engine for seat in seats(plan.recipe)][4:] == [0, 0, 1, 1]


def test_servers_take_the_last_gpus_of_a_machine():
    machine = HARDWARE.machine("p4de.24xlarge")
    plan = plan_on(recipe_of(engine={"kind": "vllm_server"}), facts_of(), machine)
    assert roles(plan) == [("trainer-0", (0,)), ("engine-0", (7,))]


def test_named_gpus():
    plan = plan_of(engine={"kind": "vllm_server", "devices": [0]}, trainer={"devices": [3]})
    assert roles(plan) == [("engine-0", (0,)), ("trainer-0", (3,))]
    problems = plan.problems(HARDWARE.gpus_alone("a100-80gb", 2))
    assert problems == ("the recipe names GPU 3, and 2 x a100-80gb has 2, counted from 0",)


def test_servers_of_others_need_no_gpu_here():
    plan = plan_of(engine={"kind": "vllm_server", "urls": ["http://10.0.0.5:8000"]})
    assert roles(plan) == [("trainer-0", (0,))]


def test_a_single_copy_takes_one_copy_of_the_weights():
    two = plan_of(engine={"kind": "vllm"}, weight_sync={"mode": "in_process"})
    one = plan_of(engine={"kind": "vllm"}, weight_sync={"mode": "single_copy"})
    assert term(one, 0, "weights") == 0
    assert two.needed - one.needed == term(two, 0, "weights") == 2 * facts_of().parameters


def test_a_server_on_the_trainers_gpu_is_a_second_process_there():
    lora = {"lora": {"rank": 16}}
    shared = plan_of(
        model=lora,
        trainer={"num_ranks": 2, "devices": [0, 1]},
        engine={"kind": "vllm_server", "num_servers": 2, "devices": [0, 1]},
    )
    assert roles(shared) == [("trainer-0 to trainer-1 and engine-0 to engine-1", (0, 1))]
    alone = plan_of(model=lora, trainer={"num_ranks": 2}, engine={"kind": "vllm_server"})
    assert term(shared, 0, "CUDA context") == 2 * term(alone, 0, "CUDA context")
    assert shared.refused == ()


def refused(**sections: dict[str, Any]) -> str:
    """Why a recipe can't be planned: at once, or by its placement."""
    try:
        return " ".join(plan_of(**sections).refused)
    except ConfigError as error:
        return str(error)


def test_nccl_within_one_gpu_is_refused_with_the_reason():
    shared = {"engine": {"kind": "vllm_server", "devices": [0]}, "trainer": {"devices": [0]}}
    said = refused(**shared, weight_sync={"mode": "nccl"})
    assert "NCCL takes" in said
    assert "weight_sync.mode=single_copy, or restart" in said
    assert refused(**shared, weight_sync={"mode": "restart"}) == ""
    assert refused(**shared, weight_sync={"mode": "single_copy"}) == ""
    assert refused(**shared, model={"lora": {"rank": 8}}) == ""


def test_a_server_may_lie_beside_a_rank_that_sends_nothing():
    two = {"num_ranks": 2, "parallel": "fsdp2", "devices": [0, 1]}
    plan = plan_of(engine={"kind": "vllm_server", "devices": [1]}, trainer=two, weight_sync={"mode": "nccl"})
    assert plan.refused == ()
    assert roles(plan) == [("trainer-0", (0,)), ("trainer-1 and engine-0", (1,))]
    said = refused(engine={"kind": "vllm_server", "devices": [0]}, trainer=two, weight_sync={"mode": "nccl"})
    assert "between trainer-0 and engine-0 on GPU 0" in said


def test_nccl_within_one_gpu_is_refused_by_the_placement_too():
    recipe = recipe_of(engine={"kind": "vllm_server", "devices": [0]}, trainer={"devices": [0]}, weight_sync={"mode": "nccl"})
    (said,) = refusals(recipe, facts_of())
    assert said.startswith("weight_sync.mode=nccl between trainer-0 and engine-0 on GPU 0: NCCL takes a GPU")


def test_a_server_on_the_trainers_gpu_has_its_weights_too():
    shared = {"engine": {"kind": "vllm_server", "devices": [0]}, "trainer": {"devices": [0]}}
    one, two = plan_of(**shared), plan_of(**shared, weight_sync={"mode": "restart"})
    assert one.recipe.weight_sync.mode == "single_copy"
    assert roles(one) == [("trainer-0 and engine-0", (0,))]
    assert two.needed - one.needed == term(two, 0, "weights") == 2 * facts_of().parameters
    said = refused(engine={"kind": "vllm_server"}, weight_sync={"mode": "single_copy"})
    assert "single_copy with a rank and its server on different GPUs: one copy of the weights is on one GPU" in said


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"engine": {"kind": "vllm_server", "tensor_parallel_size": 5}},
            "engine.tensor_parallel_size=5 does not divide the 12 attention heads of Qwen/Qwen2.5-1.5B; use 4 or 6",
        ),
        ({"engine": {"kind": "vllm", "tensor_parallel_size": 2}}, "only servers of vLLM share a model"),
        ({"engine": {"kind": "vllm_server", "devices": [1, 2], "tensor_parallel_size": 4}}, "has 2 GPUs for 4"),
        (
            {"trainer": {"devices": [0, 1], "num_ranks": 3}, "engine": {"kind": "vllm_server"}},
            "[0, 1] has 2 GPUs for trainer.num_ranks=3",
        ),
    ],
)
def test_what_can_not_be_placed(sections, sentence):
    said = " ".join(refusals(recipe_of(**sections), facts_of()))
    assert sentence in said


def test_a_push_that_can_not_be_had_is_refused_and_the_rest_is_planned():
    plan = plan_of(
        "Qwen/Qwen2.5-14B",
        trainer={"num_ranks": 2},
        engine={"kind": "vllm_server", "tensor_parallel_size": 2},
        weight_sync={"mode": "single_copy"},
    )
    (said,) = plan.refused
    assert "trainer.tensor_ranks=1 and engine.tensor_parallel_size=2; use nccl, or the same for both" in said
    assert plan.recipe.weight_sync.mode == "nccl"
    assert plan.num_gpus == 4


def test_ranks_that_share_the_layers_of_a_server_s_parts():
    """Each rank has its half of the layers once, and embedding and head twice: its own, whole, and the part of its worker."""
    placed = {"devices": [0, 1, 2, 3]}
    plan = plan_of(
        "Qwen/Qwen2.5-14B",
        trainer={"num_ranks": 4, "tensor_ranks": 2} | placed,
        engine={"kind": "vllm_server", "tensor_parallel_size": 2, "num_servers": 2} | placed,
        weight_sync={"mode": "single_copy"},
    )
    facts = facts_of("Qwen/Qwen2.5-14B")
    assert plan.refused == ()
    assert plan.recipe.trainer.parallel == "ddp"
    assert [(seat.rank, seat.engine) for seat in plan.seats] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert term(plan, 0, "weights") == 2 * (facts.embedding + facts.head)
    masters = facts.parameters - facts.layer_weights / 2
    assert term(plan, 0, "master weights") == pytest.approx(4 * masters, rel=1e-3)
    with pytest.raises(StopIteration):
        term(plan, 0, "gathered weights")


def test_ranks_that_share_the_state_of_the_optimizer():
    two = {"num_ranks": 2}
    copies, parts = (plan_of(trainer=two | {"parallel": kind}) for kind in ("ddp", "zero1"))
    for name in ("weights", "gradients", "activations"):
        assert term(parts, 0, name) == term(copies, 0, name)
    for name in ("master weights", "optimizer state"):
        assert term(parts, 0, name) == pytest.approx(term(copies, 0, name) / 2, rel=1e-6)
    plain = {"parallel": "zero1", "master_weights": "none"}
    assert term(plan_of(trainer=two | plain), 0, "master weights") == facts_of().parameters, "2 bytes of every second row"


def test_a_model_too_large_for_one_gpu_is_served_by_two():
    one = plan_of("Qwen/Qwen2.5-72B", engine={"kind": "vllm_server"})
    four = plan_of("Qwen/Qwen2.5-72B", engine={"kind": "vllm_server", "tensor_parallel_size": 4})
    assert any("leave no room for a KV cache" in said for said in one.short_contexts())
    assert four.short_contexts() == ()


def test_an_engine_that_can_not_hold_a_trajectory():
    plan = plan_of(
        "Qwen/Qwen2.5-7B",
        gpu="a100-40gb",
        engine={"kind": "vllm_server", "gpu_memory_utilization": 0.85},
        rollout={"max_trajectory_tokens": 131_072},
    )
    (said,) = plan.short_contexts()[-1:]
    assert said.startswith("engine-0: a context of 131,072 tokens needs 7.00 GiB of KV cache")
    fits = plan_of(
        "Qwen/Qwen2.5-7B",
        gpu="a100-40gb",
        engine={"kind": "vllm_server", "gpu_memory_utilization": 0.85},
        rollout={"max_trajectory_tokens": 8192},
    )
    assert fits.short_contexts() == ()


def test_a_limit_shorter_than_a_trajectory():
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=1000: vLLM must hold a whole trajectory"):
        plan_of(engine={"kind": "vllm", "max_model_len": 1000})


def test_a_server_lies_on_one_node():
    plan = plan_of("Qwen/Qwen2.5-72B", engine={"kind": "vllm_server", "tensor_parallel_size": 8})
    machine = HARDWARE.machine("g5.12xlarge").times(4)
    assert any("a server lies on one node" in said for said in plan.problems(machine))


def test_the_picture_has_every_gpu_of_the_machine():
    machine = HARDWARE.machine("p4de.24xlarge")
    plan = plan_on(recipe_of(engine={"kind": "vllm_server"}, trainer={"num_ranks": 6}), facts_of(), machine)
    shown = picture(plan, machine)
    assert len([line for line in shown if line.lstrip().startswith("GPU ")]) == 8
    assert shown[1].endswith("trainer-0")
    assert shown[7].endswith("free")
    assert shown[8].endswith("engine-0")
    assert shown[-1].startswith("weight_sync.mode=nccl, because the engine is in processes of its own")


def test_the_picture_of_several_nodes_names_them():
    plan = plan_of(engine={"kind": "vllm_server"}, trainer={"num_ranks": 7})
    shown = picture(plan, HARDWARE.machine("g5.12xlarge").times(2))
    assert "node 0 GPU 0" in shown[1]
    assert "node 1 GPU 7" in shown[8]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["hf", "hf_server", "vllm", "vllm_server"]),
    ranks=st.integers(1, 8),
    servers=st.integers(1, 4),
    parts=st.sampled_from([1, 2, 4]),
)
def test_every_rank_and_every_part_of_an_engine_has_a_seat(kind, ranks, servers, parts):
    recipe = recipe_of(
        engine={"kind": kind, "num_servers": servers, "tensor_parallel_size": parts}, trainer={"num_ranks": ranks}
    )
    found = seats(recipe)
    assert sorted(seat.rank for seat in found if seat.rank is not None) == list(range(ranks))
    engines = [seat.engine for seat in found if seat.engine is not None]
    parts = parts if kind == "vllm_server" else 1
    count = servers if kind.endswith("_server") else 1
    assert sorted(engines) == sorted(number for number in range(count) for _ in range(parts))
    assert any(seat.shared for seat in found) == (not kind.endswith("_server"))


def test_more_parts_hold_less_each():
    facts, gpu = facts_of("Qwen/Qwen2.5-14B"), HARDWARE.gpu("a100-80gb")

    def weights(parts: int) -> float:
        recipe = recipe_of("Qwen/Qwen2.5-14B", engine={"kind": "vllm_server", "tensor_parallel_size": parts})
        engine = make_plan(recipe, facts, gpu).gpus[1].engine
        assert engine is not None
        return engine.weights

    assert weights(1) > 27 * GIB
    assert weights(2) == pytest.approx(weights(1) / 2, rel=0.02)
    assert weights(4) == pytest.approx(weights(1) / 4, rel=0.04)
