"""Which GPUs there are without asking torch, and who gets which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.launch.gpus import Placement, place
from polyturn.processes.gpus import visible_gpus


def recipe(**sections):
    base = {"model": {"path": "builtin:tiny"}, "environment": {"id": "lookup"}}
    return Recipe.model_validate(base | sections)


def served(num_ranks=1, num_servers=1, device="auto", devices=None, engine_devices=None):
    trainer = {"num_ranks": num_ranks, "device": device, "devices": devices}
    return recipe(trainer=trainer, engine={"kind": "hf_server", "num_servers": num_servers, "devices": engine_devices})


# ── what is visible ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("2,-1,0", ["2"]),
        ("GPU-8f3e,MIG-77", ["GPU-8f3e", "MIG-77"]),
    ],
)
def test_the_callers_choice_counts(value, names):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, smi="/nowhere/nvidia-smi") == names


def program(tmp_path, text):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_drivers_tool_is_asked(tmp_path):
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n  MIG 3g.71gb Device 0: (UUID: MIG-2)\\nGPU 1: NVIDIA H200 (UUID: GPU-3)\\n"
    assert visible_gpus({}, root=tmp_path, smi=program(tmp_path, f"printf '{listed}'")) == ["0", "1"]


def test_without_the_tool_the_drivers_files_are_counted(tmp_path):
    fails = program(tmp_path, "echo 'No devices were found'; exit 6")
    assert visible_gpus({}, root=tmp_path, smi=fails) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, root=tmp_path, smi=fails) == ["0", "1"]
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert visible_gpus({}, root=tmp_path, smi="/nowhere/nvidia-smi") == ["0", "1", "2"]


# ── who gets which ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "gpus", "trainer", "engines"),
    [
        ({}, ["0", "1"], ["0"], ["1"]),
        ({"num_ranks": 2, "num_servers": 2}, ["0", "1", "2", "3", "4", "5"], ["0", "1"], ["4", "5"]),
        ({"num_ranks": 2, "num_servers": 1}, ["7", "5", "3"], ["7", "5"], ["3"]),
        ({"devices": [1]}, ["0", "1"], ["1"], ["0"]),
        ({"engine_devices": [0]}, ["0", "1"], ["1"], ["0"]),
        ({"devices": [2], "engine_devices": [0]}, ["GPU-a", "GPU-b", "GPU-c"], ["GPU-c"], ["GPU-a"]),
        ({"device": "cuda"}, ["4", "5"], ["4"], ["5"]),
        ({"device": "cpu"}, ["0", "1"], [], []),
        ({"num_ranks": 8, "num_servers": 8}, [], [], []),
    ],
)
def test_ranks_get_the_first_ones_and_engines_the_last(settings, gpus, trainer, engines):
    assert place(served(**settings), gpus) == Placement(trainer=tuple(trainer), engines=tuple(engines))


def test_an_engine_in_the_driver_needs_none():
    alone = recipe(trainer={"num_ranks": 2}, engine={"devices": [0]})
    assert place(alone, ["0", "1"]) == Placement(trainer=("0", "1"))


@pytest.mark.parametrize(
    ("settings", "num_gpus", "says"),
    [
        ({"num_ranks": 2}, 2, "trainer.num_ranks=2 and engine.num_servers=1 need 3 GPUs, one each, and 2 are visible; ask"),
        ({"devices": [0, 0], "num_ranks": 2}, 4, "trainer.devices=[0, 0] names a GPU twice; name 2 different ones"),
        ({"devices": [0], "num_ranks": 2}, 4, "trainer.devices=[0] has 1 GPUs for trainer.num_ranks=2; name one for each"),
        ({"engine_devices": [1, 2]}, 4, "engine.devices=[1, 2] has 2 GPUs for engine.num_servers=1; name one for each"),
        ({"devices": [4]}, 4, "trainer.devices=[4]: there is no GPU 4; 4 are visible, counted from 0"),
        ({"engine_devices": [-1]}, 4, "engine.devices=[-1]: there is no GPU -1; 4 are visible, counted from 0"),
        ({"devices": [1], "engine_devices": [1]}, 4, "trainer.devices=[1] and engine.devices=[1] share GPU 1; each needs one"),
        ({"devices": [0]}, 0, "trainer.devices=[0] but no GPU is visible; remove one of the two"),
        ({"engine_devices": [0], "device": "cpu"}, 2, "engine.devices=[0] but trainer.device=cpu; remove one of the two"),
        ({"device": "cuda"}, 0, "trainer.device=cuda but no GPU is visible; use auto or cpu"),
        ({"device": "cuda:1"}, 2, "set trainer.device=cuda and trainer.devices=[1]"),
    ],
)
def test_what_can_not_be_given_out_is_refused_in_a_sentence(settings, num_gpus, says):
    with pytest.raises(ConfigError) as refused:
        place(served(**settings), [str(number) for number in range(num_gpus)])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.data())
def test_nobody_shares_a_gpu(data):
    num_ranks, num_servers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    gpus = [f"GPU-{number}" for number in range(num_ranks + num_servers + data.draw(st.integers(0, 2)))]
    order = data.draw(st.permutations(range(len(gpus))))
    devices = order[:num_ranks] if data.draw(st.booleans()) else None
    engine_devices = order[num_ranks : num_ranks + num_servers] if data.draw(st.booleans()) else None
    placed = place(served(num_ranks, num_servers, devices=devices, engine_devices=engine_devices), gpus)
    given_out = [*placed.trainer, *placed.engines]
    assert (len(placed.trainer), len(placed.engines)) == (num_ranks, num_servers)
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= set(gpus)
    assert devices is None or [gpus[number] for number in devices] == list(placed.trainer)
    assert engine_devices is None or [gpus[number] for number in engine_devices] == list(placed.engines)


# ── vLLM servers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def on_vllm(mode="nccl", devices=None, **engine):
    return recipe(trainer={"devices": devices}, engine={"kind": "vllm_server"} | engine, weight_sync={"mode": mode})


@pytest.mark.parametrize(
    ("made", "gpus", "trainer", "engines"),
    [
        (on_vllm(), ["0", "1"], ["0"], ["1"]),
        (on_vllm(tensor_parallel_size=2), ["0", "1", "2", "3"], ["0"], ["2", "3"]),
        (on_vllm(num_servers=2, tensor_parallel_size=2), [*"01234"], ["0"], ["1", "2", "3", "4"]),
        (on_vllm(urls=["http://h:1"]), ["0"], ["0"], []),
        (on_vllm("restart", devices=[0]), ["0", "1"], ["0"], ["1"]),
    ],
)
def test_a_vllm_server_has_as_many_gpus_as_it_needs(made, gpus, trainer, engines):
    assert place(made, gpus) == Placement(trainer=tuple(trainer), engines=tuple(engines))


@pytest.mark.parametrize("mode", ["lora", "restart", "single_copy"])
def test_a_vllm_server_may_share_the_trainers_gpu_where_nothing_connects_them(mode):
    made = recipe(trainer={"devices": [0]}, engine={"kind": "vllm_server", "devices": [0]}, weight_sync={"mode": mode})
    assert place(made, ["5"]) == Placement(trainer=("5",), engines=("5",))


def test_a_vllm_server_may_lie_beside_a_rank_that_sends_nothing():
    made = recipe(
        trainer={"devices": [0, 1], "num_ranks": 2},
        engine={"kind": "vllm_server", "devices": [1]},
        weight_sync={"mode": "nccl"},
    )
    assert place(made, ["4", "5"]) == Placement(trainer=("4", "5"), engines=("5",))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            recipe(trainer={"devices": [0]}, engine={"kind": "vllm_server", "devices": [0]}, weight_sync={"mode": "nccl"}),
            r"share GPU 0, from which rank 0 sends, and NCCL can't connect two processes on one GPU \(weight_sync\.mode=nccl\)",
        ),
        (
            recipe(
                trainer={"devices": [1, 0], "num_ranks": 2},
                engine={"kind": "vllm_server", "devices": [1]},
                weight_sync={"mode": "nccl"},
            ),
            r"engine\.devices=\[1\] share GPU 1, from which rank 0 sends",
        ),
        (
            on_vllm("single_copy"),
            r"trainer\.devices=\[0\] and engine\.devices=\[1\]: weight_sync\.mode=single_copy is one copy",
        ),
        (
            recipe(
                trainer={"devices": [0, 1], "num_ranks": 2},
                engine={"kind": "vllm_server", "devices": [1, 0], "num_servers": 2},
                weight_sync={"mode": "single_copy"},
            ),
            r"engine\.devices=\[1, 0\]: weight_sync\.mode=single_copy is one copy of the weights for rank and server",
        ),
        (on_vllm(tensor_parallel_size=4), r"engine\.num_servers x engine\.tensor_parallel_size=4 need 5 GPUs"),
        (
            recipe(engine={"kind": "vllm_server", "devices": [1], "tensor_parallel_size": 2}),
            r"engine\.devices=\[1\] has 1 GPUs for engine\.num_servers x engine\.tensor_parallel_size=2",
        ),
    ],
)
def test_gpus_that_a_vllm_server_can_not_have(made, said):
    with pytest.raises(ConfigError, match=said):
        place(made, ["0", "1"])
