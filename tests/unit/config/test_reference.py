from __future__ import annotations

from pathlib import Path

from polyturn.config.reference import reference
from polyturn.config.sentences import sections

PAGE = Path(__file__).parents[3] / "docs" / "recipe.md"


def test_the_committed_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/recipe.md is out of date; run `make docs`"


def test_every_key_is_there_with_a_meaning():
    page = reference()
    for path, section in sections():
        assert f"\n## {'.'.join(path)}\n" in page
        for name, field in section.model_fields.items():
            assert field.description or (path, name) == (("algorithm",), "loss_options"), f"{path}.{name} has no docstring"
    assert "| `betas` | a list of 2 numbers | `[0.9, 0.95]` | AdamW betas. |" in page
    assert "| `top_p` | a number above 0 and at most 1 | `1.0` |" in page
    assert "| `path` | text | *required* |" in page
