"""Places of checkpoints that can't be had together."""

from __future__ import annotations

from collections.abc import Iterator

from polyturn.config.schema import CheckpointSection, Recipe

_MIRROR = "memory-tier://"


def checkpoint_refusals(recipe: Recipe) -> Iterator[str]:
    """A sentence for each."""
    yield from _mirror_refusals(recipe.checkpoint)


def _mirror_refusals(section: CheckpointSection) -> Iterator[str]:
    mirrors = section.mirrors
    if mirrors and section.every.memory is None:
        yield (
            f"checkpoint.mirrors={','.join(mirrors)}: they get what the memory tier gets, and that one is off; set "
            "checkpoint.every.memory=1"
        )
    for url in mirrors:
        if not url.startswith(_MIRROR):
            yield f"checkpoint.mirrors={url}: a mirror is a daemon of `polyturn memory-tier serve`; give {_MIRROR}HOST:9300"
    if len({url.rstrip("/") for url in (*mirrors, section.url or "")}) <= len(mirrors):
        yield f"checkpoint.mirrors={','.join(mirrors)}: a place is named twice, also by checkpoint.url; name each once"
