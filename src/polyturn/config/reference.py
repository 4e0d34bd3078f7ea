"""Writes the reference of the recipe from the schema: `python -m polyturn.config.reference > docs/recipe.md`."""

from __future__ import annotations

from typing import Any

from polyturn.config.section import Section
from polyturn.config.sentences import expected_words, section_of, sections

_HEAD = """\
# The recipe

Every key a recipe may hold. This page is written from `src/polyturn/config/schema.py` by `make docs`; don't edit it by hand.

A recipe is one YAML file. On the command line, `section.key=value` after the file overrides a key, and the value is YAML:
`polyturn train recipe.yaml rollout.group_size=4 environment.args.level=hard`. Where the default is `null`, the
key is switched off, or derived from the rest: `--dry-run` and the run's own `recipe.yaml` say what it became and why. YAML
here is version 1.2: `1e-6` is a number, `no` is text.
"""


def reference() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for path, section in sections():
        parts.append(f"## {'.'.join(path)}\n\n{(section.__doc__ or '').strip()}\n\n{_table(section)}")
    return "\n".join(parts)


def _table(section: type[Section]) -> str:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if section_of(field.annotation):
            continue
        default = "*required*" if field.is_required() else _default(field.get_default(call_default_factory=True))
        cells = (f"`{name}`", expected_words(field.annotation, field), default, field.description or "")
        rows.append(f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    """A default as YAML writes it."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value}`"


if __name__ == "__main__":
    print(reference(), end="")
