"""Places of checkpoints that are refused together."""

from __future__ import annotations

import pytest

from polyturn.config.checkpoints import checkpoint_refusals
from polyturn.config.schema import CheckpointEvery, CheckpointSection, EnvironmentSection, ModelSection, Recipe

PEER = "memory-tier://peer:9300"
MEMORY = CheckpointEvery(memory=1)


def refusals(**given):
    recipe = Recipe(
        model=ModelSection(path="x"), environment=EnvironmentSection(id="lookup"), checkpoint=CheckpointSection(**given)
    )
    return list(checkpoint_refusals(recipe))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mirrors": (PEER,)}, "that one is off; set checkpoint.every.memory=1"),
        ({"every": MEMORY, "mirrors": ("s3://bucket/x",)}, "checkpoint.mirrors=s3://bucket/x: a mirror is a daemon"),
        ({"every": MEMORY, "mirrors": (PEER, f"{PEER}/")}, "a place is named twice"),
        ({"every": MEMORY, "mirrors": (PEER,), "url": PEER}, "a place is named twice, also by checkpoint.url"),
    ],
)
def test_what_does_not_go_together(given, sentence):
    (said,) = refusals(**given)
    assert sentence in said


def test_what_goes_together():
    assert refusals() == []
    assert refusals(every=MEMORY, mirrors=(PEER, "memory-tier://other:9300"), url="s3://bucket/x") == []
