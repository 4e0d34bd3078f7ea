"""A run's checkpoints over all its tiers: memory, disk, object store.

    tiers = Tiers("lookup", [Tier("memory", LocalStore("/dev/shm/polyturn")), Tier("s3", open_store("s3://..."), every=50)])
    manifest = seal(folder, run_id="lookup", step=42, policy_version=42)
    tiers.publish(folder, manifest)
    found = tiers.fetch_newest(folder)

A tier that fails costs seconds and a sentence, never a checkpoint of another tier. The run is found by its id, which is the
same after every restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.guard import STALL_S, guarded
from polyturn.storage.leases import leased
from polyturn.storage.manifest import DamagedError, Manifest, Place, check_run_id, read_manifest, step_name, why_not_whole
from polyturn.storage.publish import download, publish
from polyturn.storage.retention import GRACE_S, StoredStep, deleted_after, prune, stored_steps
from polyturn.storage.stores.base import MissingKeyError, Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tier:
    """A store, and what of a run goes there: every how many steps, how many newest are kept, which milestones (0: none)."""

    name: str
    store: Store
    every: int = 1
    keep: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1 or self.keep_every < 0:
            raise ConfigError(
                f"tier {self.name}: every={self.every}, keep={self.keep}, keep_every={self.keep_every}; "
                "the first two must be 1 or more, the last 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a tier, with a valid manifest."""

    tier: str
    place: Place
    manifest: Manifest

    def __str__(self) -> str:
        return f"{step_name(self.manifest.step)} in tier {self.tier} ({self.place})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How publishing to one tier went. `sentence` is for the log; empty when all is well."""

    tier: str
    ok: bool
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, and a sentence for everything that was not taken.

    `checkpoint` None and `unreachable` not empty means: not known. Then nobody should start from scratch.
    """

    checkpoint: Checkpoint | None
    rejected: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


class Tiers:
    """All tiers of one run, the fastest first. Methods block; each request to a tier has a deadline (see `guard`).

    Several threads may publish at once, each to tiers of its own.
    """

    def __init__(
        self,
        run_id: str,
        tiers: Iterable[Tier],
        *,
        say: Callable[[str], None] = _log.warning,
        stall_s: float = STALL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.run_id = check_run_id(run_id)
        self.tiers = tuple(
            Tier(tier.name, guarded(tier.store, tier.name, stall_s=stall_s), tier.every, tier.keep, tier.keep_every)
            for tier in tiers
        )
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"the tiers {', '.join(names)} must have names that differ")
        self._say = say
        self._grace_s = grace_s
        self._published: dict[str, Manifest] = {}

    def due(self, step: int) -> list[str]:
        """Names of the tiers that a checkpoint of this step goes to."""
        return [tier.name for tier in self.tiers if step % tier.every == 0]

    def place(self, tier: Tier, step: int) -> Place:
        """Where the checkpoint of a step is in a tier, whether it is there or not."""
        return Place(tier.store, f"{self.run_id}/{step_name(step)}")

    def publish(
        self, folder: str | Path, manifest: Manifest, *, only: Iterable[str] | None = None, link: bool = True
    ) -> list[Outcome]:
        """Copy a sealed checkpoint to the tiers that are due, or to those named in `only`, one after the other.

        Never raises for a tier that fails: that is an Outcome, and a sentence that is said. `link`: a tier on the same disk
        may share the folder's files, which must then never be written to again.
        """
        if manifest.run_id != self.run_id:
            raise ConfigError(f"a checkpoint of run {manifest.run_id} can't be published as one of run {self.run_id}")
        names = set(self.due(manifest.step) if only is None else only)
        outcomes = []
        for tier in self.tiers:
            if tier.name in names:
                outcomes.append(self._publish(Path(folder), manifest, tier, link=link))
        return outcomes

    def checkpoints(self) -> Iterator[tuple[Tier, StoredStep]]:
        """What all tiers hold, whole or not: by step, the newest first, then by tier. Tiers that fail are said and left out."""
        found, _ = self._stored()
        yield from found

    def newest_verified(self, *, deep: bool = True) -> Search:
        """The newest checkpoint that verifies, over all tiers, walking back with a sentence for every one rejected."""

        def verified(checkpoint: Checkpoint) -> str | None:
            return why_not_whole(checkpoint.place, checkpoint.manifest, deep=deep)

        return self._search(verified)

    def fetch_newest(self, into: str | Path, *, link: bool = True) -> Search:
        """Fetch the newest checkpoint whose every byte arrives as sealed into the folder `into`, walking back as above."""
        tried: set[str] = set()

        def fetched(checkpoint: Checkpoint) -> str | None:
            tried.update(shard.name for shard in checkpoint.manifest.shards)
            return self.fetch(checkpoint, into, link=link)

        found = self._search(fetched)
        if found.checkpoint is not None:
            for name in tried - {shard.name for shard in found.checkpoint.manifest.shards}:
                (Path(into) / name).unlink(missing_ok=True)  # of a newer one that was not whole
        return found

    def fetch(self, checkpoint: Checkpoint, into: str | Path, *, link: bool = True) -> str | None:
        """Fetch a checkpoint into a folder, as it was sealed, under a lease. A sentence when what came is not whole.

        Raises StorageError when the tier fails.
        """
        with leased(checkpoint.place) as lease:
            try:
                read_manifest(checkpoint.place)  # after the lease: see `leases`
            except (MissingKeyError, DamagedError) as error:
                return str(error)
            renew = (lambda: None) if lease is None else lease.keep
            return download(checkpoint.manifest, checkpoint.place, Path(into), link=link, after_each=renew)

    def prune(self, *, only: Iterable[str] | None = None) -> list[str]:
        """Delete what each tier need not keep, and dead remains; a sentence each. Tiers that fail are said and left out."""
        names = {tier.name for tier in self.tiers} if only is None else set(only)
        said: list[str] = []
        for tier in self.tiers:
            if tier.name in names:
                try:
                    said += prune(tier.store, self.run_id, keep=tier.keep, keep_every=tier.keep_every, grace_s=self._grace_s)
                except StorageError as error:
                    self._say(f"tier {tier.name} was not pruned: {error}")
        return said

    def rewind(self, step: int) -> list[str]:
        """Delete every checkpoint later than `step` on every tier: for training that goes on from an older one on purpose.

        Raises StorageError when a tier can't be asked: a later checkpoint there would be taken at the next resume.
        """
        return [sentence for tier in self.tiers for sentence in deleted_after(tier.store, self.run_id, step)]

    def _publish(self, folder: Path, manifest: Manifest, tier: Tier, *, link: bool) -> Outcome:
        last = self._published.get(tier.name)
        known = last is not None and (last.step, last.shards) == (manifest.step, manifest.shards)
        try:
            sentence = publish(folder, manifest, self.place(tier, manifest.step), link=link, known=known)
        except StorageError as error:
            outcome = Outcome(tier.name, ok=False, sentence=f"{step_name(manifest.step)} is not in tier {tier.name}: {error}")
        else:
            outcome = Outcome(tier.name, ok=True, sentence=sentence or "")
            if sentence is None:
                self._published[tier.name] = manifest
        if outcome.sentence:
            self._say(outcome.sentence)
        return outcome

    def _stored(self) -> tuple[list[tuple[Tier, StoredStep]], list[str]]:
        found: list[tuple[Tier, StoredStep]] = []
        unreachable = []
        for tier in self.tiers:
            try:
                found += [(tier, stored) for stored in stored_steps(tier.store, self.run_id)]
            except StorageError as error:
                unreachable.append(f"tier {tier.name} could not be asked: {error}")
                self._say(unreachable[-1])
        return sorted(found, key=lambda pair: -pair[1].step), unreachable  # a stable sort keeps the order of the tiers

    def _search(self, why_not: Callable[[Checkpoint], str | None]) -> Search:
        found, unreachable = self._stored()
        rejected: list[str] = []
        for tier, stored in found:
            where = f"{step_name(stored.step)} in tier {tier.name}"
            try:
                manifest = read_manifest(stored.place)
                if (manifest.run_id, manifest.step) != (self.run_id, stored.step):
                    fault: str | None = f"its manifest is of {manifest.run_id}, {step_name(manifest.step)}"
                else:
                    checkpoint = Checkpoint(tier.name, stored.place, manifest)
                    fault = why_not(checkpoint)
                    if fault is None:
                        return Search(checkpoint, tuple(rejected), tuple(unreachable))
            except (MissingKeyError, DamagedError) as error:
                fault = str(error)
            except StorageError as error:
                unreachable.append(f"{where} could not be read: {error}")
                self._say(unreachable[-1])
                continue
            rejected.append(f"{where} is not taken: {fault}")
            self._say(rejected[-1])
        return Search(None, tuple(rejected), tuple(unreachable))
