"""The schema in plain words: what a key expects, and a sentence with a fix for every way a value breaks it."""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from polyturn.config.schema import Recipe
from polyturn.config.section import Section
from polyturn.config.yaml_lines import KeyPath, dotted
from polyturn.errors import nearest

_LONGEST_VALUE = 60
_WORDS_OF_OTHERS = dict.fromkeys(
    ("find_unused_parameters", "ddp_find_unused_parameters"),
    "there is no such switch: a parameter without a gradient counts as zeros and is never waited for; remove it",
) | dict.fromkeys(
    ("use_reentrant", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "trainer.activations=selective or full computes activations again, always without re-entering autograd; set that",
)
"""Keys of other trainers that have no counterpart, and why."""
_BOOL_WORDS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}


def section_of(annotation: Any) -> type[Section] | None:
    """The section class behind a field's annotation, `| None` or not; None where the field is a plain value."""
    annotation = _not_none(annotation)
    return annotation if inspect.isclass(annotation) and issubclass(annotation, Section) else None


def item_section_of(annotation: Any) -> type[Section] | None:
    """The section class of the items of a list, None where a field is no list of sections."""
    arguments = get_args(annotation)
    return section_of(arguments[0]) if get_origin(annotation) is tuple and arguments else None


def sections(model: type[Section] = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Every section of the schema with its path, in the order of the schema; `name[]` holds a list of them."""
    for name, field in model.model_fields.items():
        inner, item = section_of(field.annotation), item_section_of(field.annotation)
        found, step = (inner, name) if inner is not None else (item, f"{name}[]")
        if found is not None:
            yield (*path, step), found
            yield from sections(found, (*path, step))


def required(model: type[Section], path: tuple[str, ...] = ()) -> list[str]:
    """Dotted keys without a default: `model.path` and the like."""
    keys = []
    for name, field in model.model_fields.items():
        if field.is_required():
            inner = section_of(field.annotation)
            keys += [dotted((*path, name))] if inner is None else required(inner, (*path, name))
    return keys


def kind_words(value: object) -> str:
    """What a value read from YAML is, in words."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "a truth value"
    for kind, words in ((int, "a whole number"), (float, "a number"), (str, "text"), (list, "a list"), (dict, "a mapping")):
        if isinstance(value, kind):
            return words
    return f"a {type(value).__name__}"


def expected_words(annotation: Any, field: FieldInfo | None = None) -> str:
    """What a key expects, in words: `a whole number above 0`, `one of adamw, sgd`."""
    annotation = _not_none(annotation)
    if section_of(annotation):
        return "a section of keys"
    if annotation in (int, float):
        words = "a whole number" if annotation is int else "a number"
        bounds = _bounds(field)
        return f"{words} {bounds}" if bounds else words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if origin is dict:
        return "a mapping of names to numbers" if arguments[1] is float else "a mapping"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each {expected_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    return {bool: "true or false", str: "text"}.get(annotation, "any value")


def schema_problems(error: ValidationError) -> list[tuple[KeyPath, str]]:
    """Path and sentence for everything pydantic found."""
    found = error.errors(include_url=False, include_context=False)
    # A list with a bad item is also said to be too short: pydantic counts only the good ones.
    inside = {problem["loc"][:-1] for problem in found}
    return [
        (problem["loc"], _sentence(problem))
        for problem in found
        if problem["type"] != "too_short" or problem["loc"] not in inside
    ]


def _sentence(problem: ErrorDetails) -> str:
    path, value, kind = problem["loc"], problem["input"], problem["type"]
    if kind == "extra_forbidden":
        return _unknown(path)
    annotation, field = _field_at(path)
    inner = section_of(annotation)
    if kind == "missing" and inner:
        return f"this section is missing; it needs {', '.join(required(inner))}"
    if kind == "missing" and isinstance(path[-1], int):
        return f"this list needs another value; {_words_at(path[:-1])} is needed"
    if kind == "missing":
        meaning = (field.description or "").rstrip(".") if field else ""
        return f"required and missing: {meaning}" if meaning else "required and missing"
    choices = get_args(_not_none(annotation))
    if get_origin(_not_none(annotation)) is Literal:
        return f"{_shown(value)} is no valid value; {nearest(str(value), [str(choice) for choice in choices])}"
    expected = expected_words(annotation, field)
    fix = _fix(annotation, field, value)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{_shown(value)} is out of range; {expected} is needed: {fix}"
    if kind == "too_short":
        return f"this list is empty; {expected} is needed: {fix}"
    if value is None:
        return f"no value; {expected} is needed: {fix}"
    return f"{_shown(value)} is {kind_words(value)}; {expected} is needed: {fix}"


def _fix(annotation: Any, field: FieldInfo | None, value: object) -> str:
    """What to write instead, as near to `value` as can be."""
    annotation = _not_none(annotation)
    section = section_of(annotation)
    if section:
        return f"put keys below it, such as {next(iter(section.model_fields))}"
    if annotation is bool and isinstance(value, str) and value.lower() in _BOOL_WORDS:
        return f"write {_BOOL_WORDS[value.lower()]}"
    if annotation in (int, float) and isinstance(value, str) and _reads_as(annotation, value):
        return f"write {value.strip()} without quotes"
    if annotation is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if annotation is str and isinstance(value, bool | int | float):
        return f"quote it, '{str(value).lower()}'"
    if get_origin(annotation) is tuple and isinstance(value, str | int | float):
        example = [value] if get_args(annotation)[-1] is Ellipsis else (field.default if field else ())
        return f"write [{', '.join(str(item) for item in example)}]"
    if field is None or field.is_required():
        return "give one"
    default = field.get_default(call_default_factory=True)
    if default in ({}, None):
        return "give one, or leave the key out"
    return f"give one, or leave the key out for {_shown(list(default) if isinstance(default, tuple) else default)}"


def _unknown(path: KeyPath) -> str:
    """For a key that the schema does not have: the section it belongs in, or the nearest key."""
    name = str(path[-1])
    if name in _WORDS_OF_OTHERS:
        return f"unknown key, {_WORDS_OF_OTHERS[name]}"
    here, _ = _field_at(path[:-1])
    own = list((section_of(here) or Recipe).model_fields)
    homes = [dotted(home) for home, section in sections() if name in section.model_fields and home != path[:-1]]
    if homes:
        return f"unknown key, it belongs in the section {' or '.join(homes)}"
    everywhere = {key: dotted((*home, key)) for home, section in sections() for key in section.model_fields}
    far = difflib.get_close_matches(name, everywhere, n=1)
    if far and not difflib.get_close_matches(name, own, n=1):
        return f"unknown key, did you mean {everywhere[far[0]]}?"
    return f"unknown key, {nearest(name, own)}"


def _field_at(path: KeyPath) -> tuple[Any, FieldInfo | None]:
    """Annotation of the value at `path` and, where it is a key of a section, its field."""
    annotation: Any = Recipe
    field: FieldInfo | None = None
    for part in path:
        section = section_of(annotation)
        arguments = get_args(_not_none(annotation))
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field else Any
        elif isinstance(part, int) and arguments:
            annotation, field = arguments[0], None
        else:
            annotation, field = arguments[1] if len(arguments) > 1 else Any, None
    return annotation, field


def _words_at(path: KeyPath) -> str:
    annotation, field = _field_at(path)
    return expected_words(annotation, field)


def _not_none(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        left = [choice for choice in get_args(annotation) if choice is not type(None)]
        return left[0] if len(left) == 1 else annotation
    return annotation


def _bounds(field: FieldInfo | None) -> str:
    """`above 0`, `from 0 to 1`, or nothing."""
    limits = {
        name: getattr(item, name)
        for item in (field.metadata if field else ())
        for name in ("gt", "ge", "lt", "le")
        if hasattr(item, name)
    }
    if "ge" in limits and "le" in limits:
        return f"from {limits['ge']:g} to {limits['le']:g}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    return " and ".join(f"{words[name]} {limits[name]:g}" for name in ("gt", "ge", "lt", "le") if name in limits)


def _reads_as(kind: type[int] | type[float], text: str) -> bool:
    try:
        return math.isfinite(kind(text))
    except ValueError:
        return False


def _shown(value: object) -> str:
    """A value as YAML shows it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
