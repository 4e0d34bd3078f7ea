"""Derives every number a recipe leaves open, once, each with its reason, and refuses what can't train.

Nothing below the command line derives a setting again: the resolved recipe is what every part is built from, and what the
run saves.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from polyturn.config.arithmetic import batch_arithmetic
from polyturn.config.checkpoints import checkpoint_refusals
from polyturn.config.engines import vllm_settings, weight_sync_mode
from polyturn.config.parallel import parallel
from polyturn.config.schema import LossOptions, Recipe, with_values
from polyturn.errors import ConfigError
from polyturn.processes.whole_file import write_whole

_TINY_LEARNING_RATE = 3e-4
_FULL_LEARNING_RATE = 1e-6
_LORA_LEARNING_RATE = 1e-5
_ROW_TOKENS = 1024
_GPU_ROW_TOKENS = 8192
_WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A recipe with nothing left to derive, and why each derived value is what it is, by dotted key."""

    recipe: Recipe
    reasons: Mapping[str, str]


def resolve(recipe: Recipe, *, num_train_tasks: int | None, on_gpu: bool = False) -> Resolved:
    """Fill `recipe`. `num_train_tasks` is None for a source without end. Resolving a resolved recipe changes nothing.

    `on_gpu` says that the trainer will compute on one.

    Raises ConfigError with a sentence for everything that can't be trained, one a line: value, rule, fix.
    """
    reasons: dict[str, str] = {}
    problems: list[str] = list(_refusals(recipe))
    row_tokens = partial(_row_tokens, usual=_GPU_ROW_TOKENS if on_gpu else _ROW_TOKENS)
    for derive in (
        _length,
        _tasks,
        _learning_rate,
        _master_weights,
        row_tokens,
        _warmup,
        vllm_settings,
        weight_sync_mode,
        parallel,
        _loss,
    ):
        try:
            recipe = derive(recipe, num_train_tasks, reasons)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return Resolved(recipe=recipe, reasons=reasons)


def write_resolved(resolved: Resolved, path: str | Path) -> None:
    """Write YAML that `load_recipe` reads back to the same recipe, each derived value under a comment with its reason.

    The file appears whole or not at all. Raises ConfigError for an argument that YAML can't hold.
    """
    tree = CommentedMap()
    tree.yaml_set_start_comment("Every setting of this run. The values under a comment were derived; the comment says why.")
    for name, section in resolved.recipe.model_dump().items():
        tree[name] = _commented(section, (name,), resolved.reasons)
    yaml = YAML()
    yaml.width = 1_000_000
    yaml.representer.add_representer(
        type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    text = io.StringIO()
    yaml.dump(tree, text)
    write_whole(Path(path), text.getvalue())


def _refusals(recipe: Recipe) -> Iterator[str]:
    """Settings that can't be trained with, whatever is derived."""
    rollout, trainer = recipe.rollout, recipe.trainer
    if rollout.group_size == 1:
        yield "rollout.group_size=1: a trajectory is compared with its siblings, so a group has 2 or more; 8 is usual"
    truncating = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    if any(truncating.values()) and not rollout.allow_truncated_sampling:
        named = " ".join(f"rollout.{key}={getattr(rollout, key):g}" for key, truncates in truncating.items() if truncates)
        yield (
            f"{named}: tokens are then sampled from a distribution that the trainer's probabilities know nothing of, "
            "and importance ratios are wrong; remove it, or set rollout.allow_truncated_sampling=true"
        )
    if rollout.max_turn_tokens > rollout.max_trajectory_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: one turn can't be longer than the trajectory, "
            f"rollout.max_trajectory_tokens={rollout.max_trajectory_tokens}; set max_turn_tokens to that or less"
        )
    if recipe.engine.deterministic and recipe.engine.kind != "hf":
        yield (
            f"engine.deterministic=true: {_forms_batches(recipe)} by arrival (engine.kind={recipe.engine.kind}); "
            "use engine.kind=hf, or remove it"
        )
    if recipe.engine.kind == "vllm" and trainer.num_ranks > 1:
        yield (
            f"engine.kind=vllm with trainer.num_ranks={trainer.num_ranks}: vLLM in the driver's process goes with one rank; "
            "use engine.kind=vllm_server, or trainer.num_ranks=1"
        )
    if recipe.model.attention == "flash_attention_2" and recipe.model.dtype == "float32":
        yield (
            "model.attention=flash_attention_2: its kernels take weights of 16 bits, and model.dtype=float32; set "
            "model.dtype=bfloat16, or model.attention=auto"
        )
    yield from _adapter_refusals(recipe)
    yield from checkpoint_refusals(recipe)
    if trainer.optimizer_steps_per_batch > rollout.groups_per_step:
        yield (
            f"trainer.optimizer_steps_per_batch={trainer.optimizer_steps_per_batch}: a batch is cut by whole groups and has "
            f"rollout.groups_per_step={rollout.groups_per_step} of them; set it to {rollout.groups_per_step} or less"
        )


def _forms_batches(recipe: Recipe) -> str:
    return "vLLM forms its batches" if recipe.engine.kind == "vllm" else "a server forms its batches"


def _adapter_refusals(recipe: Recipe) -> Iterator[str]:
    """What can't be had together with adapters, or not without them."""
    lora, quantize = recipe.model.lora, recipe.model.quantize
    if lora is None:
        if quantize is not None:
            yield (
                f"model.quantize={quantize}: weights of so few bits can't be trained themselves; train adapters beside them "
                "with model.lora.rank=16, or set model.quantize=null"
            )
        return
    if lora.dropout:
        yield (
            f"model.lora.dropout={lora.dropout:g}: the policy that is trained must be the one that sampled, so nothing is "
            "dropped; set model.lora.dropout=0"
        )
    if recipe.engine.kind == "vllm_server" and quantize is not None:
        yield (
            f"model.quantize={quantize} with engine.kind=vllm_server: its base would have other weights than the trainer's; "
            "set model.quantize=null, or use engine.kind=hf"
        )
    if recipe.engine.kind == "vllm":
        yield (
            "model.lora with engine.kind=vllm: adapters reach vLLM as files, which servers load; use engine.kind=vllm_server, "
            "on the trainer's GPU with trainer.devices=[0] engine.devices=[0], or engine.kind=hf"
        )
    if recipe.engine.kind == "hf_server":
        yield (
            f"model.lora with engine.kind={recipe.engine.kind}: the engine must hold the same base weights, which only an "
            "engine in the driver's process is sure to; use engine.kind=hf, or set model.lora=null"
        )
    if recipe.trainer.reference_device == "cpu":
        yield (
            "trainer.reference_device=cpu with model.lora: the reference is the policy with its adapters off, and has no "
            "weights of its own to keep there; set trainer.reference_device=same"
        )


def _length(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """`run.steps` from `run.epochs`, or the other way round."""
    run, groups = recipe.run, recipe.rollout.groups_per_step
    if num_train_tasks is not None and num_train_tasks < 1:
        raise ConfigError(
            f"data: {num_train_tasks} training tasks; there must be at least 1: check data.path and environment.args"
        )
    if run.epochs is None and run.steps is None:
        raise ConfigError("run.steps and run.epochs are both missing; give one of them, such as run.steps=200")
    if num_train_tasks is None:
        if run.epochs is not None:
            raise ConfigError(
                f"run.epochs={run.epochs:g}: the training tasks have no end, so there are no epochs; give run.steps"
            )
        return recipe
    if run.epochs is None:
        assert run.steps is not None, "one of steps and epochs is given"
        reasons["run.epochs"] = f"{run.steps} steps x {groups} tasks / {num_train_tasks} training tasks"
        return with_values(recipe, "run", epochs=run.steps * groups / num_train_tasks)
    steps = math.ceil(run.epochs * num_train_tasks / groups * (1 - 1e-12))
    if run.steps is None:
        reasons["run.steps"] = f"{run.epochs:g} epochs x {num_train_tasks} training tasks / {groups} tasks a step, rounded up"
        return with_values(recipe, "run", steps=steps)
    if run.steps != steps:
        raise ConfigError(
            f"run.steps={run.steps} and run.epochs={run.epochs:g} disagree: {run.epochs:g} epochs of {num_train_tasks} tasks "
            f"are {steps} steps of {groups}; set one of the two to null"
        )
    return recipe


def _tasks(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """A step takes each task once."""
    groups = recipe.rollout.groups_per_step
    if num_train_tasks and groups > num_train_tasks:
        raise ConfigError(
            f"rollout.groups_per_step={groups} but there are only {num_train_tasks} training tasks, and a step takes each task "
            f"once; set rollout.groups_per_step={num_train_tasks} or less"
        )
    return recipe


def _learning_rate(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    if recipe.trainer.learning_rate is not None:
        return recipe
    if recipe.model.path == "builtin:tiny":
        rate, what = _TINY_LEARNING_RATE, "builtin:tiny"
    elif recipe.model.lora is not None:
        rate, what = _LORA_LEARNING_RATE, "training adapters (model.lora)"
    else:
        rate, what = _FULL_LEARNING_RATE, "training all weights of a pretrained model"
    reasons["trainer.learning_rate"] = f"the usual one for {what}"
    return with_values(recipe, "trainer", learning_rate=rate)


def _master_weights(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """What keeps small updates follows from the type of the weights; what would do nothing, or can't be done, is refused."""
    trainer, half = recipe.trainer, recipe.model.dtype == "bfloat16"
    given = trainer.master_weights
    if trainer.offload_optimizer and trainer.optimizer == "adamw_8bit":
        raise ConfigError(
            "trainer.offload_optimizer=true with trainer.optimizer=adamw_8bit: the state in CPU memory is a full one, stepped "
            "there; use trainer.optimizer=adamw, or trainer.offload_optimizer=false"
        )
    if given == "auto":
        chosen = "float32" if half else "none"
        reasons["trainer.master_weights"] = (
            "most updates are too small for bfloat16 weights, and would be rounded away" if half else "the weights are float32"
        )
        return with_values(recipe, "trainer", master_weights=chosen)
    if given != "none" and not half:
        raise ConfigError(
            f"trainer.master_weights={given}: the weights are {recipe.model.dtype} already, and lose nothing; "
            "use trainer.master_weights=auto, or model.dtype=bfloat16"
        )
    if given != "float32" and half and trainer.offload_optimizer:
        raise ConfigError(
            f"trainer.offload_optimizer=true with trainer.master_weights={given}: what is stepped in CPU memory are float32 "
            "weights; use trainer.master_weights=float32, or trainer.offload_optimizer=false"
        )
    return recipe


def _row_tokens(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str], *, usual: int) -> Recipe:
    """A row must hold the longest trajectory: the default grows with it, a value that was given is refused.

    A GPU computes a short row faster than its kernels can be launched, so there a row holds more samples.
    """
    longest, given = recipe.rollout.max_trajectory_tokens, recipe.trainer.row_tokens
    if given is None:
        fits = max(usual, longest)
        reasons["trainer.row_tokens"] = (
            f"the usual {usual}, and at least a whole trajectory, of rollout.max_trajectory_tokens={longest}"
        )
        return with_values(recipe, "trainer", row_tokens=fits)
    if given < longest:
        raise ConfigError(
            f"trainer.row_tokens={given}: a row must hold a whole trajectory, of rollout.max_trajectory_tokens={longest}; "
            f"set trainer.row_tokens={longest}, or rollout.max_trajectory_tokens={given}"
        )
    return recipe


def _warmup(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """The warm-up must end within the run: the default shrinks with it, a value that was given is refused."""
    given, total = recipe.trainer.warmup_steps, batch_arithmetic(recipe, num_train_tasks).optimizer_steps
    if given is None:
        fits = _WARMUP_STEPS if total is None else min(_WARMUP_STEPS, total)
        reasons["trainer.warmup_steps"] = f"the usual {_WARMUP_STEPS}, or the run's optimizer steps when those are fewer"
        return with_values(recipe, "trainer", warmup_steps=fits)
    if total is not None and given > total:
        raise ConfigError(
            f"trainer.warmup_steps={given}: the warm-up is longer than the run, which makes {total} optimizer steps; "
            f"set trainer.warmup_steps={total} or less, or a longer run"
        )
    return recipe


def _loss(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """Every axis of the loss: from the recipe, else from its preset, else from engine and token budget."""
    from polyturn.config.presets import resolve_loss

    rollout, algorithm, every_steps = recipe.rollout, recipe.algorithm, recipe.weight_sync.every_steps
    budget = batch_arithmetic(recipe, num_train_tasks).max_sampled_tokens_per_trajectory
    in_step = recipe.engine.kind in ("hf", "hf_server") and every_steps == 1
    given = algorithm.loss_options
    filled: LossOptions = resolve_loss(
        algorithm.loss, given, fixed_length=budget, default_correction="none" if in_step else "tis"
    )
    special = {
        "fixed_length": f"token budget of a trajectory: {rollout.max_turns} turns x {rollout.max_turn_tokens} tokens, "
        f"at most rollout.max_trajectory_tokens={rollout.max_trajectory_tokens}",
        "sampler_correction": "the engine samples with the trainer's own weights"
        if in_step
        else "vLLM computes in another order than the trainer, so their probabilities differ a little"
        if recipe.engine.kind.startswith("vllm") and every_steps == 1
        else f"weights are pushed every {every_steps} steps, so the engine's probabilities lag behind the trainer's",
    } | dict.fromkeys(
        ("sampler_level", "sampler_low", "sampler_high"), f"usual with sampler_correction={filled.sampler_correction}"
    )
    for name in LossOptions.model_fields:
        if getattr(given, name) is None and getattr(filled, name) is not None:
            reasons[f"algorithm.loss_options.{name}"] = special.get(name, f"preset {algorithm.loss}")
    return with_values(recipe, "algorithm", loss_options=filled)


def _commented(values: Mapping[str, Any], path: tuple[str, ...], reasons: Mapping[str, str]) -> CommentedMap:
    """A section as ruamel writes it, with the reasons above their keys."""
    tree = CommentedMap()
    for name, value in values.items():
        here = (*path, name)
        is_section = path == ("algorithm",) and name == "loss_options"
        tree[name] = _commented(value, here, reasons) if is_section else _plain(value, here)
        reason = reasons.get(".".join(here))
        if reason:
            printable = "".join(letter if letter.isprintable() else "?" for letter in reason)
            tree.yaml_set_comment_before_after_key(name, before=printable, indent=2 * len(path))
    return tree


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """`value` in the types that YAML has. Raises ConfigError for any other."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{'.'.join(path)}: the key {key!r} is not text; a recipe has text keys only")
        return {_plain(key, path): _plain(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, path) for inner in value]
    if isinstance(value, str) and not value.isprintable():
        return DoubleQuotedScalarString(value)  # ruamel writes U+0085 and its like bare, and reads them as line ends
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{'.'.join(path)}: a {type(value).__name__} can't be written to a recipe; give text, numbers, lists or mappings"
    )
