"""A recipe as roles: which processes a run has, in which order they start, and what is set in the environment of each."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyturn.config.schema import Recipe
from polyturn.engine.vllm_arguments import refuse_arguments
from polyturn.launch.gpus import Placement, num_own_servers, place
from polyturn.launch.specs import RoleSpec
from polyturn.processes.gpus import VISIBLE
from polyturn.processes.role import AGENT

TRAINER_START_S = 600.0
"""Time until every rank of the trainer writes its heartbeat: starting Python, and importing torch in the agent."""

ROLE_S = 30.0
"""What the role of a vLLM server takes besides waiting for vLLM."""

_SECRET = re.compile(r"(key|token|secret|passw\w*|credentials?)(_|$)", re.IGNORECASE)


def needs_processes(recipe: Recipe) -> bool:
    """Whether a run has more than one process."""
    return recipe.engine.kind.endswith("_server") or recipe.trainer.num_ranks > 1 or recipe.environment.num_processes > 0


def role_specs(
    recipe: Recipe,
    gpus: Sequence[str],
    config: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    cores: int | None = None,
    elsewhere: bool = False,
) -> list[RoleSpec]:
    """The roles of a run in the order they start. `gpus` are those of `visible_gpus`, `config` is the resolved recipe's file.

    `elsewhere`: they will not start on this machine, which need not have what they need.
    Raises ConfigError for GPUs that can't be given out as the recipe says, UserError for a vLLM that can't be started.
    """
    placement = place(recipe, gpus)
    if recipe.engine.kind == "vllm_server" and num_own_servers(recipe):
        variables = {**environ, **recipe.launch.env}
        refuse_arguments(recipe, variables, on_gpu=bool(placement.engines), elsewhere=elsewhere)
    settings = _Variables(recipe, placement, environ, cores or _cores())
    # vLLM is awaited by its role, which can show the end of its log.
    start_s = recipe.engine.start_deadline_s + (ROLE_S if recipe.engine.kind == "vllm_server" else 0.0)
    specs = [
        _spec(f"environment-{number}", config, settings.of("environment"), recipe.environment.start_deadline_s, "environment")
        for number in range(recipe.environment.num_processes)
    ]
    specs += [
        _spec(f"engine-{number}", config, settings.of("engine", number), start_s, "engine")
        for number in range(num_own_servers(recipe))
    ]
    agent = RoleSpec(
        name=AGENT,
        argv=_command(AGENT, config),
        environment=settings.of("trainer"),
        start_deadline_s=TRAINER_START_S,
        needs=tuple(spec.name for spec in specs),
        members=tuple(f"trainer-{rank}" for rank in range(recipe.trainer.num_ranks)),
    )
    return [*specs, agent]


def described(spec: RoleSpec) -> str:
    """One line: a role's name and what is set in its environment; what may be a secret is only said to be set.

    >>> spec = RoleSpec(name="engine-0", argv=(), environment={"API_KEY": "x", "OMP_NUM_THREADS": "2"}, start_deadline_s=1.0)
    >>> described(spec)
    'engine-0: API_KEY=(set) OMP_NUM_THREADS=2 POLYTURN_RUN_TOKEN=(set)'
    """
    shown = {name: "(set)" if _SECRET.search(name) and value else value for name, value in spec.environment.items()}
    shown["POLYTURN_RUN_TOKEN"] = "(set)"
    name = f"{spec.name} ({spec.members[0]} to {spec.members[-1]})" if len(spec.members) > 1 else spec.name
    return f"{name}: {' '.join(f'{key}={_quoted(shown[key])}' for key in sorted(shown))}"


class _Variables:
    """What is set in the environment of a role, by kind and number."""

    def __init__(self, recipe: Recipe, placement: Placement, environ: Mapping[str, str], cores: int) -> None:
        self._recipe = recipe
        self._placement = placement
        self._environ = environ
        num_engines = num_own_servers(recipe)
        self._threads = max(1, cores // (recipe.trainer.num_ranks + num_engines))
        self._talks = recipe.trainer.num_ranks > 1 or num_engines > 0

    def of(self, kind: str, number: int = 0) -> dict[str, str]:
        gpus = self._gpus(kind, number)
        usual = {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_WAIT_POLICY": "PASSIVE",  # idle threads that spin take the cores from whoever works
            "OMP_NUM_THREADS": str(self._threads),
        }
        if kind == "trainer" and gpus:
            # Rows differ in length from step to step, and segments that grow keep that from cutting memory to pieces. Not
            # for engines: memory of such segments can't be shared with another process, nor be put to sleep.
            usual["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if kind != "environment" and self._talks:
            # All of a run is on one machine: its process groups need no other network, nor a host name that resolves.
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            usual["GLOO_SOCKET_IFNAME"] = loopback
            if gpus:
                usual["NCCL_SOCKET_IFNAME"] = loopback
        chosen = {name: self._environ.get(name) or value for name, value in usual.items()}
        chosen[VISIBLE] = ",".join(gpus)
        if self._environ.get("LOGLEVEL"):
            chosen["LOGLEVEL"] = self._environ["LOGLEVEL"].upper()  # torch reads it too, and knows capitals only
        return chosen | self._recipe.launch.env

    def _gpus(self, kind: str, number: int) -> tuple[str, ...]:
        if kind == "trainer":
            return self._placement.trainer
        size = self._recipe.engine.tensor_parallel_size
        return self._placement.engines[number * size : (number + 1) * size] if kind == "engine" else ()


def _spec(name: str, config: Path, environment: dict[str, str], start_deadline_s: float, section: str) -> RoleSpec:
    return RoleSpec(
        name=name,
        argv=_command(name, config),
        environment=environment,
        start_deadline_s=start_deadline_s,
        deadline_key=f"{section}.start_deadline_s",
    )


def _command(name: str, config: Path) -> tuple[str, ...]:
    return (*_python(), "-m", "polyturn", "role", name, "--config", str(config))


def _python() -> tuple[str, ...]:
    """The interpreter; it looks for modules in the working folder first only where this one does."""
    here_first = bool(sys.path) and Path(sys.path[0] or ".").resolve() == Path.cwd()
    return (sys.executable,) if here_first or sys.version_info < (3, 11) else (sys.executable, "-P")


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quoted(value: str) -> str:
    return f"'{value}'" if not value or " " in value else value
