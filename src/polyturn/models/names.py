"""The models that come with Polyturn, by name. Needs no torch, so that a recipe's model can be checked before one loads."""

from __future__ import annotations

from polyturn.errors import ModelError, nearest

PREFIX = "builtin:"
TINY = "builtin:tiny"
SMOLLM2 = "builtin:smollm2"
BUILTIN = (TINY, SMOLLM2)


def refuse_unknown_builtin(path: str) -> None:
    """Raise ModelError for a `builtin:` name that isn't one, with the nearest that is."""
    if path.startswith(PREFIX) and path not in BUILTIN:
        raise ModelError(f"model.path={path} is no model that comes with Polyturn; {nearest(path, BUILTIN)}")
