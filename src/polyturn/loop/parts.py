"""The environment of a recipe: built, with the recipe's rewards, and mixed with the others it names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from polyturn.config.schema import Recipe, RewardEntry, SandboxSection
from polyturn.environments import build_environment
from polyturn.environments.base import Environment
from polyturn.environments.calls import call
from polyturn.environments.mixed import Mixed
from polyturn.environments.resources import Resources
from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.registry import build_rewards
from polyturn.errors import ConfigError, EnvironmentSetupError, PolyturnError
from polyturn.processes.deadlines import deadline
from polyturn.sandbox.base import MIB, Limits, Sandbox
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.runner import SandboxRunner

STOP_DEADLINE_S = 60.0
"""How long an environment, or the sandbox, may take to stop."""


def recipe_environment(recipe: Recipe, resources: Resources | None = None) -> Environment:
    """The environment that plays a recipe's tasks. `resources` are what rewards may ask for, such as a sandbox.

    Raises:
        ConfigError, EnvironmentSetupError: an environment or a reward that can't be built, or nothing that scores.
    """
    main = recipe.environment
    first = _part(main.id, main.args, main.rewards, resources)
    if not recipe.data.mix:
        return first
    parts = {first.name: first}
    for entry in recipe.data.mix:
        environment = _part(entry.environment, entry.args, entry.rewards, resources)
        name = entry.name or environment.name
        if name in parts:
            raise EnvironmentSetupError(f"two parts of data.mix are called {name!r}; give one a name of its own, as in name: b")
        parts[name] = environment
    return Mixed(parts)


def recipe_resources(section: SandboxSection) -> Resources:
    """What the environments and rewards of a recipe may ask for."""
    return Resources(make_sandbox=lambda: build_sandbox(section), make_runner=lambda sandbox: SandboxRunner(sandbox=sandbox))


def build_sandbox(section: SandboxSection) -> Sandbox:
    """The sandbox that a recipe describes, not started yet.

    Raises:
        ConfigError: a runner without a URL, a token that is not there, a setting that the kind does not have.
    """
    limits = Limits(
        wall_s=section.wall_s,
        cpu_s=section.cpu_s,
        memory_bytes=section.memory_mib * MIB,
        num_processes=section.num_processes,
        output_bytes=section.output_kib * 1024,
        file_bytes=section.file_mib * MIB,
    )
    if section.kind == "local":
        if section.url is not None or section.token_env is not None:
            raise ConfigError("sandbox.url and sandbox.token_env belong to a runner; set sandbox.kind=http, or remove them")
        return LocalSandbox(
            limits,
            concurrency=section.concurrency,
            import_paths=section.import_paths,
            isolation=section.isolation,
            unsafe=section.unsafe,
        )
    if section.url is None:
        raise ConfigError("sandbox.kind=http needs sandbox.url, such as http://127.0.0.1:8808")
    if section.import_paths or section.isolation != "auto":
        raise ConfigError("sandbox.import_paths and sandbox.isolation are the runner's own to say; remove them")
    token = None if section.token_env is None else os.environ.get(section.token_env)
    if section.token_env is not None and not token:
        raise ConfigError(f"sandbox.token_env={section.token_env}: this variable is not set; set it to the runner's token")
    return HttpSandbox(section.url, token=token, limits=limits, concurrency=section.concurrency or 32, unsafe=section.unsafe)


@contextlib.asynccontextmanager
async def opened(environment: Environment, resources: Resources, start_deadline_s: float) -> AsyncIterator[None]:
    """Start what the trajectories of a run share, and stop it however the block ends.

    Raises:
        UserError, ResourceError: it can't be started; whatever else `start` raises becomes EnvironmentSetupError.
    """
    try:
        async with deadline(start_deadline_s, f"the start of {environment.name} (environment.start_deadline_s)"):
            await resources.start()
            await _started(environment)
        yield
    finally:
        async with deadline(STOP_DEADLINE_S, f"the stop of {environment.name}"):
            try:
                await call(environment.stop)
            finally:
                await resources.stop()


async def _started(environment: Environment) -> None:
    try:
        await call(environment.start)
    except PolyturnError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"{environment.name}.start raised {type(error).__name__}: {error}") from error


def component_weights(recipe: Recipe) -> dict[str, float]:
    """Weight of each outcome component that has one: those of the rewards, then `environment.reward_weights`.

    Raises:
        EnvironmentSetupError: two parts of a mix weigh a component differently.
    """
    weights: dict[str, float] = {}
    for entry in (*recipe.environment.rewards, *(entry for part in recipe.data.mix for entry in part.rewards)):
        if entry.per == "trajectory" and weights.setdefault(entry.component, entry.weight) != entry.weight:
            raise EnvironmentSetupError(
                f"two parts of data.mix weigh the reward {entry.component} {weights[entry.component]:g} and {entry.weight:g}; "
                "give one another name"
            )
    return weights | recipe.environment.reward_weights


def _part(
    environment_id: str, args: Mapping[str, Any], rewards: Sequence[RewardEntry], resources: Resources | None
) -> Environment:
    environment = build_environment(environment_id, args, resources)
    built = build_rewards(rewards, resources)
    if built:
        environment = Rewarded(environment, built)
    if not environment.scores:
        raise EnvironmentSetupError(
            f"environment {environment.name} scores nothing itself; list a reward under environment.rewards, "
            "such as {path: exact_match}"
        )
    return environment
