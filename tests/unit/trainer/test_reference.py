"""The KL reference that waits elsewhere, and what it costs: nothing changes, and it is away when it isn't asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parts.models import same_bits, snapshot, tiny_model
from parts.samples import loss_options, packed, random_samples, trainer_settings
from polyturn.trainer.reference import FrozenModel, reference_of
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.trainer import Trainer

HERE, ELSEWHERE = torch.device("cpu"), torch.device("cpu", 0)
"""One place under two names: enough for what is moved and brought back."""


@pytest.fixture
def rows():
    return [to_tensors(row, HERE) for row in packed(random_samples(), row_tokens=30).rows]


def test_no_model_is_no_reference():
    policy = tiny_model()
    assert reference_of(None, policy, Scorer(policy), Scorer) is None


def test_a_reference_that_waits_elsewhere_scores_as_one_that_is_here(rows):
    here, away = FrozenModel(tiny_model(seed=7), HERE, Scorer), FrozenModel(tiny_model(seed=7), ELSEWHERE, Scorer)
    with here.present(), away.present():
        for one, other in zip(here.logprobs(rows), away.logprobs(rows), strict=True):
            assert torch.equal(one, other)
            assert not one.requires_grad


def test_its_weights_are_there_while_it_is_present_and_at_home_otherwise(monkeypatch):
    model = tiny_model(seed=7)
    home = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    reference = FrozenModel(model, ELSEWHERE, Scorer)
    moved = []
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: moved.append(a) or plain(self, *a, **k).clone())
    with reference.present():
        assert all(tensor.data_ptr() != home[name] for name, tensor in model.named_parameters())
        assert {device for (device, *_) in moved} == {ELSEWHERE}
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == home


def test_it_comes_home_whatever_happens():
    model = tiny_model(seed=7)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt), FrozenModel(model, ELSEWHERE, Scorer).present():
        raise KeyboardInterrupt
    assert same_bits(snapshot(model), before)


def test_it_comes_once_for_all_optimizer_steps_of_a_batch(monkeypatch):
    arrivals = []
    plain = FrozenModel.present
    monkeypatch.setattr(FrozenModel, "present", lambda self: arrivals.append(1) or plain(self))
    settings = trainer_settings(loss_options(beta=0.1), num_iterations=2)
    trainer = Trainer(tiny_model(), settings, reference=tiny_model(seed=7))
    arrivals.clear()
    trainer.train([packed(random_samples(0)), packed(random_samples(1))])
    assert arrivals == [1]


def test_the_kl_is_to_the_reference():
    policy, other = tiny_model(), tiny_model(seed=7)
    samples = random_samples()
    settings = trainer_settings(loss_options(beta=0.1))
    metrics = Trainer(policy, settings, reference=other).train([packed(samples)])
    rows = [to_tensors(row, HERE) for row in packed(samples).rows]
    with torch.no_grad():
        gaps = torch.cat([Scorer(other)(row)[0] - Scorer(tiny_model())(row)[0] for row in rows]).numpy()
    assert metrics["kl"] == pytest.approx(float(np.mean(np.exp(gaps) - gaps - 1)), rel=1e-3)
