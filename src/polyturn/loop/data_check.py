"""`polyturn data`: a file against its own form, and against what a recipe makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyturn.config.schema import MixEntry, Recipe, SandboxSection
from polyturn.data.formats import row_in
from polyturn.data.load import Loaded, load
from polyturn.data.transform import Transform
from polyturn.data.validate import Checked, Wanted, check_file, check_references
from polyturn.environments import build_environment
from polyturn.environments.base import Environment
from polyturn.errors import DataError
from polyturn.loop.openings import encode_all, encoder, recipe_renderer
from polyturn.loop.parts import build_sandbox, recipe_resources
from polyturn.loop.tasks import task_of
from polyturn.sandbox.base import Sandbox
from polyturn.sandbox.runner import SandboxRunner
from polyturn.types import Message, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A row as training would open it. `row` is None where it is in no built-in format; `num_tokens` needs a recipe."""

    where: str
    fields: Mapping[str, Any]
    row: Row | None
    messages: Sequence[Message]
    problems: tuple[str, ...] = ()
    num_tokens: int | None = None


def check_data(
    path: str,
    *,
    recipe: Recipe | None = None,
    transform: str | None = None,
    sandbox: Sandbox | None = None,
    use_cache: bool = True,
    style: bool = True,
) -> Checked:
    """Check a file; with a recipe also against its environment, tokenizer and context, and with its transform.

    In `sandbox`, which is started and stopped here, the references of code rows are run against their tests.

    Raises:
        UserError: there is no such file, the recipe can't be used, or the machine can't keep programs apart.
        SandboxError: the sandbox broke.
    """
    function = _transform(recipe, path, transform)
    wanted = Wanted(style=style)
    if recipe is not None:
        environment = _environment(recipe, path)
        renderer = recipe_renderer(recipe, environment)
        wanted = Wanted(
            knows_row=environment.knows_row,
            need_answer=environment.needs_answer,
            need_difficulty=recipe.data.curriculum == "easy_first",
            make_task=partial(_opening, environment),
            encode_all=encode_all(recipe, renderer, path, function, use_cache=use_cache),
            context_tokens=recipe.rollout.max_trajectory_tokens,
            turn_tokens=min(recipe.rollout.max_turn_tokens, recipe.rollout.max_trajectory_tokens),
            style=style,
        )
    checked = check_file(path, function, wanted)
    if sandbox is not None:
        asyncio.run(_run_references(checked, sandbox))
    return checked


def tests_sandbox(recipe: Recipe | None) -> Sandbox:
    """Where references are run: in the recipe's sandbox, without a recipe in one on this machine. Not started yet."""
    return build_sandbox(SandboxSection() if recipe is None else recipe.sandbox)


def show_rows(
    path: str, *, lines: Sequence[int] | None, count: int, recipe: Recipe | None = None, transform: str | None = None
) -> list[Shown]:
    """The first `count` rows of a file, or those on `lines`, as training would open them.

    Raises:
        DataError: a line that holds no row.
    """
    loaded = load(path, _transform(recipe, path, transform))
    environment = None if recipe is None else _environment(recipe, path)
    encode = None if recipe is None or environment is None else encoder(recipe_renderer(recipe, environment))
    shown = []
    for line, fields in _chosen(loaded, lines, count):
        need_answer = environment is None or environment.needs_answer
        row, problems = row_in(fields, loaded.place(line), loaded.format, need_answer=need_answer)
        messages: Sequence[Message] = () if row is None else row.messages
        if environment is not None:
            try:
                messages = _opening(environment, fields, row, loaded.place(line))
                problems = ()
            except DataError as error:
                messages, problems = (), (str(error),)
        num_tokens = len(encode(messages)) if encode is not None and messages else None
        shown.append(
            Shown(where=loaded.place(line), fields=fields, row=row, messages=messages, problems=problems, num_tokens=num_tokens)
        )
    return shown


def _environment(recipe: Recipe, path: str) -> Environment:
    """The environment that reads a file. Rewards are left out, they read no rows."""
    entry, resources = _part(recipe, path), recipe_resources(recipe.sandbox)
    if entry is not None:
        return build_environment(entry.environment, entry.args, resources)
    return build_environment(recipe.environment.id, recipe.environment.args, resources)


def _transform(recipe: Recipe | None, path: str, given: str | None) -> Transform | None:
    """The transform of a file: the one given, else that of the part of the recipe that names the file."""
    if given is None and recipe is not None:
        given = (_part(recipe, path) or recipe.data).transform
    return None if given is None else Transform(given)


def _part(recipe: Recipe, path: str) -> MixEntry | None:
    """The part of a mix that names a file, None for the recipe's own environment."""
    return next((entry for entry in recipe.data.mix if path in (entry.path, entry.eval_path)), None)


def _opening(environment: Environment, fields: Mapping[str, Any], row: Row | None, where: str) -> Sequence[Message]:
    if environment.knows_row(fields):
        return task_of(environment, fields, where).messages
    if row is None:
        raise DataError(f"environment {environment.name} reads rows in a built-in format, and this one is in none")
    return environment.task_from_example(row).messages


def _chosen(loaded: Loaded, lines: Sequence[int] | None, count: int) -> list[tuple[int, Mapping[str, Any]]]:
    if lines is None:
        return list(loaded.rows[:count])
    by_line = dict(loaded.rows)
    wrong = dict(loaded.problems)
    for line in lines:
        if line not in by_line:
            reason = wrong.get(line, "no row starts on this line")
            raise DataError(f"{loaded.place(line)}: {reason}")
    return [(line, by_line[line]) for line in lines]


async def _run_references(checked: Checked, sandbox: Sandbox) -> None:
    await sandbox.start()
    try:
        await check_references(checked, SandboxRunner(sandbox=sandbox))
    finally:
        await sandbox.stop()
