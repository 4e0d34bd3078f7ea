"""`builtin:tiny`: made once, shared by runs that start together, refused where it can't speak."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from parts.environments import Colours, OpenWords
from polyturn.errors import EnvironmentSetupError, ModelError
from polyturn.loop import tiny
from polyturn.loop.build import load_policy
from polyturn.loop.tiny import cache_folder, ensure_tiny
from polyturn.loop.warmstart import WarmstartSettings
from unit.loop.makers import make_recipe

QUICK = WarmstartSettings(
    max_steps=40, learning_rate=5e-3, target_accuracy=0.6, check_every=5, held_out=8, demonstrations_per_step=8
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "START", QUICK)
    return tmp_path / "cache" / "models"


@pytest.fixture
def starts(monkeypatch):
    """How often a model was warm-started."""
    counted, whole = [], tiny.warmstart

    async def counting(*arguments, **given):
        counted.append(1)
        return await whole(*arguments, **given)

    monkeypatch.setattr(tiny, "warmstart", counting)
    return counted


async def test_the_second_call_does_not_train(cache, starts):
    said = []
    recipe, environment = make_recipe(), Colours()
    first = await ensure_tiny(recipe, environment, said.append)
    assert any("warm start on the demonstrations of colours" in line for line in said)
    assert len(starts) == 1
    said.clear()
    assert await ensure_tiny(recipe, environment, said.append) == first
    assert said == [f"model: builtin:tiny from the cache, {first}"]
    assert len(starts) == 1
    assert [path.name for path in cache.iterdir()] == [first.name], "no draft is left behind"


async def test_it_has_learned_to_copy(cache):
    policy = await load_policy(make_recipe(), Colours(), lambda _: None)
    ids = policy.renderer.tokenizer.encode("<|user|>say green<|end|><|assistant|>")
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0, -1]
    assert policy.renderer.tokenizer.decode([int(logits.argmax())]) == "green"


@pytest.mark.parametrize(
    "other",
    [{"run": {"steps": 2, "seed": 1}}, {"environment": {"id": "parts.environments:Colours", "args": {"rounds": 3}}}],
    ids=["seed", "arguments"],
)
@pytest.mark.real
async def test_another_seed_or_another_environment_is_another_model(starts, other):
    first = await ensure_tiny(make_recipe(), Colours(), lambda _: None)
    recipe = make_recipe(**other)
    second = await ensure_tiny(recipe, Colours(**recipe.environment.args), lambda _: None)
    assert first != second
    assert len(starts) == 2


async def test_settings_that_don_t_shape_it_share_it(starts):
    first = await ensure_tiny(make_recipe(), Colours(), lambda _: None)
    again = await ensure_tiny(make_recipe(rollout={"group_size": 2}, trainer={"learning_rate": 0.1}), Colours(), lambda _: None)
    assert first == again
    assert len(starts) == 1


@pytest.mark.real
async def test_runs_that_start_together_end_with_one_whole_model(cache, starts):
    recipe = make_recipe()
    found = await asyncio.gather(*(ensure_tiny(recipe, Colours(), lambda _: None) for _ in range(3)))
    assert len(set(found)) == 1
    assert len(starts) == 3, "nobody waits for another run; the first to be done wins"
    assert [path.name for path in cache.iterdir()] == [found[0].name]
    assert (found[0] / "model.safetensors").is_file()
    assert (found[0] / "tokenizer.json").is_file()


async def test_a_run_that_dies_leaves_nothing_behind(cache, monkeypatch):
    async def dies(*arguments, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "warmstart", dies)
    with pytest.raises(KeyboardInterrupt):
        await ensure_tiny(make_recipe(), Colours(), lambda _: None)
    assert list(cache.iterdir()) == []


async def test_open_words_are_refused():
    with pytest.raises(EnvironmentSetupError, match="environment open_words has no closed vocabulary"):
        await ensure_tiny(make_recipe(), OpenWords(), lambda _: None)


async def test_a_start_that_does_not_learn_is_refused_and_not_kept(cache, monkeypatch):
    monkeypatch.setattr(tiny, "START", WarmstartSettings(max_steps=1, target_accuracy=0.99, held_out=4))
    with pytest.raises(ModelError, match=r"reaches copy_accuracy=.* in 1 steps .*starts from 0\.99 and 0\.0"):
        await ensure_tiny(make_recipe(), Colours(), lambda _: None)
    assert list(cache.iterdir()) == []


async def test_one_word_that_was_not_learned_is_enough_to_refuse(cache, monkeypatch):
    """The mean over many words hides the one that a policy never says."""
    monkeypatch.setattr(tiny, "START", replace(QUICK, max_steps=5, target_accuracy=0.05, target_worst=0.99))
    with pytest.raises(ModelError, match=r"starts from 0\.05 and 0\.99"):
        await ensure_tiny(make_recipe(), Colours(), lambda _: None)
    assert list(cache.iterdir()) == []


async def test_a_cache_that_can_not_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"can't be written to \(Not a directory\); set POLYTURN_CACHE"):
        await ensure_tiny(make_recipe(), Colours(), lambda _: None)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"POLYTURN_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two", "HOME": "/three"}, "/two/polyturn"),
        ({"HOME": "/three"}, "/three/.cache/polyturn"),
        ({"POLYTURN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/three"}, "/three/.cache/polyturn"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, folder):
    for name in ("POLYTURN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == folder
