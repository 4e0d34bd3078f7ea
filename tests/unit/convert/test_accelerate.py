"""A YAML of accelerate: all distributed types, both versions of FSDP, DeepSpeed inline and by file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, with_values
from polyturn.config.yaml_lines import dotted
from polyturn.convert.convert import Converted, convert
from polyturn.errors import ConfigError

FILES = Path(__file__).parents[2] / "data" / "convert"
RECIPE = Recipe(model=ModelSection(path="builtin:tiny"), environment=EnvironmentSection(id="lookup"))


def keys(found: Converted) -> dict[str, object]:
    return {dotted(taken.key): taken.value for taken in found.taken}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", {"trainer.num_ranks": 1, "trainer.device": "cpu"}),
        ("multi_gpu", {"trainer.num_ranks": 4, "trainer.parallel": "ddp", "model.dtype": "bfloat16"}),
        (
            "fsdp1",
            {
                "trainer.num_ranks": 16,
                "trainer.parallel": "fsdp2",
                "trainer.activations": "full",
                "model.dtype": "bfloat16",
            },
        ),
        ("fsdp2", {"trainer.num_ranks": 2, "trainer.parallel": "fsdp2", "trainer.device": "cpu"}),
        (
            "deepspeed",
            {
                "trainer.num_ranks": 2,
                "trainer.parallel": "deepspeed",
                "trainer.max_grad_norm": 0.5,
                "model.dtype": "bfloat16",
            },
        ),
    ],
)
def test_every_distributed_type_is_read(name, expected):
    assert keys(convert(FILES / f"accelerate_{name}.yaml")) == expected


def test_the_json_that_it_names_is_read_too_from_the_folder_or_beside_it(tmp_path, monkeypatch):
    beside = keys(convert(FILES / "accelerate_with_json.yaml"))
    assert beside["trainer.num_ranks"] == 2
    assert beside["trainer.schedule"] == "cosine"
    shutil.copy(FILES / "deepspeed_auto.json", tmp_path / "deepspeed_zero3.json")
    monkeypatch.chdir(tmp_path)
    assert keys(convert(FILES / "accelerate_with_json.yaml"))["trainer.schedule"] == "constant"


def fsdp(*lines: str, ranks: int = 4, machines: int = 1) -> str:
    head = f"distributed_type: FSDP\nnum_processes: {ranks}\nnum_machines: {machines}\nfsdp_config:\n"
    return head + "".join(f"  {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "parallel", "shard_ranks"),
    [
        (fsdp("fsdp_sharding_strategy: FULL_SHARD"), "fsdp2", None),
        (fsdp("fsdp_sharding_strategy: 1"), "fsdp2", None),
        (fsdp("fsdp_sharding_strategy: SHARD_GRAD_OP"), "fsdp2", None),
        (fsdp("fsdp_sharding_strategy: NO_SHARD"), "ddp", None),
        (fsdp("fsdp_sharding_strategy: 3"), "ddp", None),
        (fsdp("fsdp_sharding_strategy: HYBRID_SHARD", ranks=16, machines=2), "fsdp2", 8),
        (fsdp("fsdp_sharding_strategy: HYBRID_SHARD"), "fsdp2", None),
        (fsdp("fsdp_version: 2", "fsdp_reshard_after_forward: false"), "fsdp2", None),
        (fsdp("fsdp_version: 2", "fsdp_offload_params: false"), "fsdp2", None),
        (fsdp("fsdp_version: 2", ranks=1), None, None),
    ],
)
def test_sharding_strategies_of_both_versions(given, text, parallel, shard_ranks):
    found = keys(convert(given(text)))
    assert found.get("trainer.parallel") == parallel
    assert found.get("trainer.shard_ranks") == shard_ranks


def test_what_differs_is_said(given):
    (taken,) = [
        taken for taken in convert(given(fsdp("fsdp_sharding_strategy: SHARD_GRAD_OP"))).taken if "parallel" in taken.key
    ]
    assert "gathered again: less memory, more sending" in taken.why
    assert str(taken).startswith("acc.yaml:5: fsdp_config.fsdp_sharding_strategy: SHARD_GRAD_OP is trainer.parallel=fsdp2 (")


def mesh(**sizes: int) -> str:
    lines = (f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items())
    return "parallelism_config:\n" + "".join(lines)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_replicate": 2, "dp_shard": 4}, {"trainer.shard_ranks": 4}),
        ({"dp_shard": 8}, {}),
        ({"dp_shard": 4, "cp": 2}, {"trainer.context_ranks": 2}),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"trainer.shard_ranks": 4, "trainer.context_ranks": 2}),
        ({"dp_shard": 4, "tp": 2}, {"trainer.tensor_ranks": 2}),
    ],
)
def test_the_sizes_of_a_mesh(given, sizes, expected):
    found = keys(convert(given(fsdp("fsdp_version: 2", ranks=8) + mesh(**sizes))))
    assert found == {"trainer.num_ranks": 8, "trainer.parallel": "fsdp2", **expected}


DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
MULTI = "distributed_type: MULTI_GPU\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: default\n", {"trainer.compile": "on"}),
        ("dynamo_backend: 'NO'\n", {"trainer.compile": "off"}),
        ("gpu_ids: 0,2\n", {"trainer.devices": [0, 2]}),
        ("gpu_ids: all\n", {}),
        ("mixed_precision: no\n", {}),
        ("use_cpu: 'true'\n", {"trainer.device": "cpu"}),
        (
            "parallelism_config:\n  parallelism_config_dp_replicate_size: 1\n  parallelism_config_tp_size: 1\n",
            {},
        ),
    ],
)
def test_other_keys(given, text, expected):
    assert keys(convert(given(MULTI + text))) == {"trainer.num_ranks": 2, "trainer.parallel": "ddp", **expected}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: MEGATRON_LM\nnum_processes: 2\n", r"acc\.yaml:1: distributed_type: MEGATRON_LM: no such value"),
        ("distributed_type: NO\nnum_processes: 2\n", "NO is one process"),
        ("num_processes: 0\ndistributed_type: FSDP\n", "a number of 1 or more"),
        (MULTI + "mixed_precision: fp16\n", r"acc\.yaml:3: mixed_precision: fp16: there is no fp16 here"),
        (MULTI + "num_machines: 3\n", "must divide by num_machines: 3; set it to 3"),
        (MULTI + "compute_environment: AMAZON_SAGEMAKER\n", "a SageMaker job is not started from this file"),
        (MULTI + "megatron_lm_config:\n  tp: 2\n", "nothing here does that"),
        (MULTI + "gpu_ids: a,b\n", "numbers with commas"),
        (MULTI + "dynamo_backend: AOT_EAGER\n", "use INDUCTOR or NO"),
        (MULTI + "num_proceses: 3\n", r"did you mean num_processes\?"),
        (MULTI + "parallelism_config:\n  parallelism_config_sp_size: 2\n", "nothing here does that"),
        (MULTI + "parallelism_config:\n  parallelism_config_cp_size: 4\n", r"cp_size: 4: 4 are not 2 ranks; make the sizes"),
        (fsdp() + mesh(dp_replicate=2, dp_shard=2, tp=2), r"tp_size: 2: 2 x 2 x 2 are not 4 ranks"),
        (fsdp("fsdp_offload_params: true"), "weights stay on the GPUs"),
        (fsdp("fsdp_version: 3"), "the versions 1 and 2"),
        (fsdp("fsdp_sharding_strategy: SHARD"), "no such value; did you mean"),
        (fsdp("fsdp_auto_wrap_polcy: X"), r"did you mean fsdp_auto_wrap_policy\?"),
        (
            DEEPSPEED + "  deepspeed_config_file: no.json\n",
            "no such file",
        ),
        (
            DEEPSPEED + "  deepspeed_config_file: a.json\n  zero_stage: 3\n",
            "remove zero_stage, or the file",
        ),
        (
            DEEPSPEED + "  zero_stage: 3\n  offload_optimizer_device: cpu\n",
            "acc.yaml:5: deepspeed_config.offload_optimizer_device: cpu: shards",
        ),
    ],
)
def test_what_can_not_be_had_is_refused_with_its_line(given, text, words):
    with pytest.raises(ConfigError) as caught:
        convert(given(text))
    assert re.search(words, str(caught.value)), caught.value
    assert all(line.startswith(("acc.yaml", "no.json")) for line in str(caught.value).splitlines())


def test_several_machines_are_started_by_torchrun(given):
    file = given(fsdp(ranks=16, machines=2))
    command = "`torchrun --nnodes 2 --nproc-per-node 8 .* -m polyturn train RECIPE.yaml --from acc.yaml` on every machine"
    assert any(re.search(command, note) for note in convert(file).notes)
    with pytest.raises(ConfigError, match=command):
        convert(file, starts_here=True)
    assert not any("torchrun --nnodes" in note for note in convert(file, started=16).notes)


def test_the_ranks_of_a_recipe_go_before_those_of_the_file(given):
    one = with_values(RECIPE, "trainer", num_ranks=1)
    assert "trainer.parallel" not in keys(convert(given(fsdp()), one))  # the disagreement itself is said when both are joined
