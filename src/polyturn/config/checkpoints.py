"""Places of checkpoints that can't be had together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from polyturn.config.checkpoint_section import CheckpointSection
from polyturn.config.schema import Recipe

_MIRROR = "memory-tier://"
_DAEMON = re.compile(r"http://[^/\s]+")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*")


def checkpoint_refusals(recipe: Recipe) -> Iterator[str]:
    """A sentence for each."""
    yield from _mirror_refusals(recipe.checkpoint)
    yield from _library_refusals(recipe.checkpoint, recipe.run.name)


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


def _library_refusals(section: CheckpointSection, name: str) -> Iterator[str]:
    if section.backend != "sagemaker_tiered":
        if section.memory_daemon is not None:
            yield (
                f"checkpoint.memory_daemon={section.memory_daemon} is for checkpoint.backend=sagemaker_tiered; set that, or "
                "name a daemon of ours in checkpoint.mirrors"
            )
        return
    if section.memory_daemon is not None and not _DAEMON.fullmatch(section.memory_daemon):
        yield f"checkpoint.memory_daemon={section.memory_daemon}: give http://HOST:PORT"
    if section.url is not None and not section.url.startswith("s3://"):
        yield f"checkpoint.url={section.url} with checkpoint.backend=sagemaker_tiered: it writes to S3; give s3://bucket/prefix"
    for key, given, instead in (
        ("sse", section.sse, "set the default encryption of the bucket"),
        ("kms_key_id", section.kms_key_id, "set the default encryption of the bucket"),
        ("endpoint_url", section.endpoint_url, "set AWS_ENDPOINT_URL"),
    ):
        if given is not None:
            yield (
                f"checkpoint.{key}={given} with checkpoint.backend=sagemaker_tiered: its library takes none; {instead}, "
                "or use checkpoint.backend=polyturn"
            )
    if section.url is None and section.every.memory is None:
        yield (
            "checkpoint.backend=sagemaker_tiered has no tier to write to; set checkpoint.every.memory=1, or "
            "checkpoint.url=s3://bucket/prefix"
        )
    if not _NAMESPACE.fullmatch(name):
        yield (
            f"run.name={name} with checkpoint.backend=sagemaker_tiered: it names them there; give letters, digits, "
            "'.', '_' and '-'"
        )
