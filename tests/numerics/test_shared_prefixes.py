"""Samples with one beginning, laid down once: the same log-probabilities, loss and gradients as each by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from parts.models import VOCAB, gradients, largest_gap, tiny_model
from parts.samples import loss_options, on_policy, packed, trainer_settings
from parts.slow_varlen import telling_varlen
from polyturn.errors import ModelError
from polyturn.trainer import attention
from polyturn.trainer.attention import VARLEN, at_places
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.shared_prefixes import costs, sharing_of
from polyturn.trainer.shares import from_bytes, share_out, to_bytes
from polyturn.trainer.trainer import Trainer
from polyturn.trainer.tree import tree_of_row
from polyturn.trajectories.pack import lay_out, pack
from polyturn.trajectories.prefixes import SHORTEST, alone, tree_of
from polyturn.trajectories.sharing import Sharing, gain_of
from polyturn.types import TrainSample

ALWAYS = Sharing(per_token=1.0, per_pair=0.0, always=True)
CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def sample(number: int, ids: np.ndarray, trained: np.ndarray, *, group: str = "g", seed: int = 0) -> TrainSample:
    rng = np.random.default_rng((seed, number))
    turns = np.cumsum(np.diff(trained.astype(int), prepend=0) == 1) - 1
    return TrainSample(
        trajectory_id=f"{group}/{number}",
        group_id=group,
        temperature=1.0,
        input_ids=ids.astype(np.int64),
        loss_mask=trained,
        advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
        engine_logprobs=np.where(trained, rng.uniform(-4, -1, len(ids)), 0).astype(np.float32),
        turn_index=np.where(trained, turns, -1).astype(np.int64),
        policy_version=np.where(trained, 0, -1).astype(np.int64),
    )


def family(size: int = 4, prompt: int = 24, *, group: str = "g", seed: int = 0) -> list[TrainSample]:
    """Siblings of one prompt, whose turns are answered by other tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, prompt)
    made = []
    for number in range(size):
        own = rng.integers(3, VOCAB, int(rng.integers(5, 12)))
        trained = np.concatenate([np.zeros(prompt, bool), rng.random(len(own)) < 0.6])
        trained[prompt] = True
        made.append(sample(number, np.concatenate([common, own]), trained, group=group, seed=seed))
    return made


def history(seed: int = 0) -> list[TrainSample]:
    """A trajectory in two samples: the second begins with all of the first, which alone trains it."""
    rng = np.random.default_rng(seed)
    first = rng.integers(3, VOCAB, 30)
    trained = np.arange(30) >= 24
    longer = np.concatenate([first, rng.integers(3, VOCAB, 8)])
    both = [sample(0, first, trained), sample(0, longer, np.arange(38) >= 33)]
    return [both[0], replace(both[1], turn_index=np.where(both[1].loss_mask, 1, -1))]


def everything() -> list[TrainSample]:
    # Another group with the same prompt is not a sibling; two of the third group go on together before they part.
    late = family(3, 20, group="h", seed=3)
    longer = np.concatenate([late[0].input_ids[:20], np.full(20, 7)])
    parting = [sample(n, np.concatenate([longer, [5 + n, 9]]), np.arange(42) >= 40, group="h") for n in (5, 6)]
    return [*family(), *history(5), *late, *parting, *family(2, 4, group="short", seed=9)]


def exact_norm(norm: Any, hidden_TH: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden_TH * (hidden_TH.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "granite", "qwen3_moe"])
@pytest.mark.parametrize("row_tokens", [60, 400])
def test_gradients_are_those_of_each_sample_by_itself(architecture, row_tokens):
    # Experts' grouped products know no float64; the norms of most models are computed in float32 whatever their type is.
    kind = torch.float32 if architecture == "qwen3_moe" else torch.float64
    models = [tiny_model(architecture).to(kind) for _ in range(2)]
    limit = 1e-4 if kind == torch.float32 else 2e-6
    if architecture == "llama":
        limit = 1e-11
        for norm in (module for model in models for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"):
            norm.forward = partial(exact_norm, norm)
    samples = everything()
    samples = on_policy(samples, tiny_model(architecture), gap=0.3)
    losses = []
    for model, sharing in zip(models, (None, ALWAYS), strict=True):
        batch = pack(samples, row_tokens=row_tokens, planned_trajectories=12, sharing=sharing)
        trainer = Trainer(model, trainer_settings(loss_options("dapo", correction="tis")))
        losses.append(trainer.forward_backward(batch))
    assert batch.num_shared_tokens > 60
    assert largest_gap(gradients(models[1]), gradients(models[0])) < limit
    assert losses[1].keys() == losses[0].keys()
    for name, value in losses[0].items():
        assert losses[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("activations", ["full", "selective"])
def test_with_recomputed_layers_and_eager_attention(activations):
    samples = on_policy(everything(), tiny_model())
    models = [tiny_model(attention="eager"), tiny_model(attention="eager")]
    for model, sharing in zip(models, (None, ALWAYS), strict=True):
        trainer = Trainer(model, trainer_settings(activations=activations))
        trainer.forward_backward(pack(samples, row_tokens=400, planned_trajectories=12, sharing=sharing))
    assert largest_gap(gradients(models[1]), gradients(models[0])) < 1e-4


def test_whole_steps_come_out_the_same():
    samples = on_policy(everything(), tiny_model(), gap=0.3)
    loss = loss_options(ratio_level="turn", correction="tis", beta=0.1)
    found = []
    for sharing in (None, ALWAYS):
        settings_ = trainer_settings(loss, optimizer="sgd", learning_rate=0.1, num_iterations=2)
        trainer = Trainer(tiny_model(), settings_, reference=tiny_model(seed=7))
        batch = pack(samples, row_tokens=80, planned_trajectories=12, sharing=sharing)
        found.append((trainer.train([batch]), dict(trainer.model.state_dict())))
    assert largest_gap(found[1][1], found[0][1]) < 1e-4
    assert found[1][0]["kl"] == pytest.approx(found[0][0]["kl"], rel=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("activations", ["keep", "full"])
def test_with_keys_laid_out_for_kernels_that_know_no_trees(monkeypatch, architecture, activations):
    """As on a GPU, with a slow kernel in place of its own; mistral's looks at the newest tokens only."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", telling_varlen)
    monkeypatch.setattr(attention, "_ASKS_FOR_GROUPS", True)
    attention._register()
    samples = on_policy(everything(), tiny_model(architecture), gap=0.3)
    found = []
    for kernel, sharing in ((False, None), (True, None), (True, ALWAYS)):
        model = tiny_model(architecture)
        if kernel:
            model.set_attn_implementation(VARLEN)
        trainer = Trainer(model, trainer_settings(loss_options("dapo", correction="tis"), activations=activations))
        batch = pack(samples, row_tokens=400, planned_trajectories=12, sharing=sharing)
        trainer.forward_backward(batch)
        found.append(gradients(model))
    assert batch.num_shared_tokens > 60
    assert largest_gap(found[1], found[0]) < 1e-4
    assert largest_gap(found[2], found[0]) < 1e-4


def test_keys_are_those_of_the_segments_above_and_of_the_own():
    """Two siblings and a third that goes on after the first."""
    common = np.arange(3, 19)
    first = np.concatenate([common, np.arange(20, 36)])
    ids = [first, np.concatenate([common, [5, 6]]), np.concatenate([first, [7]])]
    samples = [
        sample(number, one, np.arange(len(one)) >= end) for number, (one, end) in enumerate(zip(ids, (30, 16, 32), strict=True))
    ]
    (row,) = pack(samples, row_tokens=100, planned_trajectories=3, sharing=ALWAYS).rows
    assert np.diff(row.cu_seqlens).tolist() == [16, 2, 16, 1]
    assert row.parents.tolist() == [-1, 0, 0, 2]
    tree = tree_of_row(row, CPU)
    above, own = list(range(16)), list(range(18, 34))
    assert tree.seen.index_U.tolist() == [*above, *above, 16, 17, *above, *own, *above, *own, 34]
    assert tree.seen.cu_queries.tolist() == [0, 16, 18, 34, 35]
    assert tree.seen.cu_keys.tolist() == [0, 16, 34, 66, 99]
    assert (tree.seen.longest_query, tree.seen.longest_key) == (16, 33)
    cut = tree_of_row(row, CPU, [(4, 17), (30, 35)])
    assert cut.seen.index_U.tolist() == [*above, *above, 16, *above, *own, *above, *own, 34]
    assert cut.seen.cu_queries.tolist() == [0, 12, 13, 17, 18]
    assert cut.seen.cu_keys.tolist() == [0, 16, 33, 65, 98]


def test_what_many_saw_is_summed_in_float32():
    """Eight gradients of 1 + 2^-7, the smallest step of bfloat16, which would not survive being added one by one."""
    states = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    given = torch.full((300, 1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    at_places(states, torch.zeros(300, dtype=torch.int64)).backward(given)
    assert float(states.grad) == float(torch.tensor(300 * (1 + 2**-7)).bfloat16())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=7),
    prompt=st.integers(1, 40),
    row_tokens=st.integers(104, 300),
)
def test_every_trained_token_is_there_once_behind_what_was_before_it(lengths, prompt, row_tokens):
    """Random siblings over two letters, so that they go on together for a while."""
    rng = np.random.default_rng(len(lengths) * 100 + prompt)
    samples = []
    for number, (late, length) in enumerate(lengths):
        ids = np.concatenate([np.full(prompt, 3), np.full(late * 8, 4), rng.integers(3, 5, length)])
        trained = np.arange(len(ids)) >= len(ids) - length
        samples.append(sample(number, ids, trained))
    batch = pack(samples, row_tokens=row_tokens, planned_trajectories=len(samples), sharing=ALWAYS)
    found = {}
    for row in batch.rows:
        assert len(row.input_ids) <= row_tokens
        tensors = to_tensors(row, torch.device("cpu"))
        mask = (
            tensors.tree.mask()[0, 0].numpy()
            if tensors.tree is not None
            else np.tril(np.equal.outer(*[np.repeat(np.arange(len(row.cu_seqlens) - 1), np.diff(row.cu_seqlens))] * 2))
        )
        for place, before in zip(np.flatnonzero(row.loss_mask), tensors.predicting_N.tolist(), strict=True):
            seen = np.flatnonzero(mask[before])
            order = seen[np.argsort(row.position_ids[seen])]
            assert row.position_ids[order].tolist() == list(range(row.position_ids[place])), "each position once"
            key = (int(row.trajectory_index[place]), int(row.position_ids[place]))
            assert key not in found
            found[key] = [*row.input_ids[order].tolist(), int(row.input_ids[place])]
    wanted = {
        (number, int(place)): one.input_ids[: place + 1].tolist()
        for number, one in enumerate(samples)
        for place in np.flatnonzero(one.loss_mask)
    }
    assert found == wanted


def test_a_common_token_that_two_train_is_not_shared():
    ids = np.arange(3, 40)
    both = [sample(number, ids, np.arange(37) >= 30) for number in range(2)]
    tree = tree_of(both, [0, 1])
    assert [(one.start, one.end, one.parent) for one in tree.segments] == [(0, 30, -1), (30, 37, 0), (30, 37, 0)]
    assert tree.num_tokens == 44
    assert tree.num_pairs == 30 * 31 / 2 + 2 * (7 * 30 + 7 * 8 / 2)


def test_short_beginnings_and_other_groups_are_not_shared():
    assert (
        packed(family(3, SHORTEST - 1)).num_tokens
        == pack(family(3, SHORTEST - 1), row_tokens=1024, planned_trajectories=3, sharing=ALWAYS).num_tokens
    )
    apart = [*family(1), *family(1, group="other")]
    batch = pack(apart, row_tokens=1024, planned_trajectories=2, sharing=ALWAYS)
    assert batch.num_shared_tokens == 0
    assert not any(len(row.parents) for row in batch.rows)


def test_the_estimate_decides():
    tokens = Sharing(per_token=1.0, per_pair=0.0)
    shared = pack(family(), row_tokens=1024, planned_trajectories=4, sharing=tokens)
    assert shared.num_shared_tokens == 3 * 24
    rng = np.random.default_rng(0)
    long = [np.concatenate([np.arange(3, 19), rng.integers(3, VOCAB, 200)]) for _ in range(2)]
    lengthy = [sample(number, ids, np.arange(216) >= 16) for number, ids in enumerate(long)]
    plain = pack(lengthy, row_tokens=1024, planned_trajectories=2, sharing=tokens)
    assert plain.num_shared_tokens == 0, "432 tokens or 416"
    pairs = Sharing(per_token=0.0, per_pair=1.0)
    assert gain_of(1000, 250, 4, pairs) == pytest.approx(4 * 1250**2 / 2 / 2000**2), "one sample a row needs no mask"
    assert gain_of(1000, 1000, 8, tokens) == pytest.approx(16 / 9)
    assert gain_of(1000, 10, 8, tokens) > gain_of(1000, 100, 8, tokens) > gain_of(100, 1000, 8, tokens) > 1


def test_rows_arrive_at_other_ranks_with_their_parents():
    batch = pack(everything(), row_tokens=100, planned_trajectories=12, sharing=ALWAYS)
    (share,) = share_out([batch], 1, trainer_settings(loss_options()), on_policy=True)
    (arrived,) = from_bytes(to_bytes(share))
    assert [row.parents.tolist() for row in arrived.rows] == [row.parents.tolist() for row in batch.rows]
    assert any(len(row.parents) for row in arrived.rows)


def test_what_a_model_can_do(monkeypatch):
    assert sharing_of(Scorer(tiny_model()), "auto") is not None
    assert sharing_of(Scorer(tiny_model()), "off") is None
    assert sharing_of(Scorer(tiny_model("mistral")), "auto") is None
    with pytest.raises(ModelError, match="share_prefixes=on"):
        sharing_of(Scorer(tiny_model("mistral")), "on")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", telling_varlen)
    monkeypatch.setattr(attention, "_ASKS_FOR_GROUPS", True)
    attention._register()
    score = Scorer(tiny_model())
    score.model.set_attn_implementation(VARLEN)
    found = sharing_of(score, "auto")
    assert found is not None
    assert not found.dense, "the kernel computes the pairs that count"
    assert min(found.per_key, found.room_per_key) > 0
    assert found.least == 0.0, "this CPU launches nothing"


def siblings(prompt: int, completion: int, group_size: int) -> list[TrainSample]:
    rng = np.random.default_rng((prompt, completion, group_size))
    common, trained = rng.integers(3, 30_000, prompt), np.arange(prompt + completion) >= prompt
    ids = [np.concatenate([common, rng.integers(3, 30_000, completion)]) for _ in range(group_size)]
    return [sample(number, ids[number], trained) for number in range(group_size)]


def test_the_estimate_agrees_with_a_gpu():
    """Steps of the layers of Qwen2.5-0.5B, as they were timed: within two fifths, and never shared at a loss."""
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    )
    with torch.device("meta"):
        sharing = costs(transformers.AutoModelForCausalLM.from_config(config), dense=False, on_gpu=True)
    timed = json.loads((RESULTS / "prefix_sharing_h200.json").read_text())["lines"]
    assert len(timed) == 12
    for line in timed:
        samples = siblings(line["prompt"], line["completion"], line["group_size"])
        plain, shared = (lay_out(samples, row_tokens=line["row_tokens"], sharing=how) for how in (None, sharing))
        assert sum(tree.num_tokens for row in shared for tree in row) == line["shared_tokens"]
        assert 1 / 1.4 < sharing.gain(plain, shared) / line["gain"] < 1.4, line
        assert not sharing.pays(plain, shared) or line["gain"] > 1.1
    assert sharing.pays(plain, shared), "4,096 tokens in common"


def test_keys_that_are_laid_out_take_room_in_a_row():
    samples = siblings(100, 20, 8)
    whole = tree_of(samples, range(8))
    assert (whole.num_tokens, whole.num_keys) == (100 + 8 * 20, 100 + 8 * 120)
    roomy = Sharing(per_token=1.0, per_pair=0.0, room_per_key=0.1, always=True)
    assert roomy.room(whole) == 260 + 80
    assert roomy.room(alone(0, samples[0])) == 120, "its keys are its tokens"
    for row_tokens in (120, 260, 340):
        rows = lay_out(samples, row_tokens=row_tokens, sharing=roomy)
        assert sorted(number for row in rows for tree in row for number in tree.samples) == list(range(8))
        assert all(sum(map(roomy.room, row)) <= row_tokens for row in rows)
        assert (len(rows) == 1) == (row_tokens == 340)


def test_a_row_costs_no_less_than_its_launches():
    launching = Sharing(per_token=1.0, per_pair=0.0, dense=False, least=1000.0)
    assert gain_of(100, 100, 4, launching) == 4.0, "four rows or one"
    assert gain_of(1000, 1000, 4, launching) == 8 / 5
    keys = Sharing(per_token=1.0, per_pair=0.0, per_key=0.5, dense=False)
    assert gain_of(1000, 1000, 4, keys) == pytest.approx(8000 / (5000 + 0.5 * 9000)), (
        "keys of separate samples are not laid out"
    )
