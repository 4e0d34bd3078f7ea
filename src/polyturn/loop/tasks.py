"""Tasks of a recipe: from the environment itself, or from rows of the user's file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyturn.config.schema import Recipe
from polyturn.data.rows import read_rows
from polyturn.environments.base import Environment, TaskList
from polyturn.errors import DataError, EnvironmentSetupError, PolyturnError
from polyturn.types import Split, Task, TaskSource


def load_tasks(recipe: Recipe, environment: Environment, split: Split) -> TaskSource:
    """The tasks of a split. With `data.path` both splits come from files; without `data.eval_path` none are held out.

    Raises:
        DataError: every bad row, as `file:line: reason`, a line each; or a file that can't be read.
        EnvironmentSetupError: the environment can't make its tasks.
    """
    if recipe.data.path is None:
        with authors_code(f"{environment.name}.tasks({split!r}, {recipe.run.seed})"):
            return environment.tasks(split, recipe.run.seed)
    path = recipe.data.path if split == "train" else recipe.data.eval_path
    return TaskList([]) if path is None else tasks_from_file(path, environment)


def tasks_from_file(path: str, environment: Environment) -> TaskList:
    """Tasks from the rows of a JSONL file, with ids `file:line`. Raises DataError naming every bad row."""
    tasks: list[Task] = []
    problems: list[str] = []
    for where, row in read_rows(path):
        try:
            tasks.append(environment.task_from_row(row, where))
        except DataError as error:
            problems.append(f"{where}: {error}")
        except Exception as error:
            problems.append(f"{where}: {environment.name}.task_from_row raised {type(error).__name__}: {error}")
    if problems:
        raise DataError("\n".join(problems))
    return TaskList(tasks)


def held_out_tasks(recipe: Recipe, environment: Environment, episodes: int | None = None) -> list[Task]:
    """The first `episodes` (the recipe's number when None) held-out tasks; fewer when there are no more."""
    count = recipe.evaluation.episodes if episodes is None else episodes
    source = load_tasks(recipe, environment, "eval")
    with authors_code(f"a held-out task of {environment.name}"):
        return [source[index] for index in range(count if source.size is None else min(count, source.size))]


@contextmanager
def authors_code(what: str) -> Iterator[None]:
    """Turn whatever an author's code raises while it makes tasks into EnvironmentSetupError, a sentence."""
    try:
        yield
    except PolyturnError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"{what} raised {type(error).__name__}: {error}") from error
