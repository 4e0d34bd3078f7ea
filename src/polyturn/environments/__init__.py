"""Environments: they make tasks, answer the model, and score the end. They speak messages and know nothing about tokens.

`base` is the contract, `registry` finds an environment by name or dotted path, `builtin/` holds one file per environment,
`tools/` what models may call, `rewards/` what scores; `contract` drives one by hand, which is how `polyturn env check` shows an
author what the model would see.
"""

from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary
from polyturn.environments.registry import build_environment, environment_names

__all__ = ["Environment", "Reply", "StepResult", "TaskList", "Vocabulary", "build_environment", "environment_names"]
