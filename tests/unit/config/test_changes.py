"""Which changes of a recipe make a run another one."""

from __future__ import annotations

import pytest

from polyturn.config.changes import _HARMLESS, changes, refuse_changes
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from unit.loop.makers import make_recipe


def found(before=None, **after):
    dumped = [make_recipe(**sections).model_dump(mode="json") for sections in (before or {}, after)]
    return changes(*dumped)


def test_nothing_differs_from_itself():
    assert found() == []


@pytest.mark.parametrize(
    ("after", "harmless"),
    [
        ({"rollout": {"group_size": 6}}, False),
        ({"rollout": {"temperature": 0.5}}, False),
        ({"trainer": {"learning_rate": 0.5}}, False),
        ({"algorithm": {"loss_options": {"beta": 0.1}}}, False),
        ({"environment": {"args": {"level": 3}}}, False),
        ({"model": {"lora": {"rank": 4}}}, False),
        ({"run": {"seed": 1}}, False),
        ({"run": {"steps": 9}}, False),  # its warm-up is longer
        ({"run": {"output_dir": "elsewhere", "name": "b"}}, True),
        ({"checkpoint": {"every": {"disk": 1}}}, True),
        ({"evaluation": {"every_steps": 5}}, True),
        ({"trainer": {"num_ranks": 2}}, True),
        ({"launch": {"env": {"A": "b"}}}, True),
    ],
)
def test_what_changes_what_is_trained(after, harmless):
    made = found(**after)
    assert made
    assert all(change.harmless for change in made) == harmless, made
    if harmless:
        refuse_changes(made)
    else:
        with pytest.raises(ConfigError, match="the run would become another one"):
            refuse_changes(made)


def test_a_longer_run_is_the_same_run():
    (change,) = found({"trainer": {"warmup_steps": 0}}, trainer={"warmup_steps": 0}, run={"steps": 9})
    assert (str(change), change.harmless) == ("run.steps: 2 -> 9", True)


def test_a_schedule_that_ends_with_the_run_binds_its_length():
    trainer = {"schedule": "linear", "warmup_steps": 0}
    (change,) = found({"trainer": trainer}, trainer=trainer, run={"steps": 9})
    assert (change.key, change.harmless) == ("run.steps", False)


def test_a_key_that_the_other_version_does_not_know():
    (change,) = changes({"trainer": {"old": 3, "off": None}}, {"trainer": {}})
    assert str(change) == "trainer.old: 3 -> null"


def test_every_harmless_key_is_one_of_the_recipe():
    for name in _HARMLESS:
        section, _, key = name.partition(".")
        if name == "trainer.strategy":  # to come
            continue
        field = Recipe.model_fields[section]
        assert not key or key in field.annotation.model_fields, name
