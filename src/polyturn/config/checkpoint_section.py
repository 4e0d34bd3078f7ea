"""When and where the state of a run is saved: the recipe's section `checkpoint`. Field docstrings are its documentation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polyturn.config.section import Section

MEMORY, DISK, REMOTE = "memory", "disk", "s3"
"""The tiers, as the fields of `every` and `keep` are called."""


class CheckpointEvery(Section):
    """Every how many steps a checkpoint goes to each tier; null: never."""

    memory: int | None = Field(default=None, gt=0)
    """Shared memory of this machine: survives a crash of the process, and costs as much memory as it keeps."""
    disk: int | None = Field(default=25, gt=0)
    """The run folder."""
    s3: int | None = Field(default=None, gt=0)
    """`checkpoint.url`; as `disk` when a URL is given and this is not."""


class CheckpointKeep(Section):
    """How many of the newest checkpoints stay in each tier."""

    memory: int = Field(default=1, gt=0)
    """In memory, and in each of `checkpoint.mirrors`."""
    disk: int = Field(default=3, gt=0)
    """In the run folder."""
    s3: int = Field(default=3, gt=0)
    """At `checkpoint.url`."""
    milestones: int = Field(default=0, ge=0)
    """Checkpoints of every N-th step stay for good, on disk and at the URL; 0: none."""


class CheckpointSection(Section):
    """When the state of a run is saved, and where. See docs/checkpoints.md."""

    backend: Literal["polyturn", "sagemaker_tiered"] = "polyturn"
    """`sagemaker_tiered`: Amazon's library for HyperPod writes memory and S3, and our manifest says what is whole there."""
    memory_daemon: str | None = None
    """With `sagemaker_tiered`: `http://HOST:PORT` of the memory daemon; null: where HyperPod serves its own."""
    every: CheckpointEvery = Field(default_factory=CheckpointEvery)
    """Every how many steps, by tier. A run that ends or is stopped is saved on every tier that is not null."""
    keep: CheckpointKeep = Field(default_factory=CheckpointKeep)
    """How many are kept, by tier."""
    mirrors: tuple[str, ...] = Field(default=(), strict=False)
    """Daemons of `polyturn memory-tier serve` on other machines (`memory-tier://HOST:9300`); each gets what goes to memory."""
    url: str | None = None
    """An object store or any other place of fsspec's, such as `s3://bucket/prefix`."""
    endpoint_url: str | None = None
    """Of an S3 server that is not AWS's."""
    sse: Literal["AES256", "aws:kms"] | None = None
    """How S3 encrypts what is written there."""
    kms_key_id: str | None = None
    """Key of `aws:kms`; the account's own when null."""
    contents: Literal["all", "model"] = "all"
    """`model`: the weights alone, a third of the size or less; a run can't go on from that, a new one can start from it."""
    export_every: int | None = Field(default=None, gt=0)
    """Every N steps the model is written to `exports/step_N` of the run folder, as transformers loads it."""
    deadline_s: float = Field(default=600.0, gt=0)
    """At the end of a run, or when it is stopped: time for its last checkpoint to get everywhere."""

    def mirror_tiers(self) -> dict[str, str]:
        """URLs of the memory of other machines, by tier."""
        return {f"mirror-{number}": url for number, url in enumerate(self.mirrors, 1)}

    def cadence(self) -> dict[str, int]:
        """Every how many steps each tier is due, the fastest first; those that are not used are left out."""
        every = self.every
        remote = None if self.url is None else every.s3 or every.disk or 1
        found = {MEMORY: every.memory, DISK: every.disk, **dict.fromkeys(self.mirror_tiers(), every.memory), REMOTE: remote}
        return {tier: steps for tier, steps in found.items() if steps is not None}

    def kept(self, tier: str) -> int:
        """How many of the newest stay in a tier."""
        return int(getattr(self.keep, tier if tier in (DISK, REMOTE) else MEMORY))
