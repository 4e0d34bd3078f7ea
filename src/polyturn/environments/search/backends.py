"""Builds the back end that an environment's arguments name."""

from __future__ import annotations

from typing import Literal, get_args

from polyturn.environments.search.base import SearchBackend
from polyturn.environments.search.facts import BUILTIN, facts_index
from polyturn.errors import EnvironmentSetupError, nearest

BackendName = Literal["bm25", "http", "wikipedia"]


def build_backend(
    name: BackendName, *, corpus: str | None, url: str | None, token_env: str | None, contact: str | None
) -> SearchBackend:
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
    given = {"url": (url, ("http", "wikipedia")), "token_env": (token_env, ("http",)), "contact": (contact, ("wikipedia",))}
    for argument, (value, takers) in given.items():
        if value is not None and name not in takers:
            raise EnvironmentSetupError(
                f"environment.args.{argument}={value!r} is for backend={' or '.join(takers)}, not for {name}; remove one"
            )
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
    if name == "http":
        from polyturn.environments.search.http import HttpSearch

        return HttpSearch(url, token_env=token_env)
    from polyturn.environments.search.wikipedia import Wikipedia

    return Wikipedia(contact, url=url)
