"""What the trainer counts, reports and refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from parts.models import gradients, largest_gap, plain_logprobs, same_bits, snapshot, tiny_model
from parts.samples import loss_options, make_sample, on_policy, packed, random_samples, trainer_settings
from polyturn.errors import DeviceMemoryError, NonFiniteError
from polyturn.trainer.parallel import OnDemand
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainBatch


def with_advantage(batch: TrainBatch, value: float) -> TrainBatch:
    """`batch` with one advantage replaced behind the back of `TrainSample`, which would refuse it."""
    row = batch.rows[0]
    advantages = row.advantages.copy()
    advantages[np.flatnonzero(row.loss_mask)[0]] = value
    return replace(batch, rows=(replace(row, advantages=advantages), *batch.rows[1:]))


# ── non-finite numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_leaves_the_weights_alone(value):
    model = tiny_model()
    trainer, before = Trainer(model, trainer_settings()), snapshot(model)
    with pytest.raises(NonFiniteError, match=r"the loss is .* in optimizer step 0"):
        trainer.train([with_advantage(packed(random_samples()), value)])
    assert same_bits(snapshot(model), before)
    assert gradients(model) == {}, "a gradient left behind would be stepped with later"
    assert (trainer.version, trainer.optimizer_step) == (0, 0)
    healthy, other = trainer.train([packed(random_samples())]), Trainer(tiny_model(), trainer_settings())
    assert healthy == other.train([packed(random_samples())]), "the trainer itself is as good as new"


@pytest.mark.parametrize("where", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_nan_in_the_logits_leaves_the_weights_alone(where):
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(where)[0, 0] = float("nan")
    before = {name: tensor.nan_to_num(7.0) for name, tensor in snapshot(model).items()}
    with pytest.raises(NonFiniteError):
        Trainer(model, trainer_settings()).train([packed(random_samples())])
    assert same_bits({name: tensor.nan_to_num(7.0) for name, tensor in snapshot(model).items()}, before)


def test_an_infinite_gradient_of_a_finite_loss_leaves_the_weights_alone():
    model = tiny_model()
    model.get_parameter("model.norm.weight").register_hook(lambda grad: grad * float("inf"))
    trainer, before = Trainer(model, trainer_settings()), snapshot(model)
    with pytest.raises(NonFiniteError, match="the gradient norm is"):
        trainer.train([packed(random_samples())])
    assert same_bits(snapshot(model), before)
    assert gradients(model) == {}


def test_a_later_optimizer_step_keeps_what_the_earlier_ones_learned():
    """The sentence promises the weights of the step before: of the optimizer step, which it numbers."""
    model, samples = tiny_model(), random_samples()
    trainer = Trainer(model, trainer_settings())
    with pytest.raises(NonFiniteError, match="in optimizer step 1"):
        trainer.train([packed(samples[:3]), with_advantage(packed(samples[3:]), float("nan"))])
    first = tiny_model()
    Trainer(first, trainer_settings()).train([packed(samples[:3])])
    assert same_bits(snapshot(model), snapshot(first))


# ── counting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_version_counts_batches_and_optimizer_step_steps():
    trainer = Trainer(tiny_model(), trainer_settings(num_iterations=3), version=5)
    trainer.train([packed(random_samples(0)), packed(random_samples(1))])
    assert (trainer.version, trainer.optimizer_step) == (6, 6)
    trainer.train([packed(random_samples(2))])
    assert (trainer.version, trainer.optimizer_step) == (7, 9)


def test_policy_age_is_the_lag_of_the_trained_tokens():
    rng = np.random.default_rng(0)
    samples = [
        make_sample(0, [(3, 4, 1.0)], rng=rng, version=3),
        make_sample(1, [(9, 2, -1.0)], rng=rng, version=1),
    ]
    metrics = Trainer(tiny_model(), trainer_settings(), version=3).train([packed(samples)])
    assert metrics["policy_age"] == pytest.approx((4 * 0 + 2 * 2) / 6)


def test_policy_age_weighs_tokens_alike_over_the_optimizer_steps():
    rng = np.random.default_rng(0)
    batches = [
        packed([make_sample(0, [(3, 6, 1.0)], rng=rng, version=2)]),
        packed([make_sample(1, [(3, 2, 1.0)], rng=rng, version=0)]),
    ]
    metrics = Trainer(tiny_model(), trainer_settings(), version=2).train(batches)
    assert metrics["policy_age"] == pytest.approx((6 * 0 + 2 * 2) / 8)


def test_metrics_of_a_step_by_hand():
    model = tiny_model()
    samples = on_policy(random_samples(), model, gap=0.2)
    own = [plain_logprobs(model, s.input_ids, 1.0)[torch.from_numpy(s.loss_mask[1:])].numpy() for s in samples]
    gap = np.concatenate([mine - s.engine_logprobs[s.loss_mask] for mine, s in zip(own, samples, strict=True)])
    advantages = np.concatenate([s.advantages[s.loss_mask] for s in samples])
    metrics = Trainer(model, trainer_settings(loss_options(correction="tis", sampler_high=1.1))).train([packed(samples)])
    weights = np.minimum(np.exp(gap), 1.1)
    assert metrics["mismatch"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(gap).max(), rel=1e-4)
    assert metrics["logprob"] == pytest.approx(np.concatenate(own).mean(), rel=1e-5)
    assert metrics["sampler_weight"] == pytest.approx(weights.mean(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(-(weights * advantages).sum() / (6 * 40), rel=1e-3, abs=1e-6)


def test_entropy_by_hand():
    model, sample = tiny_model(), random_samples()[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sample.input_ids)[None]).logits[0, :-1]
    entropy = torch.distributions.Categorical(logits=logits).entropy()[torch.from_numpy(sample.loss_mask[1:])]
    metrics = Trainer(model, trainer_settings()).train([packed([sample])])
    assert metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)


# ── the two halves ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_forward_backward_and_optim_step_are_train_in_two_calls():
    whole, halves = tiny_model(), tiny_model()
    batch = packed(random_samples(), row_tokens=30)
    Trainer(whole, trainer_settings()).train([batch])
    trainer = Trainer(halves, trainer_settings())
    trainer.forward_backward(batch)
    trainer.optim_step()
    assert same_bits(snapshot(whole), snapshot(halves))
    assert gradients(halves) == {}


def test_gradients_accumulate_over_forward_backward():
    model = tiny_model()
    trainer = Trainer(model, trainer_settings())
    one, two = packed(random_samples(1)), packed(random_samples(2))
    parts = []
    for batch in (one, two):
        trainer.forward_backward(batch)
        parts.append(gradients(model))
        model.zero_grad(set_to_none=True)
    trainer.forward_backward(one)
    trainer.forward_backward(two)
    assert largest_gap(gradients(model), {name: parts[0][name] + parts[1][name] for name in parts[0]}) < 1e-5


def test_dropout_stays_off():
    """The policy that is trained is the one that sampled."""
    samples = random_samples()
    calm, noisy = (tiny_model(attention_dropout=rate, attention="eager") for rate in (0.0, 0.5))
    for model in (calm, noisy):
        trainer = Trainer(model, trainer_settings())
        model.train()
        trainer.train([packed(samples)])
        model.train()
        trainer.forward_backward(packed(samples))
    assert same_bits(snapshot(calm), snapshot(noisy))
    assert same_bits(gradients(calm), gradients(noisy))


def test_a_trajectory_that_was_dropped_leaves_the_others_as_they_were():
    """`fixed` divides by what was planned: 6 of 8, not by the 6 that are left."""
    grads = []
    for planned in (6, 8):
        model = tiny_model()
        Trainer(model, trainer_settings()).forward_backward(packed(random_samples(), planned=planned))
        grads.append(gradients(model))
    assert largest_gap({name: grad * 8 / 6 for name, grad in grads[1].items()}, grads[0]) < 1e-5


def test_weights_are_the_live_ones_and_all_of_them():
    model = tiny_model(tie_word_embeddings=True)
    trainer = Trainer(model, trainer_settings())
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    assert before.keys() == model.state_dict().keys()
    trainer.train([packed(random_samples())])
    assert not torch.equal(trainer.weights()["lm_head.weight"], before["lm_head.weight"])


def test_all_whole_tensors_are_found_at_once(monkeypatch):
    """To list a model's state takes milliseconds: once for each of hundreds of tensors, it made a push take seconds."""
    model = tiny_model()
    trainer = Trainer(model, trainer_settings())
    listed, state_dict = [], type(model).state_dict
    monkeypatch.setattr(type(model), "state_dict", lambda self, *a, **k: (listed.append(self), state_dict(self, *a, **k))[1])
    for asked in (None, ["lm_head.weight", "model.norm.weight"]):
        listed.clear()
        whole = dict(trainer.whole(asked).items())
        assert list(whole) == list(asked or model.state_dict())
        assert len([one for one in listed if one is model]) <= 3
    assert torch.equal(whole["model.norm.weight"], model.model.norm.weight)


def test_tensors_on_demand_come_some_at_a_time():
    asked = []

    def gather(names):
        asked.append(list(names))
        return {name: torch.tensor(float(ord(name))) for name in names}

    whole = OnDemand([["a", "b"], ["c"]], gather)
    assert not asked
    assert {name: tensor.item() for name, tensor in whole.items()} == {"a": 97.0, "b": 98.0, "c": 99.0}
    assert asked == [["a", "b"], ["c"]]
    assert whole["b"].item() == 98.0
    assert asked[2:] == [["b"]]
    assert (list(whole), len(whole)) == (["a", "b", "c"], 3)
    with pytest.raises(KeyError):
        whole["d"]


def test_a_kl_term_needs_a_reference():
    with pytest.raises(AssertionError, match="a KL term needs a reference"):
        Trainer(tiny_model(), trainer_settings(loss_options(beta=0.1)))


def test_a_gpu_that_is_too_small_is_told_what_would_fit(monkeypatch):
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB. Of the allocated memory 7 GiB"
    )

    def full(self, row):
        raise torch.OutOfMemoryError(said)

    model = tiny_model()
    trainer = Trainer(model, trainer_settings())
    monkeypatch.setattr(Scorer, "__call__", full)
    with pytest.raises(DeviceMemoryError) as caught:
        trainer.train([packed(random_samples())])
    sentence = str(caught.value)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB." in sentence
    assert "trainer.row_tokens below " in sentence
    assert "trainer.activations=full, trainer.offload_optimizer=true, model.lora" in sentence
    assert caught.value.exit_code == 3
    trainer.settings = replace(trainer.settings, activations="full", offload_optimizer=True)
    with pytest.raises(DeviceMemoryError, match=r"longest trajectory\), model\.lora;"):
        trainer.train([packed(random_samples())])


@pytest.mark.parametrize(("compiled", "times"), [(True, 2), (False, 0)])
def test_what_compiling_leaves_is_put_aside(monkeypatch, compiled, times):
    """The collector would look through hundreds of thousands of objects every few steps."""
    put_aside = []
    monkeypatch.setattr("polyturn.trainer.trainer.prepare_layers", lambda *_, **__: None)
    monkeypatch.setattr("polyturn.trainer.trainer.put_aside", lambda: put_aside.append(trainer.version))
    trainer = Trainer(tiny_model(), trainer_settings(compiled=compiled))
    for _ in range(4):
        trainer.train([packed(random_samples())])
    assert put_aside == list(range(1, times + 1)), "after the first steps, which compile"
