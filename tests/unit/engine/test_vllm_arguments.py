"""A recipe as vLLM's command line and environment, and what of either is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from polyturn.config.schema import Recipe
from polyturn.engine.vllm_arguments import server_arguments, server_environment
from polyturn.engine.vllm_install import VllmInstall, look_at
from polyturn.errors import ConfigError

NEW = VllmInstall(version="0.32.0", needs_scale_out_flag=True)
OLD = VllmInstall(version="0.26.0", needs_scale_out_flag=False)


def recipe(**sections) -> Recipe:
    engine = {"kind": "vllm_server"} | sections.pop("engine", {})
    return Recipe.model_validate(
        {"model": {"path": "x"} | sections.pop("model", {}), "environment": {"id": "e"}, "engine": engine} | sections
    )


def words_of(made: Recipe, *, on_gpu=False, vllm=NEW) -> dict[str, str | bool]:
    """Flags with their values, True for those without."""
    words = server_arguments(made, Path("/m"), port=8123, on_gpu=on_gpu, vllm=vllm)
    found: dict[str, str | bool] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            following = words[place + 1 : place + 2]
            found[word] = following[0] if following and not following[0].startswith("--") else True
    return found


def test_what_the_rest_of_polyturn_relies_on_is_always_there():
    found = words_of(recipe())
    assert found["--model"] == "/m"
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "8123")
    assert found["--skip-tokenizer-init"] is True
    assert found["--enable-scale-out"] is True
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--worker-extension-cls"] == "polyturn.engine.vllm_worker.Extension"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "polyturn"}
    assert found["--middleware"] == "polyturn.engine.vllm_guard.Guard"
    assert "--enable-lora" not in found


def test_on_a_cpu_the_parts_of_a_server_have_cores_of_their_own(monkeypatch):
    two = recipe(engine={"tensor_parallel_size": 2})
    name = "VLLM_CPU_OMP_THREADS_BIND"
    for cores, wanted in ((range(4), "0,2|1,3"), ([7], "7|7")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(cores), raising=False)
        assert server_environment(two, {}, on_gpu=False, label="v")[name] == wanted
    assert server_environment(two, {name: "0|1"}, on_gpu=False, label="v")[name] == "0|1"
    for made, on_gpu in ((two, True), (recipe(), False)):
        assert name not in server_environment(made, {}, on_gpu=on_gpu, label="v")


def test_an_older_vllm_has_its_token_route_switched_on_already():
    assert "--enable-scale-out" not in words_of(recipe(), vllm=OLD)


def test_on_a_cpu_prompts_come_as_a_whole():
    """Parts of prompts end vLLM 0.32 there: `RuntimeError: CPU Generator does not use offset`."""
    flag = "--no-enable-chunked-prefill"
    assert flag in words_of(recipe())
    assert flag not in words_of(recipe(), on_gpu=True)
    assert words_of(recipe(engine={"extra_args": {"enable_chunked_prefill": True}}))["--enable-chunked-prefill"] is True


def test_on_a_cpu_weights_that_are_shared_are_not_packed():
    shared = recipe(weight_sync={"mode": "single_copy"})
    assert words_of(shared)["--quantization"] == "polyturn_plain"
    assert "--quantization" not in words_of(shared, on_gpu=True)
    assert "--quantization" not in words_of(recipe())


@pytest.mark.parametrize(
    ("sections", "flag", "value"),
    [
        ({"engine": {"max_model_len": 99}}, "--max-model-len", "99"),
        ({"rollout": {"max_trajectory_tokens": 512}}, "--max-model-len", "512"),
        ({"engine": {"max_batch_size": 7}}, "--max-num-seqs", "7"),
        ({"engine": {"tensor_parallel_size": 2}}, "--tensor-parallel-size", "2"),
        ({"engine": {"dtype": "float16"}}, "--dtype", "float16"),
        ({"model": {"dtype": "bfloat16"}}, "--dtype", "bfloat16"),
        ({"run": {"seed": 5}}, "--seed", "5"),
        ({"model": {"lora": {"rank": 12}}}, "--max-lora-rank", "16"),
        ({"model": {"lora": {"rank": 12}}}, "--enable-lora", True),
    ],
)
def test_each_key_is_an_argument(sections, flag, value):
    assert words_of(recipe(**sections))[flag] == value


def test_a_gpu_has_a_share_of_memory_and_a_cpu_runs_eagerly():
    gpu, cpu = words_of(recipe(), on_gpu=True), words_of(recipe())
    assert gpu["--gpu-memory-utilization"] == "0.9"
    assert words_of(recipe(engine={"gpu_memory_utilization": 0.4}), on_gpu=True)["--gpu-memory-utilization"] == "0.4"
    beside_the_trainer = recipe(trainer={"devices": [0]}, engine={"devices": [0]}, weight_sync={"mode": "restart"})
    assert words_of(beside_the_trainer, on_gpu=True)["--gpu-memory-utilization"] == "0.3"
    assert "--enforce-eager" not in gpu
    assert cpu["--enforce-eager"] is True
    assert "--gpu-memory-utilization" not in cpu


def test_extra_arguments_come_as_vllm_writes_them():
    extra = {
        "enforce_eager": False,
        "block_size": 32,
        "hf_overrides": {"a": 1},
        "quantization": None,
        "enable_chunked_prefill": True,
    }
    found = words_of(recipe(engine={"extra_args": extra}))
    assert found["--no-enforce-eager"] is True
    assert "--enforce-eager" not in found
    assert found["--block-size"] == "32"
    assert json.loads(found["--hf-overrides"]) == {"a": 1}
    assert "--quantization" not in found
    assert found["--enable-chunked-prefill"] is True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_len", r"engine\.extra_args\.max_model_len: set engine\.max_model_len instead"),
        ("dtype", r"set engine\.dtype instead"),
        ("logprobs_mode", "Polyturn sets it, and relies on it; remove it"),
        ("worker_extension_cls", "remove it"),
        ("block-size", "write the name as vLLM's Python does, block_size"),
        ("--seed", "does, seed"),
    ],
)
def test_extra_arguments_that_can_not_be(name, said):
    with pytest.raises(ConfigError, match=said):
        words_of(recipe(engine={"extra_args": {name: 1}}))


def test_the_environment_of_a_server():
    made = server_environment(recipe(), {}, on_gpu=False, label="3")
    assert made["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert made["VLLM_SERVER_DEV_MODE"] == "1"
    assert made["POLYTURN_WEIGHT_LABEL"] == "3"
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "1"
    resolved = recipe(engine={"gpu_memory_utilization": 0.9})
    assert server_environment(resolved, {}, on_gpu=False, label="3")["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "--gpu-memory-utilization" not in words_of(resolved, on_gpu=False)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in made
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(recipe(), {}, on_gpu=True, label="3")
    adapters = recipe(model={"lora": {"rank": 4}})
    assert server_environment(adapters, {}, on_gpu=True, label="3")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    own = server_environment(recipe(), {"VLLM_CPU_KVCACHE_SPACE": "8"}, on_gpu=False, label="3")
    assert own["VLLM_CPU_KVCACHE_SPACE"] == "8", "what is set wins where it may"


@pytest.mark.parametrize(
    ("model", "engine", "exact"),
    [("float32", "auto", True), ("bfloat16", "float32", True), ("float32", "bfloat16", False), ("bfloat16", "auto", False)],
)
def test_float32_is_not_multiplied_as_tf32(model, engine, exact):
    resolved = recipe(model={"dtype": model}, engine={"dtype": engine})
    made = server_environment(resolved, {}, on_gpu=True, label="3")
    assert made.get("TRITON_F32_DEFAULT") == ("ieee" if exact else None)
    own = server_environment(resolved, {"TRITON_F32_DEFAULT": "tf32"}, on_gpu=True, label="3")
    assert own.get("TRITON_F32_DEFAULT") == ("tf32" if exact else None), "what is set wins"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "VLLM_WORKER_MULTIPROC_METHOD",
            "fork",
            "VLLM_WORKER_MULTIPROC_METHOD=fork in the environment, and Polyturn needs spawn",
        ),
        ("VLLM_SERVER_DEV_MODE", "0", "VLLM_SERVER_DEV_MODE=0 in the environment, and Polyturn needs 1"),
    ],
)
def test_variables_that_can_not_be(name, value, said):
    with pytest.raises(ConfigError, match=said):
        server_environment(recipe(), {name: value}, on_gpu=True, label="x")


# ── what is installed ──────────────────────────────────────────────────────────────────────────────────────────────────


FILES = {
    "distributed/weight_transfer/factory.py": "    def register_engine(",
    "model_executor/model_loader/reload/layerwise.py": "def finalize_layerwise_reload(",
    "v1/worker/gpu_worker.py": "    def start_weight_update(",
    "entrypoints/scale_out/token_in_token_out/api_router.py": '"/inference/v1/generate"',
    "v1/worker/worker_base.py": "parallel_config.worker_extension_cls",
    "entrypoints/scale_out/factories.py": 'getattr(args, "enable_scale_out", False)',
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_capabilities_are_read_off_what_is_there(tmp_path):
    write(tmp_path, FILES)
    assert look_at(tmp_path, "0.32.0") == NEW
    write(tmp_path, {"entrypoints/scale_out/factories.py": "def register_scale_out_api_routers(app): ..."})
    assert look_at(tmp_path, "0.26.0") == OLD


@pytest.mark.parametrize("missing", [name for name in FILES if "factories" not in name])
def test_a_vllm_that_lacks_something_is_refused_by_name(tmp_path, missing):
    write(tmp_path, {name: text for name, text in FILES.items() if name != missing})
    with pytest.raises(ConfigError, match=r"vLLM 0\.11\.0 lacks .*, which Polyturn builds on; use vLLM 0\.26 to 0\.32"):
        look_at(tmp_path, "0.11.0")
