"""Places of checkpoints that are refused together."""

from __future__ import annotations

import pytest

from polyturn.config.checkpoint_section import CheckpointEvery, CheckpointSection
from polyturn.config.checkpoints import checkpoint_refusals
from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, RunSection

PEER = "memory-tier://peer:9300"
MEMORY = CheckpointEvery(memory=1)
S3 = "s3://bucket/prefix"
LIBRARY = {"backend": "sagemaker_tiered"}


def refusals(name="lookup", **given):
    recipe = Recipe(
        run=RunSection(name=name),
        model=ModelSection(path="x"),
        environment=EnvironmentSection(id="lookup"),
        checkpoint=CheckpointSection(**given),
    )
    return list(checkpoint_refusals(recipe))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mirrors": (PEER,)}, "that one is off; set checkpoint.every.memory=1"),
        ({"every": MEMORY, "mirrors": ("s3://bucket/x",)}, "checkpoint.mirrors=s3://bucket/x: a mirror is a daemon"),
        ({"every": MEMORY, "mirrors": (PEER, f"{PEER}/")}, "a place is named twice"),
        ({"every": MEMORY, "mirrors": (PEER,), "url": PEER}, "a place is named twice, also by checkpoint.url"),
        ({"memory_daemon": "http://a:1"}, "is for checkpoint.backend=sagemaker_tiered"),
        ({**LIBRARY, "every": MEMORY, "memory_daemon": "a:1"}, "checkpoint.memory_daemon=a:1: give http://HOST:PORT"),
        ({**LIBRARY, "url": "/mnt/x"}, "it writes to S3; give s3://bucket/prefix"),
        ({**LIBRARY, "url": S3, "sse": "AES256"}, "set the default encryption of the bucket"),
        ({**LIBRARY, "url": S3, "endpoint_url": "http://a"}, "set AWS_ENDPOINT_URL"),
        (LIBRARY, "has no tier to write to; set checkpoint.every.memory=1"),
        ({**LIBRARY, "url": S3, "name": "my run"}, "give letters, digits, '.', '_' and '-'"),
    ],
)
def test_what_does_not_go_together(given, sentence):
    (said,) = refusals(**given)
    assert sentence in said


def test_what_goes_together():
    assert refusals() == []
    assert refusals(**LIBRARY, url=S3) == []
    assert refusals(**LIBRARY, every=MEMORY, memory_daemon="http://node-b:9300") == []
    assert refusals(every=MEMORY, mirrors=(PEER, "memory-tier://other:9300"), url="s3://bucket/x") == []
