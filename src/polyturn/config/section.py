"""What all sections of a recipe are."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict

Value = TypeVar("Value")


def filled(value: Value | None) -> Value:
    """A setting that is never None in a resolved recipe."""
    assert value is not None, "the recipe was not resolved"
    return value


class Section(BaseModel):
    """A frozen section of the recipe that refuses unknown keys and silent type conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
