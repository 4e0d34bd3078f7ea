"""The supervised start: the gradient is the supervised one, it learns, and it tells what it measured."""

from __future__ import annotations

import pytest
import torch

from parts.environments import Colours, NoTasks
from parts.models import gradients, largest_gap, plain_logprobs
from polyturn.environments.base import TaskList
from polyturn.errors import EnvironmentSetupError
from polyturn.loop.build import load_policy
from polyturn.loop.warmstart import SUPERVISED, Accuracy, WarmstartSettings, _batch, demonstrate, token_accuracy, warmstart
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from unit.loop.makers import make_recipe

SETTINGS = WarmstartSettings(max_steps=12, learning_rate=0.01, check_every=4, demonstrations_per_step=8, held_out=8)


@pytest.fixture
async def policy(colours_model):
    return await load_policy(make_recipe(model={"path": str(colours_model)}), Colours(), lambda _: None)


@pytest.fixture
def recipe(colours_model):
    return make_recipe(model={"path": str(colours_model)})


def first_tasks(environment, count):
    source = environment.tasks("train", 0)
    return [source[index] for index in range(count)]


async def test_a_few_steps_reduce_the_loss(recipe, policy):
    told = []
    result = await warmstart(
        recipe, Colours(), policy.renderer, policy.model, SETTINGS, on_step=lambda *step: told.append(step)
    )
    assert [step for step, _, _ in told] == list(range(1, 13))
    assert [step for step, _, accuracy in told if accuracy is not None] == [4, 8, 12]
    assert told[-1][1] < 0.5 * told[0][1]
    assert (result.steps, result.negative_log_likelihood, result.accuracy) == told[-1]
    assert result.accuracy.mean > told[3][2].mean


async def test_the_gradient_is_the_supervised_one(recipe, policy):
    """Advantage 1 and ratio 1: the gradient of the mean negative log-likelihood of what the demonstration says."""
    environment = Colours()
    tasks = first_tasks(environment, 5)
    batch = await _batch(recipe, environment, policy.renderer, tasks)
    trainer = Trainer(policy.model, TrainerSettings(learning_rate=0.1, loss=SUPERVISED, total_optimizer_steps=1))
    trainer.forward_backward(batch)
    found = gradients(policy.model)

    policy.model.zero_grad(set_to_none=True)
    total, count = torch.zeros(()), 0
    for task in tasks:
        trajectory = await demonstrate(recipe, environment, policy.renderer, task, environment.gold(task))
        assert [turn.text for turn in trajectory.turns] == [task.answer, task.answer]
        ids, said = [], []
        for turn in trajectory.turns:
            ids += [*turn.prompt_ids, *turn.completion_ids]
            said += [False] * len(turn.prompt_ids) + [True] * len(turn.completion_ids)
        logits = policy.model(torch.tensor([ids])).logits[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        total = total - chosen[torch.tensor(said)[1:]].sum()
        count += sum(said)
    (total / count).backward()
    assert largest_gap(gradients(policy.model), found) < 1e-4


async def test_token_accuracy_weighs_kinds_of_tokens_alike(recipe, policy):
    environment = Colours()
    reds = [task for task in first_tasks(environment, 60) if task.answer == "red"][:9]
    blue = next(task for task in first_tasks(environment, 60) if task.answer == "blue")
    batch = await _batch(recipe, environment, policy.renderer, [*reds, blue])
    encode = policy.renderer.tokenizer.encode
    counted = frozenset((*encode("red"), *encode("blue")))

    def chance(task):
        ids = encode(f"<|user|>say {task.answer}<|end|><|assistant|>{task.answer}<|end|><|tool|>again<|end|><|assistant|>")
        ids = torch.tensor([*ids, *encode(task.answer)])
        right = plain_logprobs(policy.model, ids, 1.0).exp()
        return float((right[(ids == encode(task.answer)[0])[1:]][1:]).mean())  # its first mention is the prompt's

    found, kinds = token_accuracy(policy.model, batch, counted), (chance(reds[0]), chance(blue))
    assert found.mean == pytest.approx(sum(kinds) / 2, rel=1e-4)
    assert found.worst == pytest.approx(min(kinds), rel=1e-4)
    assert token_accuracy(policy.model, batch, frozenset({10_000})) == Accuracy(0.0, 0.0)


async def test_it_stops_at_its_target_and_then_cools_down(recipe, policy):
    settings = WarmstartSettings(
        max_steps=200,
        cooldown_steps=3,
        learning_rate=0.02,
        target_accuracy=0.5,
        target_worst=0.3,
        check_every=5,
        held_out=8,
        demonstrations_per_step=8,
    )
    accuracies = []
    result = await warmstart(
        recipe,
        Colours(),
        policy.renderer,
        policy.model,
        settings,
        on_step=lambda step, nll, accuracy: accuracies.append(accuracy),
    )
    known = [(accuracy.mean, accuracy.worst) for accuracy in accuracies[:-3] if accuracy is not None]
    assert not any(mean >= 0.5 and worst >= 0.3 for mean, worst in known[:-1])
    assert known[-1] >= (0.5, 0.3)
    assert known[-1][1] >= 0.3
    assert result.steps == len(accuracies) < 200
    assert accuracies[-1] == result.accuracy, "measured once more at the end"


@pytest.mark.parametrize(("size", "aside"), [(8, 2), (3, 0), (1, 0)])
async def test_of_few_tasks_a_quarter_is_held_out_and_never_trained_on(recipe, policy, monkeypatch, size, aside):
    tasks = first_tasks(Colours(), size)
    shown = []

    class Watched(Colours):
        def demonstrations(self, task, rng):
            shown.append(task.id)
            return super().demonstrations(task, rng)

    settings = WarmstartSettings(max_steps=2, demonstrations_per_step=5, held_out=256)
    await warmstart(recipe, Watched(), policy.renderer, policy.model, settings, source=TaskList(tasks))
    measured, trained = shown[: aside or 1], shown[aside or 1 :]
    assert measured == [task.id for task in tasks[: aside or 1]]
    assert len(trained) == 10
    assert set(trained) == {task.id for task in tasks[aside:]}


async def test_without_tasks_there_is_nothing_to_demonstrate(recipe, policy):
    with pytest.raises(EnvironmentSetupError, match="environment colours has no training tasks of its own to demonstrate"):
        await warmstart(recipe, NoTasks(), policy.renderer, policy.model, SETTINGS)


async def test_demonstrations_that_raise_are_a_sentence(recipe, policy):
    class Mute(Colours):
        def demonstrations(self, task, rng):
            raise ZeroDivisionError("no words")

    with pytest.raises(EnvironmentSetupError, match=r"colours\.demonstrations of task train/0/0 raised ZeroDivisionError"):
        await warmstart(recipe, Mute(), policy.renderer, policy.model, SETTINGS)


async def test_a_demonstration_that_ends_too_early_is_a_sentence(recipe, policy):
    class Short(Colours):
        def gold(self, task):
            return [str(task.answer)]

    with pytest.raises(EnvironmentSetupError, match=r"did not play to its end .*end before its environment is done"):
        await warmstart(recipe, Short(rounds=2), policy.renderer, policy.model, SETTINGS)
