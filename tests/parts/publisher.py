"""A process that makes checkpoints and publishes them, step after step, until it is killed.

    python publisher.py WORK FIRST_STEP NAME=URL...

Prints `published STEP NAME` when a tier has the step.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.checkpoints import RUN, make
from polyturn.storage.manifest import step_name
from polyturn.storage.stores import open_store
from polyturn.storage.tiers import Tier, Tiers


def main(work: Path, first: int, places: list[str]) -> None:
    """Publish for ever."""
    pairs = [place.split("=", 1) for place in places]
    tiers = Tiers(RUN, [Tier(name, open_store(url), keep=2) for name, url in pairs], say=print)
    step = first
    while True:
        shutil.rmtree(work / step_name(step), ignore_errors=True)
        folder, manifest = make(work, step, big_content(step))
        for name, _ in pairs:
            (outcome,) = tiers.publish(folder, manifest, only=[name], link=False)
            print(f"published {step} {name}" if outcome.ok else f"failed {outcome.sentence}", flush=True)
        tiers.prune()
        shutil.rmtree(folder)
        step += 1


def big_content(step: int) -> dict[str, bytes]:
    """Large enough that a kill often hits the middle of a file."""
    return {f"__{rank}_0.distcp": b"%d %d " % (step, rank) * 60_000 for rank in range(4)} | {".metadata": b"step %d" % step}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
