"""Polyturn trains multi-turn language-model agents with GRPO and turn-level credit."""

__version__ = "0.1.0.dev0"
