"""What tests leave to chance: other draws for every commit, and the same again for the one that failed."""

from __future__ import annotations

import os
import random
import subprocess
from functools import cache
from pathlib import Path

from parts.patience import PATIENCE_S


@cache
def seed() -> str:
    """`POLYTURN_TEST_SEED`, else the commit."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return os.environ.get("POLYTURN_TEST_SEED") or found.stdout.strip() or "no repository"


def chance(what: object) -> random.Random:
    """The draws of `what`."""
    return random.Random(f"{seed()}/{what}")
