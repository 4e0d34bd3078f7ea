"""Openings as the recipe's tokenizer cuts them, before anything is trained."""

from __future__ import annotations

import json

import pytest

from polyturn.config.schema import Recipe
from polyturn.environments.base import Vocabulary
from polyturn.environments.builtin.lookup import Lookup
from polyturn.errors import DataError
from polyturn.loop.openings import encode_all, encoder, recipe_renderer, refuse_long_openings, tokenizer_key
from polyturn.loop.parts import recipe_environment
from polyturn.loop.tasks import load_tasks
from polyturn.types import Message
from semantics.scenes import renderer_of


def recipe(path=None, *, limit=64, **data):
    return Recipe.model_validate(
        {
            "model": {"path": "builtin:tiny"},
            "environment": {"id": "lookup", "args": {"instructions": False}},
            "rollout": {"max_trajectory_tokens": limit, "max_turn_tokens": 1},
            "data": {"path": path} | data,
        }
    )


def row(start="maple"):
    return {"start": start, "records": {start: {"value": "seven"}}, "answer": "seven"}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(start)) + "\n" for start in ("maple", "oak", "fern")))
    return str(path)


def test_the_renderer_of_builtin_tiny_needs_no_model():
    made = recipe()
    renderer = recipe_renderer(made, recipe_environment(made))
    messages = (Message(role="user", content="find(maple)"),)
    assert encoder(renderer)(messages) == renderer_of(Lookup(instructions=False).vocabulary()).open(messages).prompt().ids


def test_rows_that_leave_no_room_are_refused_all_of_them(rows):
    made = recipe(rows, limit=6)
    environment = recipe_environment(made)
    tasks = load_tasks(made, environment, "train")
    with pytest.raises(DataError) as caught:
        refuse_long_openings(made, tasks, recipe_renderer(made, environment))
    assert str(caught.value).splitlines() == [
        f"{rows}:{line}: the opening takes 6 tokens, which leaves no room for a reply in rollout.max_trajectory_tokens=6; "
        "leave the row out, or raise the limit"
        for line in (1, 2, 3)
    ]
    refuse_long_openings(recipe(rows, limit=7), tasks, recipe_renderer(made, environment))


def test_words_that_a_tokenizer_does_not_know(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("zebra")) + "\n")
    made = recipe(str(path))
    environment = recipe_environment(made)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the word 'zebra' is not in the tokenizer's vocabulary"):
        refuse_long_openings(made, load_tasks(made, environment, "train"), recipe_renderer(made, environment))


def test_tasks_that_an_environment_makes_are_left_alone():
    made = recipe(limit=1)
    environment = recipe_environment(made)
    refuse_long_openings(made, load_tasks(made, environment, "train"), recipe_renderer(made, environment))


def test_training_and_check_share_the_cache(rows, tmp_path):
    made = recipe(rows, cache_dir=str(tmp_path / "cache"), num_workers=2)
    environment = recipe_environment(made)
    renderer = recipe_renderer(made, environment)
    tasks = load_tasks(made, environment, "train")
    refuse_long_openings(made, tasks, renderer)
    openings = [tasks[index].messages for index in range(3)]
    assert encode_all(made, renderer, rows, None)(openings).from_cache
    assert not encode_all(made, renderer, rows, None, use_cache=False)(openings).from_cache


def test_the_key_follows_tokenizer_and_template():
    words, pattern = ("red", "blue", "x"), "[a-z]+"
    vocabulary = Lookup(instructions=False).vocabulary()
    keys = {tokenizer_key(renderer_of(vocabulary))}
    keys.add(tokenizer_key(renderer_of(Vocabulary(words=words, pattern=pattern, copied=frozenset()))))
    keys.add(tokenizer_key(renderer_of(Vocabulary(words=(*words, "green"), pattern=pattern, copied=frozenset()))))
    assert len(keys) == 3
