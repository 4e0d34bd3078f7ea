"""Tasks of a recipe: from the environment itself, or from rows of the user's file; and the order they are taken in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from polyturn.config.schema import Recipe
from polyturn.data.hub import with_split
from polyturn.data.load import load, refuse
from polyturn.data.mix import MixedStream, MixedTasks, Part, named
from polyturn.data.stream import Stream, TaskStream
from polyturn.data.transform import Transform
from polyturn.environments.base import Environment, TaskList
from polyturn.environments.mixed import Mixed
from polyturn.errors import DataError, EnvironmentSetupError, PolyturnError
from polyturn.types import Json, Split, Task, TaskSource


def load_tasks(recipe: Recipe, environment: Environment, split: Split) -> TaskSource:
    """The tasks of a split. With `data.path` both splits come from files; without `data.eval_path` none are held out.

    Raises:
        DataError: every bad row, as `file:line: reason`, a line each; or a file that can't be read.
        EnvironmentSetupError: the environment can't make its tasks.
    """
    data = recipe.data
    if not isinstance(environment, Mixed):
        return _load(environment, split, recipe.run.seed, data.path, data.eval_path, data.transform)
    (name, first), *others = environment.parts.items()
    source = _load(first, split, recipe.run.seed, data.path, data.eval_path, data.transform)
    parts = [Part(name=name, source=source, weight=data.weight)]
    for (name, other), entry in zip(others, data.mix, strict=True):
        source = _load(other, split, recipe.run.seed, entry.path, entry.eval_path, entry.transform)
        parts.append(Part(name=name, source=source, weight=entry.weight))
    return MixedTasks(parts)


def tasks_from_file(path: str, environment: Environment, transform: str | None = None) -> TaskList:
    """Tasks from the rows of a file, with ids `file:line`. Raises DataError naming every bad row."""
    loaded = load(path, None if transform is None else Transform(transform))
    tasks: list[Task] = []
    problems = list(loaded.problems)
    formatted = loaded.formatted(need_answer=environment.needs_answer, own=environment.knows_row)
    for line, fields in loaded.rows:
        try:
            if environment.knows_row(fields):
                tasks.append(task_of(environment, fields, loaded.place(line)))
                continue
            _, row, found = next(formatted)
            problems += [(line, problem) for problem in found]
            if row is not None:
                tasks.append(environment.task_from_example(row))
        except DataError as error:
            problems.append((line, str(error)))
    refuse(loaded, problems)
    return TaskList(tasks)


def task_of(environment: Environment, fields: Mapping[str, Any], where: str) -> Task:
    """A task from a row's own fields; its difficulty goes along for the curriculum. Raises DataError for a wrong row."""
    try:
        task = environment.task_from_row(fields, where)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{environment.name}.task_from_row raised {type(error).__name__}: {error}") from error
    difficulty: Json = fields.get("difficulty")
    if difficulty in (None, "") or "difficulty" in task.info:
        return task
    return replace(task, info={**task.info, "difficulty": difficulty})


def open_stream(recipe: Recipe, tasks: TaskSource, *, cursor: int = 0) -> Stream:
    """The order in which training takes `tasks`. Raises DataError for a curriculum or a mix that can't be."""
    data, seed = recipe.data, recipe.run.seed
    if isinstance(tasks, MixedTasks):
        return MixedStream(tasks.parts, seed=seed, shuffle=data.shuffle, curriculum=data.curriculum, cursor=cursor)
    return TaskStream(tasks, seed=seed, shuffle=data.shuffle, curriculum=data.curriculum, cursor=cursor)


def held_out_tasks(recipe: Recipe, environment: Environment, episodes: int | None = None) -> list[Task]:
    """The first `episodes` (the recipe's number when None) held-out tasks; fewer when there are no more.

    Of a mix, each part gives its share by weight, as far as it has tasks.
    """
    count = recipe.evaluation.episodes if episodes is None else episodes
    source = load_tasks(recipe, environment, "eval")
    with authors_code(f"a held-out task of {environment.name}"):
        if not isinstance(source, MixedTasks):
            return _first(source, count)
        parts = [part for part in source.parts if part.source.size != 0]
        whole, given, tasks = sum(part.weight for part in parts), 0.0, list[Task]()
        for part in parts:
            start, given = round(count * given / whole), given + part.weight
            tasks += [named(part.name, task) for task in _first(part.source, round(count * given / whole) - start)]
        return tasks


@contextmanager
def authors_code(what: str) -> Iterator[None]:
    """Turn whatever an author's code raises while it makes tasks into EnvironmentSetupError, a sentence."""
    try:
        yield
    except PolyturnError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"{what} raised {type(error).__name__}: {error}") from error


def _load(
    environment: Environment, split: Split, seed: int, path: str | None, eval_path: str | None, transform: str | None
) -> TaskSource:
    if path is None:
        with authors_code(f"{environment.name}.tasks({split!r}, {seed})"):
            return environment.tasks(split, seed)
    chosen = path if split == "train" else eval_path
    if chosen is not None:
        chosen = with_split(chosen, "train" if split == "train" else "test")
    return TaskList([]) if chosen is None else tasks_from_file(chosen, environment, transform)


def _first(source: TaskSource, count: int) -> list[Task]:
    return [source[index] for index in range(count if source.size is None else min(count, source.size))]
