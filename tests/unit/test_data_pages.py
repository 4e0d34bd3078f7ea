"""docs/data.md and docs/rewards.md name everything that is built in, and their recipes are recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyturn.config.load import load_recipe
from polyturn.config.schema import RewardEntry
from polyturn.data.formats import FORMATS, OPTIONAL
from polyturn.data.readers import SUFFIXES
from polyturn.environments.rewards.registry import BUILTIN

DOCS = Path(__file__).parents[2] / "docs"
DATA, REWARDS = ((DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "rewards.md"))


def test_formats_fields_and_containers():
    for form in FORMATS:
        assert f"| `{form.name}` |" in DATA
    for name in (*OPTIONAL, *SUFFIXES):
        assert f"`{name}`" in DATA


def test_rewards_and_their_keys():
    for name in BUILTIN:
        assert f"| `{name}` |" in REWARDS
    for name in RewardEntry.model_fields:
        assert f"| `{name}` |" in REWARDS


@pytest.mark.parametrize("page", [DATA, REWARDS], ids=["data", "rewards"])
def test_the_yaml_on_the_pages_is_a_recipe(page, tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    assert blocks
    text = "model: {path: 'builtin:tiny'}\n" + "".join(blocks)
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.environment.rewards
