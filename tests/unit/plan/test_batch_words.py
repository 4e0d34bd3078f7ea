"""Our batch in the words of trainers that count sequences, and the nearest numbers that those take."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.plan import batch_words as module
from polyturn.plan.batch_words import BatchWords, batch_words, indivisible, word_lines


def recipe_of(**sections) -> Recipe:
    base = {"run": {"steps": 10}, "model": {"path": "builtin:tiny"}, "environment": {"id": "lookup"}}
    return resolve(Recipe.model_validate(base | sections), num_train_tasks=None, on_gpu=True).recipe


def words_of(generations: int, each: int, processes: int) -> BatchWords:
    return BatchWords(
        num_generations=generations,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=1,
        num_processes=processes,
    )


def test_seven_gpus_and_sixteen_siblings():
    said = indivisible(words_of(16, 2, 7))
    assert said is not None
    assert said.startswith("7 training GPUs x 2 = 14 sequences do not divide by num_generations=16; use 14, 7 or 2")
    assert said.endswith("per_device_train_batch_size=16")


@pytest.mark.parametrize(("generations", "each", "processes"), [(14, 2, 7), (6, 2, 3), (7, 2, 7), (16, 16, 7)])
def test_what_divides(generations, each, processes):
    assert indivisible(words_of(generations, each, processes)) is None


@given(generations=st.integers(2, 64), each=st.integers(1, 64), processes=st.integers(1, 64))
def test_what_is_offered_divides(generations, each, processes):
    said = indivisible(words_of(generations, each, processes))
    if said is None:
        return
    offered = said.partition("; use ")[2]
    *siblings, least = (int(number) for number in re.findall(r"\d+", offered))
    assert all(indivisible(words_of(number, each, processes)) is None for number in siblings)
    assert indivisible(words_of(generations, least, processes)) is None


def test_words_of_a_recipe_by_hand():
    recipe = recipe_of(
        rollout={"group_size": 2, "groups_per_step": 16, "max_trajectory_tokens": 512}, trainer={"row_tokens": 1024}
    )
    words = batch_words(recipe)
    assert (words.num_generations, words.per_device_train_batch_size, words.gradient_accumulation_steps) == (2, 2, 16)


def test_nothing_has_to_divide_here():
    recipe = recipe_of(rollout={"group_size": 16, "groups_per_step": 4}, trainer={"num_ranks": 7, "row_tokens": 8192})
    words, why = word_lines(recipe)
    assert "num_generations=16 (rollout.group_size), per_device_train_batch_size=2" in words
    assert "14 sequences do not divide by num_generations=16" in why
    assert why.endswith("a rank gets 9 or 10 of the 64 trajectories.")


def test_the_examples():
    assert doctest.testmod(module).failed == 0
