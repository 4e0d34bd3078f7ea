"""A DeepSpeed JSON as keys of a recipe."""

from __future__ import annotations

from polyturn.convert.part import Part
from polyturn.convert.strategies import (
    BATCH,
    Context,
    batch,
    half_precision,
    offload_optimizer,
    offload_parameters,
    share_by_stage,
)

_WHOSE = "a DeepSpeed JSON"
_PRINTED = (
    "steps_per_print wall_clock_breakdown dump_state memory_breakdown flops_profiler comms_logger tensorboard wandb comet "
    "csv_monitor monitor_config logging"
).split()
_REDUCTION = ("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "communication_data_type")
_ENGINE = (
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather dataloader_drop_last checkpoint "
    "use_data_before_expert_parallel_ data_types graph_harvesting seq_parallel_communication_data_type "
    "use_node_local_storage load_universal_checkpoint"
).split()
_TUNING = (
    "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions allgather_bucket_size "
    "sub_group_size round_robin_gradients stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
    "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_use_all_reduce_for_fetch_params "
    "stage3_module_granularity_threshold load_from_fp32_weights elastic_checkpoint memory_efficient_linear legacy_stage1 "
    "override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings use_multi_rank_bucket_allreduce "
    "enable_sanity_checks param_persistence_threshold prefetch_bucket_size max_live_parameters max_reuse_distance "
    "model_persistence_threshold allow_nonstandard_dtype leaf_module"
).split()
_WHOLE_WEIGHTS = (
    "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"
).split()
_OFF = (
    "amp sparse_attention compression_training data_efficiency curriculum_learning autotuning elasticity pipeline "
    "hybrid_engine eigenvalue progressive_layer_drop quantize_training weight_quantization aio tensor_parallel nebula "
    "zenflow"
).split()
_ZERO_OFF = (
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients mics_hierarchical_params_gather "
    "zenflow"
).split()
_OFFLOAD_TUNING = (
    "pin_memory buffer_count buffer_size fast_init pipeline_read pipeline_write pipeline ratio nvme_path max_in_cpu "
    "super_offload cpuadam_cores_perc"
).split()
_SCALING = (
    "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
    "fp16_master_weights_and_grads immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states"
).split()
_CHECKPOINTING = (
    "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
    "synchronize_checkpoint_boundary profile"
).split()
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "torchadam": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "sgd": "sgd"}
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def ranks_of_batch(part: Part) -> int | None:
    """How many ranks the numbers of a batch need; None where they don't say, or don't divide."""
    total, micro, accumulation = (part.whole(name) for name in BATCH)
    if total is None or micro is None or accumulation is None or total % (micro * accumulation):
        return None
    return total // (micro * accumulation)


def from_deepspeed(part: Part, context: Context) -> None:
    """Read all of `part`, the top of a DeepSpeed JSON. What was decided goes to its ledger."""
    if not context.says_ranks and context.ranks > 1:
        why = f"so many, with {BATCH[1]} and {BATCH[2]}"
        part.take(BATCH[0], "trainer.num_ranks", context.ranks, why)
    elif not context.says_ranks:
        part.ledger.notes.append(
            f"{part.foreign.source}: a DeepSpeed JSON does not say how many ranks there are, and trainer.num_ranks is 1; "
            "give trainer.num_ranks=N for N"
        )
    _zero(part.part("zero_optimization"), context)
    _types(part)
    batch(part, context)
    _clip(part)
    peak = _optimizer(part.part("optimizer"))
    _schedule(part.part("scheduler"), peak)
    _activations(part.part("activation_checkpointing"))
    part.pass_over(_PRINTED, "what a run prints and logs is said by the recipe's run and logging sections")
    part.pass_over(_REDUCTION, "gradients are summed in float32, never averaged, so that there is nothing to scale")
    part.pass_over(_ENGINE, "settings of DeepSpeed's own engine, which has no counterpart here")
    part.pass_over(["compile"], "trainer.compile says whether the decoder's layers are compiled")
    part.must_be_off(_OFF, "remove it")
    if (part.whole("sequence_parallel_size") or 1) > 1:
        part.refuse("sequence_parallel_size", "DeepSpeed's sequence parallelism is not taken over; set it to 1")
    part.close(_WHOSE)


def _zero(zero: Part, context: Context) -> None:
    stage = share_by_stage(zero, "stage", context)
    cut = bool(stage) and context.ranks > 1
    for name, is_optimizer in (("offload_optimizer", True), ("offload_param", False)):
        inner = zero.part(name)
        device = inner.word("device", ("none", "cpu", "nvme"))
        if is_optimizer:
            offload_optimizer(inner, "device", device, cut=cut)
        else:
            offload_parameters(inner, "device", device)
        inner.pass_over(_OFFLOAD_TUNING, "how DeepSpeed moves it; nothing here answers to it")
    for name, is_optimizer in (("cpu_offload", True), ("cpu_offload_params", False)):  # their older names
        if zero.flag(name) and is_optimizer:
            offload_optimizer(zero, name, "cpu", cut=cut)
        elif zero.has(name) and zero.flag(name):
            offload_parameters(zero, name, "cpu")
    zero.pass_over(["cpu_offload_use_pin_memory"], "how DeepSpeed moves it; nothing here answers to it")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = zero.number(name, least=-1)
        if size is not None and 1 < size < context.ranks and stage == 3:
            zero.take(name, "trainer.shard_ranks", int(size), "each copy of weights and state is cut over so many ranks")
    zero.pass_over(
        ["ignore_unused_parameters"],
        "parameters without a gradient count as zeros and are never waited for, so there is no such switch",
    )
    zero.pass_over(_WHOLE_WEIGHTS, "exports are always whole, in the model's own type")
    zero.pass_over(_TUNING, "how DeepSpeed cuts and sends; FSDP2 has one unit a decoder layer, and nothing to set")
    zero.must_be_off(_ZERO_OFF, "remove it")


def _types(part: Part) -> None:
    for name in ("fp16", "bf16", "bfloat16"):
        inner = part.part(name)
        if inner.flag("enabled"):
            half_precision(inner, "enabled", name.replace("bfloat", "bf"))
        inner.pass_over(_SCALING, "there are no scaled losses here; trainer.master_weights says what keeps small updates")
    autocast = part.part("torch_autocast")
    kind = autocast.word("dtype", ("bfloat16", "float16"))
    if autocast.flag("enabled"):
        half_precision(autocast, "dtype" if kind else "enabled", "fp16" if kind == "float16" else "bf16")
    autocast.pass_over(["lower_precision_safe_modules"], "all of the model computes in model.dtype")


def _clip(part: Part) -> None:
    clip = part.number("gradient_clipping")
    if clip == 0:
        part.refuse("gradient_clipping", "gradients are always clipped here; give a norm that they don't reach, such as 1000")
    elif clip is not None:
        part.take("gradient_clipping", "trainer.max_grad_norm", clip)


def _optimizer(part: Part) -> float | None:
    """The optimizer and its numbers; returns the peak learning rate where the file has one."""
    kind = part.word("type")
    values = part.part("params")
    part.pass_over(["legacy_fusion"], "how DeepSpeed steps; nothing here answers to it")
    name = None if kind is None else _OPTIMIZERS.get(kind.lower().replace("_", ""))
    if kind is not None and name is None:
        part.refuse("type", "no such optimizer here; use AdamW or SGD, or trainer.optimizer=adamw_8bit in the recipe")
    elif name is not None:
        part.take("type", "trainer.optimizer", name)
    rate = values.number("lr")
    if rate:
        values.take("lr", "trainer.learning_rate", rate)
    if rate == 0:
        values.refuse("lr", "a number above 0 is needed; give one, or leave it out")
        rate = None
    for key, ours in (("eps", "trainer.adam_epsilon"), ("weight_decay", "trainer.weight_decay")):
        value = values.number(key)
        if value is not None:
            values.take(key, ours, value)
    _betas(part, values, name)
    if values.number("momentum") or values.flag("nesterov"):
        values.refuse("momentum" if values.number("momentum") else "nesterov", "sgd has no momentum here; use AdamW")
    if values.flag("adam_w_mode") is False and values.number("weight_decay"):
        values.refuse("adam_w_mode", "weight decay is decoupled here (AdamW); set it to true, or weight_decay to 0")
    values.must_be_off(["amsgrad"], "set it to false")
    values.pass_over(
        ("torch_adam", "bias_correction", "fused", "foreach", "set_grad_none", "freeze_step", "cuda_aware", "dampening"),
        "how the step is computed; nothing here answers to it",
    )
    return rate


def _betas(part: Part, values: Part, name: str | None) -> None:
    betas = values.numbers("betas", 2)
    if betas is not None:
        values.take("betas", "trainer.betas", betas)
    elif name == "adamw" and not values.has("betas"):
        part.take("type", "trainer.betas", [0.9, 0.999], "its betas are left out, and these are its own", implied=True)


def _schedule(part: Part, peak: float | None) -> None:
    kind = part.word("type")
    values = part.part("params")
    if kind is None:
        return
    if kind not in _SCHEDULES:
        part.refuse("type", f"no such schedule here; use {', '.join(_SCHEDULES)}, or leave it out")
        values.see_all()
        return
    to = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}[kind]
    part.take("type", "trainer.schedule", to, "after a linear warm-up")
    steps = values.whole("warmup_num_steps", least=0)
    if steps is not None:
        values.take("warmup_num_steps", "trainer.warmup_steps", steps, "optimizer steps")
    top = values.number("warmup_max_lr")
    if top and top != peak:
        values.replace("warmup_max_lr", "trainer.learning_rate", top, "a schedule's peak goes before the optimizer's")
    if kind == "WarmupCosineLR":
        floor = values.number("cos_min_ratio")
        if floor is not None:
            values.take("cos_min_ratio", "trainer.min_learning_rate_ratio", floor)
        else:
            part.take("type", "trainer.min_learning_rate_ratio", 0.0001, "where DeepSpeed's cosine ends", implied=True)
    if values.whole("total_num_steps") is not None:
        values.note("total_num_steps", "a schedule ends with the run, at the last of its optimizer steps")
    values.pass_over(["last_batch_iteration"], "a run that goes on knows where its schedule stood")
    values.pass_over(
        ("warmup_min_lr", "warmup_min_ratio", "warmup_type"), "the warm-up is linear, from the peak / trainer.warmup_steps"
    )


def _activations(part: Part) -> None:
    for name in ("cpu_checkpointing", "partition_activations"):
        if part.flag(name):
            part.refuse(name, "kept activations stay where they are; set it to false, and trainer.activations=full if need be")
    part.pass_over(
        _CHECKPOINTING,
        "trainer.activations says what is computed again in the backward pass, always without re-entering autograd",
    )
