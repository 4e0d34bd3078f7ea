"""What the process of a role does, by kind. Only the roles that compute import torch."""

from __future__ import annotations

import asyncio
import sys

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.loop.place import Place, taken
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.role import AGENT, Role


def run_role(role: Role, recipe: Recipe) -> int:
    """Play a role until the run ends, and return its exit code. Raises ConfigError for a role that a recipe doesn't have."""
    if role.name == AGENT:
        from polyturn.trainer.agent import run_agent

        config = str(RunFolder(role.folder).recipe)
        rank = (sys.executable, "-m", "polyturn", "role", "trainer-${local_rank}", "--config", config)
        return run_agent(role, rank, recipe.trainer.num_ranks)
    with taken(role) as place:
        if role.kind == "environment":
            return _play(place, recipe)
        if role.kind == "engine" and recipe.engine.kind == "vllm_server":
            from polyturn.loop.serve_vllm import serve_vllm_role

            return serve_vllm_role(place, recipe)
        if role.kind == "engine":
            from polyturn.loop.serve import serve_engine_role

            return serve_engine_role(place, recipe)
        if role.kind == "trainer":
            from polyturn.loop.drive import train_rank

            return train_rank(place, recipe)
    raise ConfigError(f"{role.name}: this recipe has no such role")


def _play(place: Place, recipe: Recipe) -> int:
    """Serve the environment until a signal comes."""
    from polyturn.environments.remote import serve_environment
    from polyturn.loop.check import check
    from polyturn.loop.stopping import until_signal
    from polyturn.processes.watchdog import LOOP_GRACE_S

    checked = check(recipe)

    async def serve() -> None:
        async with checked.opened():
            limit_s = checked.recipe.rollout.tool_deadline_s + LOOP_GRACE_S
            await serve_environment(place.role, checked.environment, place.heartbeat, loop_limit_s=limit_s)

    asyncio.run(until_signal(serve()))
    return 0
