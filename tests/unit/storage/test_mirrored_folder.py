"""A disk tier in a folder that something copies while it is written to, as SageMaker does with /opt/ml/checkpoints."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from parts.checkpoints import RUN, holds, make
from polyturn.storage.stores import LocalStore
from polyturn.storage.tiers import Tier, Tiers


class Copying(LocalStore):
    """A disk of which a copier takes some files, whole or in part, after every file that is written."""

    def __init__(self, root: Path, copy: Path, rng: random.Random) -> None:
        super().__init__(root)
        self._copy, self._rng = copy, rng

    def put(self, file, key, *, link=False):
        super().put(file, key, link=link)
        self.copy()

    def put_if_absent(self, content, key):
        stored = super().put_if_absent(content, key)
        self.copy()
        return stored

    def copy(self) -> None:
        for path in self._rng.sample(files := sorted(path for path in self.root.rglob("*") if path.is_file()), len(files) // 2):
            raw, target = path.read_bytes(), self._copy / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            torn = self._rng.random() < 0.3
            target.write_bytes(raw[: self._rng.randrange(len(raw) + 1)] if torn else raw)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_restored_verifies_or_is_passed_over(tmp_path, seed):
    rng = random.Random(seed)
    here = Tiers(RUN, [Tier("disk", Copying(tmp_path / "opt", tmp_path / "copy", rng), keep=2)], say=lambda _: None)
    for step in (1, 2, 3, 4):
        here.publish(*make(tmp_path / "work", step))
        here.prune()
    shutil.rmtree(tmp_path / "opt")
    restored = Tiers(RUN, [Tier("disk", LocalStore(tmp_path / "copy"))], say=lambda _: None)
    found = restored.fetch_newest(tmp_path / "in", link=False)
    newest = max((stored.step for _, stored in restored.checkpoints()), default=0)
    if found.checkpoint is None:
        assert len(found.rejected) == len(list(restored.checkpoints()))
    else:
        assert holds(tmp_path / "in", found.checkpoint.manifest.step)
        assert found.checkpoint.manifest.step == newest or found.rejected


def test_names_differ_over_ranks_and_no_file_is_seen_before_it_is_whole(tmp_path):
    """Each machine seals its own files, and every name in the folder but a draft's is a whole file's."""
    seen: list[str] = []

    class Watching(LocalStore):
        def put(self, file, key, *, link=False):
            super().put(file, key, link=link)
            seen.extend(path.name for path in self.root.rglob("*") if path.is_file())

    names = [f"__{rank}_0.distcp" for rank in range(3)]
    tiers = Tiers(RUN, [Tier("disk", Watching(tmp_path / "opt"))])
    folder, manifest = make(tmp_path / "work", 1, {name: bytes(5000) + name.encode() for name in names})
    tiers.publish(folder, manifest, link=False)
    assert {name for name in seen if ".draft-" not in name} == {shard.stored for shard in manifest.shards}
    assert len({shard.stored for shard in manifest.shards}) == 3
