"""Devices, the policy of a recipe, and what the trainer gets of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from parts.environments import Colours
from parts.models import same_bits, snapshot
from polyturn.config.resolve import resolve
from polyturn.errors import ConfigError, ModelError
from polyturn.loop.build import build_engine, build_trainer, choose_device, load_policy, policy_to_train
from polyturn.rendering.words import TINY_CHAT_TEMPLATE
from polyturn.trainer.reference import FrozenModel
from polyturn.types import Message
from unit.loop.makers import make_recipe


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, there, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device("auto") == torch.device(device)


def test_a_rank_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:8", 8)])
def test_a_gpu_that_is_not_there(monkeypatch, name, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"trainer.device={name} but this machine has {count} CUDA devices"):
        choose_device(name)


def test_a_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)


def test_no_device_at_all():
    with pytest.raises(ConfigError, match="'gpu' is no device; use auto, cpu, cuda or cuda:N"):
        choose_device("gpu")


async def test_the_policy_of_a_recipe(colours_model, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(TINY_CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|>red '"))
    sections = {"model": {"path": str(colours_model), "dtype": "bfloat16", "chat_template": str(template)}}
    policy = await load_policy(make_recipe(**sections), Colours(), lambda _: None)
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    ids = policy.renderer.open((Message(role="user", content="say red"),)).prompt().ids
    assert policy.renderer.tokenizer.decode(ids).endswith("<|assistant|>red ")
    assert policy.folder == colours_model


@pytest.mark.parametrize("trainer", [{}, {"offload_optimizer": True}], ids=["here", "offloaded"])
async def test_training_in_bfloat16_goes_on_from_the_float32_weights_of_the_folder(colours_model, trainer):
    """From the rounded ones the copies would start in the middle between two roundings, and hardly a weight would move."""
    stored = load_file(colours_model / "model.safetensors")
    sections = {"model": {"path": str(colours_model), "dtype": "bfloat16"}, "trainer": trainer, "run": {"steps": 1}}
    recipe = resolve(make_recipe(**sections), num_train_tasks=16).recipe
    policy = await policy_to_train(recipe, Colours(), lambda _: None)
    state = build_trainer(recipe, policy.model, exact=policy.exact).optimizer.state_dict()
    named = dict(policy.model.named_parameters())
    assert {parameter.dtype for parameter in named.values()} == {torch.bfloat16}
    for (name, parameter), master in zip(named.items(), state["masters"], strict=True):
        assert torch.equal(master, stored[name])
        assert torch.equal(parameter, stored[name].bfloat16())
    assert any(not torch.equal(master, named[name].float()) for name, master in zip(named, state["masters"], strict=True))
    assert {buffer.dtype for buffer in policy.model.buffers()} == {torch.float32}


async def test_weights_that_were_not_rounded_are_kept_once(colours_model):
    sections = {"model": {"path": str(colours_model)}, "run": {"steps": 1}}
    recipe = resolve(make_recipe(**sections), num_train_tasks=16).recipe
    assert (await policy_to_train(recipe, Colours(), lambda _: None)).exact is None


async def test_another_path_takes_the_recipes_place(colours_model):
    recipe = make_recipe(model={"path": "nowhere"})
    policy = await load_policy(recipe, Colours(), lambda _: None, path=str(colours_model))
    assert policy.folder == colours_model


async def test_a_hub_model_is_checked_once_it_is_here(colours_model, monkeypatch):
    monkeypatch.setattr("polyturn.loop.build.model_folder", lambda path: colours_model)
    recipe = make_recipe(model={"path": "owner/name"}, rollout={"max_trajectory_tokens": 300}, trainer={"row_tokens": 300})
    with pytest.raises(ModelError, match="exceeds the 256 positions of owner/name; set it to 256 or less"):
        await load_policy(recipe, Colours(), lambda _: None)


async def test_threads_are_set_when_asked_for(colours_model, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for threads in (None, 1):
        recipe = make_recipe(model={"path": str(colours_model)}, trainer={"threads": threads})
        await load_policy(recipe, Colours(), lambda _: None)
    assert asked == [1]


@pytest.fixture
async def policy(colours_model):
    return await load_policy(make_recipe(model={"path": str(colours_model)}), Colours(), lambda _: None)


async def test_the_trainers_settings(policy):
    trainer = {
        "learning_rate": 0.25,
        "num_iterations": 2,
        "optimizer_steps_per_batch": 3,
        "optimizer": "sgd",
        "betas": (0.8, 0.9),
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_steps": 4,
        "min_learning_rate_ratio": 0.2,
        "max_grad_norm": 0.7,
        "offload_optimizer": True,
    }
    settings = build_trainer(make_recipe(run={"steps": 5}, trainer=trainer), policy.model).settings
    for name, value in trainer.items():
        if name != "optimizer_steps_per_batch":
            assert getattr(settings, name) == value, name
    assert settings.total_optimizer_steps == 5 * 2 * 3
    assert settings.loss.fixed_length == 12, "three turns of four tokens"


async def test_a_reference_is_a_frozen_copy_and_only_made_for_a_kl_term(policy):
    assert build_trainer(make_recipe(), policy.model)._reference is None
    trainer = build_trainer(make_recipe(algorithm={"loss_options": {"beta": 0.1}}), policy.model)
    assert isinstance(trainer._reference, FrozenModel)
    reference = trainer._reference._score.model
    assert same_bits(snapshot(reference), snapshot(policy.model))
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    assert not same_bits(snapshot(reference), snapshot(policy.model))


async def test_the_engine_pads_as_the_model_says(policy):
    recipe = make_recipe(engine={"max_batch_size": 3})
    engine = build_engine(recipe, policy.model)
    assert (engine._pad_id, engine._max_batch_size) == (policy.model.config.pad_token_id, 3)
    policy.model.config.pad_token_id = None
    assert build_engine(recipe, policy.model)._pad_id == 0


async def test_what_keeps_small_updates_follows_from_the_type(colours_model):
    for dtype, masters, seed in (("float32", "none", 0), ("bfloat16", "float32", 5)):
        recipe = make_recipe(model={"path": str(colours_model), "dtype": dtype}, run={"seed": seed})
        policy = await load_policy(recipe, Colours(), lambda _: None)
        settings = build_trainer(recipe, policy.model).settings
        assert (settings.master_weights, settings.seed) == (masters, seed)
