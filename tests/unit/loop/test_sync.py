"""The synchronous loop: who has which weights when, what is refused, and two runs that are one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parts.environments import Colours
from parts.models import plain_logprobs, same_bits, snapshot
from polyturn.engine.hf import HfEngine
from polyturn.environments.base import Reply, StepResult
from polyturn.errors import TrainingError
from polyturn.loop import sync
from polyturn.loop.sync import refuse_mismatch
from polyturn.metrics.names import meaning
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainBatch
from polyturn.weight_sync.in_process import InProcessBridge
from unit.loop.makers import make_recipe

FAST = ["trainer.learning_rate=0.05", "evaluation.episodes=0", "rollout.groups_per_step=4"]


# ── an engine that lags ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def trained(monkeypatch):
    """What the trainer was given in every step, with the mean gap to its own weights of that moment, by a plain forward."""
    seen: list[float] = []
    whole = Trainer.train

    def train(self: Trainer, batches: list[TrainBatch]) -> dict[str, float]:
        gaps = []
        for batch in batches:
            for row in batch.rows:
                for start, end in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False):
                    own = plain_logprobs(self.model, row.input_ids[start:end], 1.0).numpy()
                    mask = row.loss_mask[start:end][1:]
                    gaps.append(np.abs(own - row.engine_logprobs[start:end][1:])[mask])
        seen.append(float(np.concatenate(gaps).mean()))
        return whole(self, batches)

    monkeypatch.setattr(Trainer, "train", train)
    return seen


def test_every_second_push_leaves_the_engine_one_version_behind(bench, trained):
    ended = bench("train", "weight_sync.every_steps=2", "run.steps=5", *FAST, "trainer.learning_rate=0.01")
    assert (ended.code, ended.err) == (0, "")
    steps = ended.steps
    assert [line["policy_age"] for line in steps] == [0, 1, 0, 1, 0]
    assert [line["policy_version"] for line in steps] == [0, 2, 2, 4, 4]
    assert [line["mismatch"] for line in steps] == pytest.approx(trained, rel=1e-3, abs=1e-6)
    for line, gap in zip(steps, trained, strict=True):
        assert line["ratio"] == 1, "old log-probabilities are the trainer's own, whatever the engine had"
        assert (gap > 1e-3) == (line["policy_age"] == 1)
        assert (line["sampler_weight_max"] > 1.001) == (line["policy_age"] == 1), "tis makes up for the lag"
        assert line["sampler_weight_max"] <= 2
    assert "sampler_correction: tis" in (ended.folder / "recipe.yaml").read_text()


def test_a_lag_is_no_mismatch_and_a_stale_engine_is(bench, monkeypatch):
    words = [*FAST, "run.steps=3", "weight_sync.max_mismatch=0.001"]
    assert bench("train", *words, "weight_sync.every_steps=3").code == 0
    monkeypatch.setattr(HfEngine, "_copy", lambda self, weights: None)
    ended = bench("train", *words)
    assert ended.code == 4
    assert "engine and trainer log-probabilities of fresh samples differ by" in ended.err
    assert len(ended.steps) == 1, "the step that found out is not reported as one that went well"


@pytest.mark.parametrize(
    ("metrics", "limit", "dies"),
    [
        ({"mismatch": 0.31, "policy_age": 0.0}, 0.3, True),
        ({"mismatch": 0.29, "policy_age": 0.0}, 0.3, False),
        ({"mismatch": 9.0, "policy_age": 0.5}, 0.3, False),
        ({"mismatch": 9.0, "policy_age": 0.0}, None, False),
        ({}, 0.3, False),
    ],
)
def test_refuse_mismatch(metrics, limit, dies):
    recipe = make_recipe(weight_sync={"max_mismatch": limit})
    run: Any = SimpleNamespace(checked=SimpleNamespace(recipe=recipe))
    if not dies:
        refuse_mismatch(run, metrics)
        return
    with pytest.raises(TrainingError, match=r"differ by 0\.31 on average, more than weight_sync\.max_mismatch=0\.3"):
        refuse_mismatch(run, metrics)


def test_pushes_of_a_run(bench, monkeypatch):
    pushed, whole = [], InProcessBridge.push

    async def push(self: InProcessBridge, version: int) -> None:
        pushed.append(version)
        await whole(self, version)

    monkeypatch.setattr(InProcessBridge, "push", push)
    assert bench("train", "weight_sync.every_steps=2", "run.steps=3", *FAST).code == 0
    assert pushed == [0, 2, 3], "before the first step, every second, and before the last evaluation"


def test_the_engine_is_held_before_every_step_until_the_push(bench, monkeypatch):
    done: list[str] = []
    hold, push, train = InProcessBridge.hold, InProcessBridge.push, Trainer.train

    async def held(self: InProcessBridge, version: int) -> None:
        done.append(f"hold {version}")
        await hold(self, version)

    async def pushed(self: InProcessBridge, version: int) -> None:
        done.append(f"push {version}")
        await push(self, version)

    def trained(self: Trainer, batches: list[TrainBatch]) -> dict[str, float]:
        done.append("train")
        return train(self, batches)

    monkeypatch.setattr(InProcessBridge, "hold", held)
    monkeypatch.setattr(InProcessBridge, "push", pushed)
    monkeypatch.setattr(Trainer, "train", trained)
    assert bench("train", "run.steps=2", *FAST).code == 0
    assert done == ["push 0", "hold 1", "train", "push 1", "hold 2", "train", "push 2", "push 2"]


# ── when things are written and measured ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("steps", "every", "lines"), [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (2, None, [0, 2]), (1, 1, [0, 1])]
)
def test_when_a_run_is_evaluated(bench, steps, every, lines):
    words = [f"run.steps={steps}", f"evaluation.every_steps={'null' if every is None else every}", "evaluation.episodes=2"]
    ended = bench("train", *words)
    assert [line["step"] for line in ended.metrics if "eval/success" in line] == lines


def test_every_mode_is_measured_and_told(bench):
    ended = bench("train", "evaluation.modes=[sampled,greedy]", "evaluation.samples_per_task=2", "run.steps=1")
    first, greedy = ended.metrics[:2]
    assert {"eval/success", "eval/pass@2"} <= first.keys()
    assert "eval_greedy/success" in greedy
    said = [line for line in ended.out.splitlines() if line.startswith("held-out success")]
    assert [line.split(":")[0] for line in said] == ["held-out success, sampled", "held-out success, greedy"]


@pytest.mark.parametrize(("every", "files"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (0, [])])
def test_which_trajectories_are_kept(bench, every, files):
    ended = bench("train", f"logging.trajectories_every={every}", "run.steps=4", "evaluation.episodes=0")
    found = sorted(path.name for path in (ended.folder / "trajectories").iterdir())
    assert found == [f"step_{step:06d}.jsonl" for step in files]


def test_every_number_that_is_written_is_explained(bench):
    words = ["algorithm.loss_options.beta=0.1", "weight_sync.every_steps=2", "evaluation.modes=[sampled,greedy]"]
    ended = bench("train", *words, "environment.id=parts.environments:OneCrashes", "rollout.max_dropped_share=1.0")
    names = {name for line in ended.metrics for name in line}
    assert len(names) > 40
    assert [name for name in sorted(names) if meaning(name) is None] == []


def test_a_step_that_teaches_nothing_is_told_and_changes_nothing(bench, monkeypatch):
    async def same(self: Colours, state: Any, reply: Reply) -> StepResult:
        return StepResult(done=True)

    async def none(self: Colours, state: Any) -> dict[str, float]:
        return {"answer": 0.0}

    monkeypatch.setattr(Colours, "step", same)
    monkeypatch.setattr(Colours, "rewards", none)
    ended = bench("train")
    assert ended.code == 0
    for line in ended.steps:
        assert (line["num_zero_advantage_groups"], line["num_tokens"], line["optimizer_step"]) == (2, 0, 0)
        assert "loss" not in line
        assert line["policy_version"] == 0
    stable = [line for line in ended.out.splitlines() if line.startswith("step=1 ")]
    assert "loss=nan" in stable[0]


# ── two runs that are one ──────────────────────────────────────────────────────────────────────────────────────────────


class Jittery(Colours):
    """Answers after a moment that is different in every run."""

    async def step(self, state: Any, reply: Reply) -> StepResult:
        import asyncio

        await asyncio.sleep(random.SystemRandom().random() / 200)
        return await super().step(state, reply)


@pytest.fixture
def weights(monkeypatch):
    """The trained weights of every run."""
    found, build = [], sync.build_trainer

    def remember(*arguments, exact=None):
        found.append(build(*arguments).model)
        return Trainer(found[-1], build(*arguments).settings)

    monkeypatch.setattr(sync, "build_trainer", remember)
    return found


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(("time/", "push/")) and name != "tokens_per_s"}


def test_two_deterministic_runs_are_equal_to_the_bit(bench, weights, monkeypatch):
    batches: list[int] = []
    whole = HfEngine._generate

    def generate(self: HfEngine, batch: Any, version: int) -> Any:
        batches.append(len(batch))
        return whole(self, batch, version)

    monkeypatch.setattr(HfEngine, "_generate", generate)
    words = ["run.steps=3", "engine.deterministic=true", "environment.id=unit.loop.test_sync:Jittery", "evaluation.episodes=3"]
    words += ["trainer.learning_rate=0.05", "trainer.num_iterations=2", "rollout.concurrency=2"]
    first = bench("train", *words)
    alone, batches[:] = list(batches), []
    second = bench("train", *words)
    assert first.code == second.code == 0
    assert alone == batches == [3, 3, *[8, 8] * 3, 3, 3], "turn k of everybody together, whoever answered first"
    assert list(map(timeless, first.metrics)) == list(map(timeless, second.metrics))
    one, two = (snapshot(model) for model in weights)
    assert same_bits(one, two)
    for step in (1, 2, 3):
        name = f"trajectories/step_{step:06d}.jsonl"
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_another_seed_is_another_run(bench, weights):
    for seed in (0, 1):
        assert bench("train", "engine.deterministic=true", f"run.seed={seed}", *FAST).code == 0
    one, two = (snapshot(model) for model in weights)
    assert not same_bits(one, two)


def test_the_engine_has_weights_of_its_own(bench, monkeypatch):
    built = []
    whole = sync.build_engine_and_bridge

    def remember(recipe, policy, trainer, place):
        built.append((trainer, *whole(recipe, policy, trainer, place)))
        return built[-1][1:]

    monkeypatch.setattr(sync, "build_engine_and_bridge", remember)
    assert bench("train", *FAST).code == 0
    ((trainer, engine, _),) = built
    assert same_bits(dict(engine.named_weights()), dict(trainer.weights())), "the last push came before the last evaluation"
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1.0)
    assert not same_bits(dict(engine.named_weights()), dict(trainer.weights()))
