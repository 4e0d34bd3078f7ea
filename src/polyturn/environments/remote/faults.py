"""Exceptions on their way to the driver: what an author's code raised comes back with its type's name and its sentence.

A rollout writes a fault as `name raised Type: text`. It should read the same whether the code ran here or there, so an
exception of our own tree comes back as the same class, and any other as one that is called like the original.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from polyturn import errors
from polyturn.environments.remote.wire import Document
from polyturn.errors import PolyturnError, ResourceError

MOST_CHARS = 1 << 20
"""Of the sentence; a longer one is cut."""
_OURS = {name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, PolyturnError)}


class AuthorError(Exception):
    """Base of what an environment process's code raised and our tree doesn't have. The class is called like the original."""


def from_error(error: BaseException) -> Document:
    """An exception as JSON."""
    ours = next((kind.__name__ for kind in type(error).__mro__ if _OURS.get(kind.__name__) is kind), None)
    try:
        text = str(error)
    except Exception:  # the author's own __str__
        text = "it can't be shown as text"
    return {"type": type(error).__name__, "ours": ours, "text": text[:MOST_CHARS]}


def to_error(document: Any, where: str) -> Exception:
    """The exception again, its sentence followed by the process it came from; ResourceError for what is none."""
    if not isinstance(document, dict):
        return ResourceError(f"{where} answered an error that is none")
    name, ours, text = document.get("type"), document.get("ours"), document.get("text")
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(text, str) or not isinstance(ours, str | None):
        return ResourceError(f"{where} answered an error that is none")
    return _kind(name, ours)(f"{text} (in {where})" if text else f"(in {where})")


@lru_cache(maxsize=256)
def _kind(name: str, ours: str | None) -> type[Exception]:
    base: type[Exception] = AuthorError if ours is None else _OURS.get(ours, ResourceError)
    return base if base.__name__ == name else type(name, (base,), {})
