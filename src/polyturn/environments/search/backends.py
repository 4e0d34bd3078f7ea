"""Builds the back end that an environment's arguments name."""

from __future__ import annotations

from typing import Literal, get_args

from polyturn.environments.search.base import SearchBackend
from polyturn.environments.search.facts import BUILTIN, facts_index
from polyturn.errors import EnvironmentSetupError, nearest

BackendName = Literal["bm25", "http", "wikipedia"]


def build_backend(name: BackendName, *, corpus: str | None, url: str | None, token_env: str | None) -> SearchBackend:
    """The back end, not yet started.

    Raises:
        EnvironmentSetupError: an unknown name, or an argument that is missing or belongs to another back end.
        MissingDependencyError, DataError: see the back ends.
    """
    if name not in get_args(BackendName):
        raise EnvironmentSetupError(
            f"environment.args.backend={name!r} is no back end of search_qa; {nearest(str(name), get_args(BackendName))}"
        )
    if name != "bm25" and corpus is not None:
        raise EnvironmentSetupError(f"environment.args.corpus={corpus!r} is for backend=bm25, not for {name}; remove one")
    if name == "bm25" and (url is not None or token_env is not None):
        raise EnvironmentSetupError("environment.args.url and token_env are for backend=http, and backend is bm25; remove them")
    if name == "bm25":
        if corpus is None:
            raise EnvironmentSetupError(
                f"environment search_qa needs environment.args.corpus, a .jsonl or .jsonl.gz file or {BUILTIN}; "
                "or backend=http with a url"
            )
        if corpus == BUILTIN:
            return facts_index()
        from polyturn.environments.search.bm25 import Bm25

        return Bm25(corpus)
    raise EnvironmentSetupError(f"environment.args.backend={name} is not there yet")
