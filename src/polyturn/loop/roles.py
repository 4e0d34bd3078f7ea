"""What the process of a role does, by kind."""

from __future__ import annotations

import sys

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.role import AGENT, Role


def run_role(role: Role, recipe: Recipe) -> int:
    """Play a role until it ends, and return its exit code. Raises ConfigError for a role that a recipe doesn't have."""
    if role.name == AGENT:
        from polyturn.trainer.agent import run_agent

        config = str(RunFolder(role.folder).recipe)
        rank = (sys.executable, "-m", "polyturn", "role", "trainer-${local_rank}", "--config", config)
        return run_agent(role, rank, recipe.trainer.num_ranks)
    raise ConfigError(f"{role.name}: this recipe has no such role")
