"""Invariants 5, 6, 7, 9 and 10 of the design: a check of each, and partners that break the code and demand that it fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from parts.models import gradients, largest_gap, same_bits, snapshot, tiny_model
from parts.refusals import refused
from parts.runs import Bench, run_python
from parts.samples import alone, loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.config.load import load_recipe
from polyturn.engine import hf
from polyturn.engine.hf import HfEngine
from polyturn.errors import DeadlineError, EngineError, TooManyDroppedError, WeightMismatchError, WeightSyncError
from polyturn.loop.check import check
from polyturn.loop.sync import build_run, train
from polyturn.metrics.run_folder import RunFolder
from polyturn.metrics.sinks import MetricsLog
from polyturn.rollouts import episode
from polyturn.trainer import passes, trainer
from polyturn.trainer.row import RowTensors, to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer
from polyturn.types import SamplingParams
from polyturn.weight_sync import in_process
from polyturn.weight_sync.in_process import InProcessBridge

# ── 5: fresh samples are on-policy ─────────────────────────────────────────────────────────────────────────────────────


def fresh_samples_are_on_policy(bench: Bench, temperature: float) -> None:
    """Three steps of several turns each, at a rate that moves the policy: trainer and engine agree on every token."""
    ended = bench("train", "run.steps=3", f"rollout.temperature={temperature}", "trainer.learning_rate=0.03")
    assert ended.code == 0, ended.err
    assert len(ended.steps) == 3
    for line in ended.steps:
        assert line["turns_per_trajectory"] > 1
        assert line["policy_age"] == 0
        assert line["mismatch_max"] < 1e-4, f"step {line['step']}: engine and trainer differ by {line['mismatch_max']}"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_5_fresh_samples_are_on_policy(bench, temperature):
    fresh_samples_are_on_policy(bench, temperature)


def forget_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scorer.__call__

    def at_one(self: Scorer, row: RowTensors) -> Any:
        return whole(self, replace(row, temperature_N=torch.ones_like(row.temperature_N)))

    monkeypatch.setattr(Scorer, "__call__", at_one)


def keep_stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfEngine, "_copy", lambda self, weights: None)


def score_the_token_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = to_tensors
    monkeypatch.setattr(
        passes, "to_tensors", lambda row, device: replace((t := whole(row, device)), predicting_N=t.predicting_N + 1)
    )


def let_rows_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = to_tensors

    def running_positions(row: Any, device: torch.device) -> RowTensors:
        tensors = whole(row, device)
        return replace(tensors, position_ids_T=torch.arange(len(tensors.position_ids_T)))

    monkeypatch.setattr(passes, "to_tensors", running_positions)


def report_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine samples at the temperature, and reports log-probabilities at 1."""
    whole = hf.sample

    def sample(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        token_B = whole(logits, rows)
        for row, token, logprobs in zip(rows, token_B.tolist(), torch.log_softmax(logits, dim=-1), strict=True):
            row.logprobs[-1] = float(logprobs[token])
        return token_B

    monkeypatch.setattr(hf, "sample", sample)


@pytest.mark.parametrize(
    ("break_it", "temperature"),
    [
        (forget_temperature, 0.7),
        (forget_temperature, 1.3),
        (report_another_temperature, 1.3),
        (keep_stale_weights, 1.0),
        (score_the_token_itself, 1.0),
        (let_rows_mix, 1.0),
    ],
)
def test_5_the_check_would_notice(bench, monkeypatch, break_it, temperature):
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=r"engine and trainer differ|max_mismatch"):
        fresh_samples_are_on_policy(bench, temperature)


# ── 6: gradients don't depend on how the batch is cut ──────────────────────────────────────────────────────────────────


def gradients_do_not_depend_on_the_cut() -> None:
    model = tiny_model()
    samples = on_policy(random_samples(40), model, gap=0.3)
    loss = loss_options(ratio_level="turn", correction="tis", sampler_level="sequence", aggregation="sequence")
    longest = max(map(len, samples))
    cuts = [packed(samples), packed(samples, row_tokens=longest), packed(samples[::-1]), alone(samples)]
    found = []
    for batch in cuts:
        model.zero_grad(set_to_none=True)
        Trainer(model, trainer_settings(loss)).forward_backward(batch)
        found.append(gradients(model))
    assert len(cuts[0].rows) == 1 < len(cuts[1].rows) < len(cuts[3].rows)
    for cut in found[1:]:
        gap = largest_gap(cut, found[0])
        assert gap < 2e-5, f"the gradient depends on the cut: {gap}"


def test_6_gradients_do_not_depend_on_the_cut():
    gradients_do_not_depend_on_the_cut()


def normalise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = passes.policy_loss

    def by_row(inputs: Any, options: Any) -> Any:
        result = whole(inputs, options)
        return replace(result, loss=result.loss / inputs.token_weights_N.sum())

    monkeypatch.setattr(passes, "policy_loss", by_row)


def forget_all_but_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scorer.__call__

    def clearing(self: Scorer, row: Any) -> Any:
        self.model.zero_grad(set_to_none=True)
        return whole(self, row)

    monkeypatch.setattr(Scorer, "__call__", clearing)


def weigh_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence mean, as it comes out when every row counts its own trajectories."""
    whole = trainer.share_out

    def share_out(batches: Any, *arguments: Any, **options: Any) -> Any:
        (batch,) = batches
        parts = [whole([replace(batch, rows=(row,))], *arguments, **options)[0][0] for row in batch.rows]
        return [[replace(parts[0], rows=batch.rows, token_weights=tuple(part.token_weights[0] for part in parts))]]

    monkeypatch.setattr(trainer, "share_out", share_out)


@pytest.mark.parametrize("break_it", [normalise_by_row, forget_all_but_the_last_row, weigh_by_row, let_rows_mix])
def test_6_the_check_would_notice(monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="the gradient depends on the cut"):
        gradients_do_not_depend_on_the_cut()


# ── 7: a push covers everything, is confirmed, and never mixes weights ─────────────────────────────────────────────────

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


async def a_push_brings_every_weight(*, verify_every: int = 1, pushes: int = 3) -> None:
    """After each push the engine has the trainer's weights to the bit, serves their version, and samples from them."""
    model, engine = tiny_model(seed=1), HfEngine(tiny_model(seed=2))
    bridge = InProcessBridge(model.state_dict, engine, verify_every=verify_every, deadline_s=30)
    await engine.start()
    try:
        for version in range(pushes):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            await bridge.push(version)
            different = [name for name, own in engine.named_weights().items() if not torch.equal(own, model.state_dict()[name])]
            assert not different, f"push {version} left {different} behind"
            assert engine.policy_version == version
            completion = await engine.generate((5, 6, 7), GREEDY)
            assert set(completion.policy_versions) == {version}
            other = HfEngine(model)
            await other.start()
            assert (await other.generate((5, 6, 7), GREEDY)).ids == completion.ids, "it samples from other weights"
            await other.stop()
    finally:
        await engine.stop()


async def test_7_a_push_brings_every_weight():
    await a_push_brings_every_weight()


def skip_one_tensor(monkeypatch: pytest.MonkeyPatch, name: str = "model.layers.1.mlp.down_proj.weight") -> None:
    whole = HfEngine._copy

    def copy_but_one(self: HfEngine, weights: Mapping[str, torch.Tensor]) -> None:
        whole(self, {**weights, name: self.named_weights()[name]})

    monkeypatch.setattr(HfEngine, "_copy", copy_but_one)


def swap_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one, two = HfEngine._copy, "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    monkeypatch.setattr(HfEngine, "_copy", lambda self, weights: whole(self, {**weights, one: weights[two], two: weights[one]}))


def swap_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal sums of bits, if place did not count."""
    whole = HfEngine._copy

    def swapped(self: HfEngine, weights: Mapping[str, torch.Tensor]) -> None:
        whole(self, weights)
        own = self.named_weights()["lm_head.weight"]
        own[[3, 4]] = own[[4, 3]].clone()

    monkeypatch.setattr(HfEngine, "_copy", swapped)


@pytest.mark.parametrize("break_it", [skip_one_tensor, swap_two_tensors, swap_two_values])
async def test_7_the_checksums_notice_an_incomplete_push(monkeypatch, break_it):
    break_it(monkeypatch)
    with pytest.raises(WeightMismatchError, match=r"after push 0 the engine differs from the trainer in .* of 21 tensors"):
        await a_push_brings_every_weight()


@pytest.mark.parametrize("break_it", [skip_one_tensor, swap_two_tensors, swap_two_values, keep_stale_weights])
async def test_7_the_check_would_notice_without_checksums(monkeypatch, break_it):
    monkeypatch.setattr(in_process, "check_equal", lambda *_: None)
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=r"push 0 left \[.* behind"):
        await a_push_brings_every_weight()


async def test_7_checksums_are_compared_at_the_first_push_and_every_nth(monkeypatch):
    compared = []
    monkeypatch.setattr(in_process, "check_equal", lambda source, target, version: compared.append(version))
    await a_push_brings_every_weight(verify_every=3, pushes=8)
    assert compared == [0, 3, 6]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda weights: weights.pop("lm_head.weight"),
            r"covers 20 of the engine's 21 tensors; missing: \['lm_head\.weight'\]",
        ),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"unknown to the engine: \['extra'\]"),
        (
            lambda weights: weights.update({"lm_head.weight": torch.zeros(2, 2)}),
            r"lm_head\.weight is \(2, 2\) in the trainer and \(48, 32\) in the engine",
        ),
    ],
)
async def test_7_a_push_that_does_not_cover_the_engine_changes_nothing(change, complaint):
    engine = HfEngine(tiny_model())
    before, weights = snapshot(engine._model), dict(tiny_model(seed=3).state_dict())
    change(weights)
    bridge = InProcessBridge(lambda: weights, engine, verify_every=1, deadline_s=5)
    with pytest.raises(WeightSyncError, match=complaint):
        await bridge.push(4)
    assert same_bits(snapshot(engine._model), before)
    assert engine.policy_version == 0


async def test_7_a_push_that_is_not_confirmed(monkeypatch):
    async def silent(self: HfEngine, weights: Any, version: int) -> int:
        return self.policy_version

    monkeypatch.setattr(HfEngine, "update_weights", silent)
    bridge = InProcessBridge(tiny_model(seed=3).state_dict, HfEngine(tiny_model()), verify_every=1, deadline_s=5)
    with pytest.raises(WeightSyncError, match="weight push 7 was not confirmed: the engine serves version 0"):
        await bridge.push(7)


async def test_7_a_push_that_hangs_ends_at_its_deadline_and_the_engine_serves_no_mixed_weights(monkeypatch):
    release = asyncio.Event()

    async def never(*_: Any) -> None:
        await release.wait()

    monkeypatch.setattr(hf, "in_thread", never)
    engine = HfEngine(tiny_model())
    await engine.start()
    bridge = InProcessBridge(tiny_model(seed=3).state_dict, engine, verify_every=1, deadline_s=0.05)
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for weight push 2 to the engine"):
        await bridge.push(2)
    with pytest.raises(EngineError, match="a weight update to version 2 did not complete"):
        await engine.generate((5, 6), GREEDY)
    await engine.stop()


# ── 9: nothing waits for ever ──────────────────────────────────────────────────────────────────────────────────────────

DEATHS = """
import contextlib, io, json, sys
from polyturn.cli.main import main
from polyturn.engine.hf import HfEngine
from polyturn.trainer.scorer import Scorer

def engine_dies(after):
    whole, calls = HfEngine._generate, []
    def generate(self, *arguments):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("device lost")
        return whole(self, *arguments)
    HfEngine._generate = generate
    return lambda: setattr(HfEngine, "_generate", whole)

def logits_are_nan():
    whole = Scorer.__call__
    Scorer.__call__ = lambda self, row: tuple(numbers * float("nan") for numbers in whole(self, row))
    return lambda: setattr(Scorer, "__call__", whole)

def push_dies():
    whole = HfEngine._copy
    def copy(self, weights):
        raise RuntimeError("peer 3 is gone")
    HfEngine._copy = copy
    return lambda: setattr(HfEngine, "_copy", whole)

def nothing():
    return lambda: None

found = {}
base = json.loads(sys.argv[1])
for name, break_it, extra in (
    ("nan", logits_are_nan, []),
    ("push", push_dies, []),
    ("faults", nothing, ["environment.id=parts.environments:AlwaysCrashes"]),
    ("engine in evaluation", lambda: engine_dies(0), []),
):
    mend = break_it()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*base, *extra])
    mend()
    found[name] = [code, err.getvalue()]
print(json.dumps(found))
engine_dies(3)
sys.exit(main([*base, "evaluation.episodes=0", "run.steps=50"]))
"""


@pytest.mark.real
def test_9_what_is_lost_ends_the_run_with_its_code_and_a_sentence(bench):
    base = ["train", str(bench.recipe), f"run.output_dir={bench.runs}"]
    ended = run_python(DEATHS, json.dumps(base), timeout_s=120)
    found = json.loads(ended.out.splitlines()[0])
    for name, code, says in (
        ("nan", 4, "the loss is nan in optimizer step 0, so training can't go on"),
        ("push", 3, "weight push 0 failed: RuntimeError: peer 3 is gone"),
        ("faults", 4, "no sandbox answers"),
        ("engine in evaluation", 3, "the hf engine failed: RuntimeError: device lost"),
    ):
        assert found[name][0] == code, found[name]
        *log, last = found[name][1].splitlines()
        assert last.startswith("polyturn: error: ")
        assert says in last
        assert not [line for line in log if "error: " in line or "Traceback" in line], "one sentence, after what was logged"
    assert ended.code == 3, "the process itself ends with the code"
    assert ended.err == "polyturn: error: the hf engine failed: RuntimeError: device lost\n"


async def nothing_is_waited_for_and_nothing_left(bench: Bench, limit_s: float) -> None:
    """The engine's background task dies without a word to those who wait for it: the run ends all the same, and cleans up."""

    async def dies(self: HfEngine) -> None:
        raise RuntimeError("lost")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HfEngine, "_serve", dies)
        overrides = ["rollout.turn_deadline_s=0.1", "evaluation.episodes=0", f"run.output_dir={bench.runs}"]
        checked = check(load_recipe(bench.recipe, overrides))
        folder = RunFolder.create(bench.runs, "dead")
        with MetricsLog([]) as log:
            whole = asyncio.create_task(train(await build_run(checked, folder, log, lambda _: None)))
            done, _ = await asyncio.wait([whole], timeout=limit_s)
            whole.cancel()
            await asyncio.wait([whole])
            assert done, "the run hangs"
            with pytest.raises(TooManyDroppedError, match=r"waited 0\.1 s for the engine's reply in turn 0"):
                whole.result()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"left behind: {left}"


async def test_9_a_dead_background_task_does_not_hang_the_run(bench):
    await nothing_is_waited_for_and_nothing_left(bench, 60)


@pytest.mark.parametrize("environment", ["Colours", "AlwaysCrashes"])
async def test_9_a_run_takes_its_background_tasks_with_it(bench, environment):
    overrides = [f"environment.id=parts.environments:{environment}", "evaluation.episodes=0"]
    checked = check(load_recipe(bench.recipe, overrides))
    with MetricsLog([]) as log:
        run = await build_run(checked, RunFolder.create(bench.runs, "short"), log, lambda _: None)
        with contextlib.suppress(TooManyDroppedError):
            await train(run)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(EngineError, match="the hf engine is not started"):
        await run.engine.generate((5, 6), GREEDY)


async def test_9_the_check_would_notice_a_wait_without_a_deadline(bench, monkeypatch):
    monkeypatch.setattr(episode, "deadline", lambda *_: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="the run hangs"):
        await nothing_is_waited_for_and_nothing_left(bench, 0.5)


async def test_9_the_check_would_notice_a_task_left_behind(bench, monkeypatch):
    left: list[asyncio.Task[None]] = []
    whole = HfEngine.start

    async def start(self: HfEngine) -> None:
        await whole(self)
        left.append(asyncio.create_task(asyncio.sleep(60)))

    monkeypatch.setattr(HfEngine, "start", start)
    with pytest.raises(AssertionError, match="left behind"):
        await nothing_is_waited_for_and_nothing_left(bench, 60)
    left[0].cancel()


# ── 10: a bad configuration dies before it costs anything ──────────────────────────────────────────────────────────────


def test_10_every_mistake_is_refused_before_torch_is_imported(tmp_path, colours_model):
    refused(tmp_path, colours_model, [["train", "--dry-run", f"run.output_dir={tmp_path}/runs"], ["train"]])


LOAD_FIRST = """
import polyturn.loop.check as module
whole = module.check
def check(*arguments, **named):
    import torch
    return whole(*arguments, **named)
module.check = check
"""
LOOK_AWAY = "import polyturn.loop.check as module; module.check_model = lambda *arguments: None"


@pytest.mark.parametrize(
    ("prelude", "complaint"),
    [(LOAD_FIRST, "imported before it was refused"), (LOOK_AWAY, "exit 0")],
    ids=["torch first", "look away"],
)
def test_10_the_check_would_notice(tmp_path, colours_model, prelude, complaint):
    with pytest.raises(AssertionError, match=complaint):
        refused(tmp_path, colours_model, [["train", "--dry-run", f"run.output_dir={tmp_path}/runs"]], prelude=prelude)
