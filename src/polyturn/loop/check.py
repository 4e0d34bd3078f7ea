"""Everything that can be refused before a model loads: environment, data, estimator, arithmetic, model folder, device.

Needs no torch, so that a mistake is told at once.
"""

from __future__ import annotations

import importlib.util
import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from polyturn.advantages.base import Estimator
from polyturn.advantages.registry import build_estimator
from polyturn.config.resolve import Resolved, resolve
from polyturn.config.schema import Recipe
from polyturn.environments.base import Environment
from polyturn.environments.resources import Resources
from polyturn.errors import ConfigError, MissingDependencyError, ModelError
from polyturn.loop.parts import component_weights, opened, recipe_environment, recipe_resources
from polyturn.loop.tasks import held_out_tasks, load_tasks, open_stream
from polyturn.metrics.run_folder import refuse_name
from polyturn.models.folder import BUILTIN_POSITIONS, SMOLLM2, TINY, adapter_base, is_adapter, local_folder, max_positions
from polyturn.models.smollm2 import check_smollm2
from polyturn.plan.auto_memory import fit_here
from polyturn.plan.auto_parallel import shard_here
from polyturn.plan.auto_sleep import sleep_here
from polyturn.processes.gpus import visible_gpus
from polyturn.rendering.renderer import Renderer
from polyturn.types import Task, TaskSource

_TIERED = "amzn_sagemaker_checkpointing boto3 requests s3torchconnector tenacity"
"""Amazon's library, and what it imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A recipe that can be built, and the light parts that were built to find out."""

    resolved: Resolved
    environment: Environment
    resources: Resources
    train_tasks: TaskSource
    eval_tasks: list[Task]
    estimator: Estimator

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.resolved.recipe

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Within it, the environment and the sandbox are started; no episode is played outside of it."""
        return opened(self.environment, self.resources, self.recipe.environment.start_deadline_s)


def check(recipe: Recipe, *, model: str | None = None, resources: Resources | None = None) -> Checked:
    """Build everything light and resolve the rest. `model` is what will be loaded in place of `model.path`.

    `resources` are what environments and rewards may ask for, those of the recipe when None.

    Raises:
        UserError: the first thing that is wrong, as one sentence (several bad rows: a line each).
    """
    refuse_name(recipe.run.name)
    resources = resources or recipe_resources(recipe.sandbox)
    environment = recipe_environment(recipe, resources)
    component_weights(recipe)
    train_tasks = load_tasks(recipe, environment, "train")
    recipe, sharded = shard_here(recipe, num_tasks=train_tasks.size)
    recipe, chosen = fit_here(recipe, num_tasks=train_tasks.size)
    recipe, asleep = sleep_here(recipe, num_tasks=train_tasks.size)
    resolved = resolve(recipe, num_train_tasks=train_tasks.size, on_gpu=computes_on_gpu(recipe))
    resolved = replace(resolved, reasons={**resolved.reasons, **sharded, **chosen, **asleep})
    open_stream(recipe, train_tasks)
    refuse_unsendable(recipe, train_tasks)
    estimator = build_estimator(recipe.algorithm.advantage, recipe.algorithm.advantage_options)
    refuse_without_states(recipe, environment, estimator)
    eval_tasks = held_out_tasks(resolved.recipe, environment)
    check_model(recipe, environment, model or recipe.model.path)
    check_device_name(recipe.trainer.device)
    check_packages(recipe)
    return Checked(
        resolved=resolved,
        environment=environment,
        resources=resources,
        train_tasks=train_tasks,
        eval_tasks=eval_tasks,
        estimator=estimator,
    )


def computes_on_gpu(recipe: Recipe) -> bool:
    """Whether the trainer will find a GPU to compute on, as far as can be said without torch."""
    return recipe.trainer.device != "cpu" and bool(visible_gpus())


def refuse_unsendable(recipe: Recipe, tasks: TaskSource) -> None:
    """Raise EnvironmentSetupError when environment processes could not be told of the first task."""
    if recipe.environment.num_processes:
        from polyturn.environments.remote import wire  # brings an HTTP library that other runs don't need

        wire.from_task(tasks[0])


def check_packages(recipe: Recipe) -> None:
    """Raise MissingDependencyError when what the recipe asks of the trainer needs a package that is not installed."""
    if recipe.model.attention == "flash_attention_2" and not has_package("flash_attn"):
        raise MissingDependencyError(
            "model.attention=flash_attention_2 needs the package flash_attn; pip install flash-attn, or use "
            "model.attention=auto, which has kernels of that kind without a package"
        )
    by_library = recipe.checkpoint.backend == "sagemaker_tiered"
    needs = {
        "model.lora": ("peft", "lora", recipe.model.lora is not None),
        f"model.quantize={recipe.model.quantize}": ("bitsandbytes", "quantization", recipe.model.quantize is not None),
        "trainer.optimizer=adamw_8bit": ("bitsandbytes", "quantization", recipe.trainer.optimizer == "adamw_8bit"),
        "checkpoint.backend=sagemaker_tiered": (_TIERED, "sagemaker-checkpoints", by_library),
        "trainer.parallel=deepspeed": ("deepspeed", "deepspeed", recipe.trainer.parallel == "deepspeed"),
    }
    for key, (packages, extra, needed) in needs.items():
        missing = [package for package in packages.split() if needed and not has_package(package)]
        if missing:
            raise MissingDependencyError(f"{key} needs the package {missing[0]}; pip install 'polyturn[{extra}]'")


def has_package(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def refuse_without_states(recipe: Recipe, environment: Environment, estimator: Estimator) -> None:
    """Raise ConfigError for an estimator that compares turns by state in an environment that doesn't name its states."""
    if getattr(estimator, "needs_state_keys", False) and not environment.names_states:
        raise ConfigError(
            f"algorithm.advantage={recipe.algorithm.advantage} compares turns by their state, and environment "
            f"{environment.name} names none; choose turn_rtg, or give every StepResult a state_key "
            "and set names_states = True on the environment"
        )


def check_model(recipe: Recipe, environment: Environment, path: str) -> None:
    """What a model's files say, before anything loads them. A hub id is fetched, and looked at, only when the run starts.

    Raises:
        ModelError: a folder that isn't there or holds no model, a context that is too short, no usable chat template.
        EnvironmentSetupError: `builtin:tiny` can't speak the words of this environment.
        MissingDependencyError: `builtin:smollm2` is not in the cache, and what it is made from is not installed.
    """
    if path == TINY:
        environment.vocabulary()
    if path in BUILTIN_POSITIONS:
        refuse_short_context(recipe, path, BUILTIN_POSITIONS[path])
        if path == SMOLLM2:
            check_smollm2()
        return
    folder, template = local_folder(path), chat_template(recipe)
    if folder is None:
        return
    if is_adapter(folder):
        if not has_package("peft"):
            raise MissingDependencyError(f"{path} holds adapters, which need the package peft; pip install 'polyturn[lora]'")
        check_model(recipe, environment, adapter_base(folder))
    else:
        refuse_short_context(recipe, path, max_positions(folder))
    if (folder / "tokenizer.json").is_file() or not is_adapter(folder):
        Renderer.load(folder, chat_template=template)


def chat_template(recipe: Recipe) -> Path | None:
    """The template file that replaces the model's own. Raises ModelError when it isn't there."""
    if recipe.model.chat_template is None:
        return None
    path = Path(recipe.model.chat_template).expanduser()
    if not path.is_file():
        raise ModelError(f"model.chat_template={path} is not a file; name a Jinja file, or remove it")
    return path


def refuse_short_context(recipe: Recipe, path: str, positions: int | None) -> None:
    """Raise ModelError when the longest trajectory has more tokens than the model has positions."""
    longest = recipe.rollout.max_trajectory_tokens
    if positions is not None and positions < longest:
        raise ModelError(
            f"rollout.max_trajectory_tokens={longest} exceeds the {positions} positions of {path}; "
            f"set it to {positions} or less"
        )


def check_device_name(name: str) -> None:
    """Raise ConfigError for what is no name of a device. Whether the device is there shows when the run starts."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"trainer.device={name!r} is no device; use auto, cpu, cuda or cuda:N")
