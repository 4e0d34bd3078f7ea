"""A YAML of accelerate as keys of a recipe: NO, MULTI_GPU, MULTI_CPU, FSDP (1 and 2) and DEEPSPEED."""

from __future__ import annotations

import math
from pathlib import Path

from polyturn.convert.deepspeed import from_deepspeed
from polyturn.convert.foreign import read_foreign
from polyturn.convert.part import Part
from polyturn.convert.strategies import (
    ACCUMULATED,
    Context,
    half_precision,
    multiples,
    offload_optimizer,
    offload_parameters,
    share_by_stage,
)
from polyturn.errors import ConfigError

_WHOSE = "a YAML of accelerate"
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
_LAUNCHER = (
    "machine_rank main_process_ip main_process_port main_training_function rdzv_backend same_network debug "
    "enable_cpu_affinity compute_environment main_process_ip_port mpirun_config commands command_file"
).split()
_OTHER_DEVICES = (
    "downcast_bf16 tpu_use_cluster tpu_use_sudo tpu_env tpu_name tpu_zone tpu_vm ipex_config use_xpu fp8_config "
    "megatron_lm_config mixed_precision_config"
).split()
_OTHER_MESHES = "cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation".split()
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_FSDP_TUNING = (
    "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_use_orig_params fsdp_limit_all_gathers"
).split()
_LOADING = ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states")
_WRAPPING = ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
_DEEPSPEED_FILE_ONLY = (
    "zero_stage gradient_clipping offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
    "offload_param_nvme_path zero3_save_16bit_model"
).split()


def ranks_of_yaml(part: Part) -> int | None:
    """How many ranks a YAML of accelerate starts; None where it does not say."""
    value = part.whole("num_processes")
    return 1 if value is None and part.word("distributed_type") == "NO" else value


def from_accelerate(part: Part, context: Context) -> None:
    """Read all of `part`, the top of a YAML of accelerate. What was decided goes to its ledger."""
    kind = part.word("distributed_type", _TYPES)
    _machines(part, context)
    if kind == "NO" and (part.whole("num_processes") or 1) > 1:
        part.refuse("distributed_type", "NO is one process; use MULTI_GPU, FSDP or DEEPSPEED, or num_processes: 1")
    fsdp, deepspeed = part.part("fsdp_config"), part.part("deepspeed_config")
    if kind in ("MULTI_GPU", "MULTI_CPU") and context.ranks > 1:
        part.take("distributed_type", "trainer.parallel", "ddp", "each rank holds whole copies; it sums their gradients itself")
    if kind == "FSDP":
        _fsdp(fsdp, part, context)
    if kind == "DEEPSPEED":
        _deepspeed(deepspeed, context)
    for name, inner, owner in (("fsdp_config", fsdp, "FSDP"), ("deepspeed_config", deepspeed, "DEEPSPEED")):
        if kind != owner and part.has(name):
            inner.see_all()
            part.note(name, f"accelerate reads it with distributed_type: {owner} only")
    half_precision(part, "mixed_precision", part.word("mixed_precision", ("no", "bf16", "fp16", "fp8")))
    if part.flag("use_cpu") or kind == "MULTI_CPU":
        part.take("use_cpu" if part.flag("use_cpu") else "distributed_type", "trainer.device", "cpu")
    _gpus(part)
    _compiled(part)
    _mesh(part.part("parallelism_config"), context)
    if part.whole("gradient_accumulation_steps") is not None:
        part.note("gradient_accumulation_steps", ACCUMULATED)
    part.pass_over(_LAUNCHER, "Polyturn starts its processes itself, or torchrun does; see docs/from_accelerate.md")
    part.must_be_off(_OTHER_DEVICES, "remove it")
    part.close(_WHOSE)


def _machines(part: Part, context: Context) -> None:
    if part.word("compute_environment", ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")) == "AMAZON_SAGEMAKER":
        part.refuse("compute_environment", "a SageMaker job is not started from this file; use LOCAL_MACHINE")
    num_ranks, num_machines = part.whole("num_processes"), part.whole("num_machines") or 1
    if num_ranks is not None:
        part.take("num_processes", "trainer.num_ranks", num_ranks)
    if num_machines > 1 and num_ranks is not None and num_ranks % num_machines:
        part.refuse(
            "num_processes", f"it must divide by num_machines: {num_machines}; set it to {multiples(num_ranks, num_machines)}"
        )
    elif num_machines > 1:
        each = "N" if num_ranks is None else str(num_ranks // num_machines)
        words = (
            f"run `torchrun --nnodes {num_machines} --nproc-per-node {each} --node-rank RANK --master-addr HOST --master-port "
            f"PORT -m polyturn train RECIPE.yaml --from {part.foreign.source}` on every machine"
        )
        if context.started is not None:
            part.note("num_machines", "ranks have been started on them already")
        else:
            (part.refuse if context.starts_here else part.note)(
                "num_machines", f"Polyturn starts the processes of one machine only; {words}"
            )


def _fsdp(fsdp: Part, top: Part, context: Context) -> None:
    version = fsdp.whole("fsdp_version") or 1
    if version > 2:
        fsdp.refuse("fsdp_version", "there are the versions 1 and 2; give one of them")
    shares = _strategy(fsdp)
    name, words = shares
    if context.ranks == 1:
        fsdp.ledger.notes.append(f"{fsdp.foreign.source}: fsdp_config: there is one rank, and nothing to share")
    elif words == "NO_SHARD":
        fsdp.take(name, "trainer.parallel", "ddp", "each rank holds whole copies")
    else:
        difference = {
            "SHARD_GRAD_OP": "weights are also given back after the forward pass and gathered again: less memory, more sending",
            "HYBRID_SHARD_ZERO2": "weights are also given back after the forward pass: less memory, more sending",
        }.get(words, "" if version == 2 else "version 2, with the same numbers")
        (fsdp if fsdp.has(name) else top).take(
            name if fsdp.has(name) else "distributed_type", "trainer.parallel", "fsdp2", difference
        )
    machines = top.whole("num_machines") or 1
    if words.startswith("HYBRID") and machines > 1 and context.ranks % machines == 0 and context.ranks > machines:
        fsdp.take(name, "trainer.shard_ranks", context.ranks // machines, "one copy a machine")
    if fsdp.flag("fsdp_offload_params"):
        offload_parameters(fsdp, "fsdp_offload_params", "cpu")
    if fsdp.flag("fsdp_activation_checkpointing"):
        fsdp.take("fsdp_activation_checkpointing", "trainer.activations", "full", "without re-entering autograd")
    if fsdp.word("fsdp_state_dict_type") is not None:
        fsdp.note("fsdp_state_dict_type", "checkpoints are sharded and can be read by any number of ranks, exports are whole")
    fsdp.pass_over(_WRAPPING, "every decoder layer is a unit, and embeddings, last norm and head are one more")
    fsdp.pass_over(_LOADING, "every rank loads the model into CPU memory and cuts it unit by unit")
    fsdp.pass_over(_FSDP_TUNING, "FSDP2 needs no such setting")


def _strategy(fsdp: Part) -> tuple[str, str]:
    """The key that says how weights are shared, and the sharding strategy by its name in version 1."""
    number = fsdp.said("fsdp_sharding_strategy").rpartition(": ")[2]
    if number in ("1", "2", "3", "4", "5"):  # as torch counts them
        fsdp.word("fsdp_sharding_strategy")
        return "fsdp_sharding_strategy", _STRATEGIES[int(number) - 1]
    named = fsdp.word("fsdp_sharding_strategy", _STRATEGIES)
    after = fsdp.word("fsdp_reshard_after_forward", ("true", "false", *_STRATEGIES))
    if named is not None:
        return "fsdp_sharding_strategy", named
    if after in ("true", "false"):
        return "fsdp_reshard_after_forward", "FULL_SHARD" if after == "true" else "SHARD_GRAD_OP"
    return "fsdp_reshard_after_forward", after or "FULL_SHARD"


def _deepspeed(part: Part, context: Context) -> None:
    if part.has("deepspeed_config_file"):
        _deepspeed_file(part, context)
    stage = share_by_stage(part, "zero_stage", context)
    devices = ("none", "cpu", "nvme")
    name = "offload_optimizer_device"
    offload_optimizer(part, name, part.word(name, devices), cut=bool(stage) and context.ranks > 1)
    offload_parameters(part, "offload_param_device", part.word("offload_param_device", devices))
    clip = part.number("gradient_clipping")
    if clip:
        part.take("gradient_clipping", "trainer.max_grad_norm", clip)
    elif clip == 0:
        part.refuse("gradient_clipping", "gradients are always clipped here; give a norm that they don't reach, such as 1000")
    if part.whole("gradient_accumulation_steps") is not None:
        part.note("gradient_accumulation_steps", ACCUMULATED)
    part.pass_over(["zero3_init_flag"], "every rank loads the model into CPU memory and cuts it unit by unit")
    part.pass_over(["zero3_save_16bit_model"], "exports are always whole, in the model's own type")
    part.pass_over(
        ("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
        "Polyturn starts its processes itself, or torchrun does",
    )
    part.pass_over(
        ("offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_moe_layer_cls_names"),
        "how DeepSpeed moves weights; nothing here answers to it",
    )


def _deepspeed_file(part: Part, context: Context) -> None:
    """Read the JSON that `deepspeed_config_file` names: from the working folder, as accelerate does, or beside this file."""
    named = part.word("deepspeed_config_file")
    twice = [name for name in _DEEPSPEED_FILE_ONLY if part.has(name)]
    if named is None:
        return
    if twice:
        part.refuse("deepspeed_config_file", f"the file says all that DeepSpeed needs; remove {', '.join(twice)}, or the file")
        return
    beside = Path(part.foreign.source).parent / named
    try:
        foreign = read_foreign(beside if beside.is_file() and not Path(named).is_file() else named)
    except ConfigError as error:
        part.refuse("deepspeed_config_file", "this file can't be read; mend it:")
        part.ledger.problems += str(error).splitlines()
        return
    part.note("deepspeed_config_file", f"read from {foreign.source}")
    from_deepspeed(Part(foreign, part.ledger), context)


def _gpus(part: Part) -> None:
    text = part.word("gpu_ids")
    if text is None or text == "all":
        return
    numbers = [word.strip() for word in text.split(",")]
    if not all(number.isdigit() for number in numbers):
        part.refuse("gpu_ids", "numbers with commas between them are needed, or all")
        return
    part.take("gpu_ids", "trainer.devices", [int(number) for number in numbers], "of CUDA_VISIBLE_DEVICES")


def _compiled(part: Part) -> None:
    dynamo = part.part("dynamo_config")
    name = "dynamo_backend"
    for holder in (dynamo, part):
        backend = holder.word(name)
        if backend is None:
            continue
        if backend.upper() == "NO":
            holder.take(name, "trainer.compile", "off")
        elif backend.upper() == "INDUCTOR":
            holder.take(name, "trainer.compile", "on", "the decoder's layers, one by one")
        else:
            holder.refuse(name, "layers are compiled by inductor; use INDUCTOR or NO")
    dynamo.pass_over(
        ("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation"),
        "layers are compiled one by one, in inductor's usual mode",
    )


def _mesh(mesh: Part, context: Context) -> None:
    """Sizes of a mesh: copies x shards x ranks that share rows x ranks that share layers."""
    prefix = "parallelism_config_"
    names = tuple(f"{prefix}{name}_size" for name in ("dp_replicate", "dp_shard", "cp", "tp"))
    copies, shards, rows, layers = sizes = tuple(mesh.whole(name) or 1 for name in names)
    given = [name for name, size in zip(names, sizes, strict=True) if size > 1]
    if (rows > 1 or layers > 1 or (copies > 1 and shards > 1)) and math.prod(sizes) != context.ranks:
        product = " x ".join(f"{size}" for size in sizes if size > 1)
        mesh.refuse(given[-1], f"{product} are not {context.ranks} ranks; make the sizes of {prefix[:-1]} so")
    else:
        if copies > 1 and shards > 1:
            mesh.take(names[1], "trainer.shard_ranks", shards * rows, f"{copies} copies of the weights")
        if rows > 1:
            mesh.take(names[2], "trainer.context_ranks", rows, "the tokens of a row are cut over them")
        if layers > 1:
            mesh.take(names[3], "trainer.tensor_ranks", layers, "heads and feed-forward width are cut over them")
    mesh.must_be_off([f"{prefix}sp_size"], "set it to 1; parallelism_config_cp_size cuts long rows")
    mesh.pass_over([f"{prefix}{name}" for name in _OTHER_MESHES], "keys and values are gathered in every layer")
