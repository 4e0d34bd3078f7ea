"""The arithmetic of drawing a token: noise from the request's seed, truncation, log-probabilities, greedy rows among others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.engine.sampling import Row, _truncate, sample, uniforms_of
from polyturn.types import SamplingParams

V = 12


def row(uniform=0.5, *, done=(), **options) -> Row:
    sampling = SamplingParams(**{"max_tokens": 8, **options})
    return Row(sampling=sampling, uniforms=np.full(8, uniform), ids=list(done), logprobs=[-1.0] * len(done))


def logits_of(seed, rows=1) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


seeds = st.integers(0, 10**6)
units = st.floats(0, 1, exclude_max=True)


# ── noise ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_noise_belongs_to_the_request_and_is_the_same_on_every_machine():
    numbers = uniforms_of(SamplingParams(max_tokens=4, seed=11))
    assert numbers.tolist() == [0.12701753267435878, 0.6846286134593053, 0.6379812715564803, 0.6236476320256881]
    assert uniforms_of(SamplingParams(max_tokens=9, seed=11))[:4].tolist() == numbers.tolist()
    assert uniforms_of(SamplingParams(max_tokens=4, seed=11, temperature=0.3, top_k=3)).tolist() == numbers.tolist()
    assert uniforms_of(SamplingParams(max_tokens=4, seed=12)).tolist() != numbers.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_is_uniform(seed):
    numbers = uniforms_of(SamplingParams(max_tokens=20_000, seed=seed))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 19 + 4 * math.sqrt(2 * 19)


# ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, units, st.floats(0.1, 3.0))
def test_a_token_is_the_inverse_of_the_cumulative_distribution(seed, uniform, temperature):
    logits = logits_of(seed)
    chosen = row(uniform, temperature=temperature)
    (token,) = sample(logits.clone(), [chosen]).tolist()
    logprobs = torch.log_softmax(logits[0].double() / temperature, dim=-1)
    below = logprobs[:token].exp().sum().item()
    assert below - 1e-6 <= uniform <= below + logprobs[token].exp().item() + 1e-6
    assert chosen.ids == [token]
    assert chosen.logprobs == [pytest.approx(logprobs[token].item(), rel=1e-6, abs=1e-5)]


@given(seeds, units)
def test_greedy_takes_the_likeliest_with_its_log_probability_at_temperature_one(seed, uniform):
    logits = logits_of(seed)
    chosen = row(uniform, temperature=0.0)
    assert sample(logits.clone(), [chosen]).tolist() == [int(logits.argmax())]
    assert chosen.logprobs == [pytest.approx(torch.log_softmax(logits[0], -1).max().item(), rel=1e-6, abs=1e-5)]


@given(seeds, st.lists(st.tuples(units, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 4)), min_size=1, max_size=5))
def test_a_row_is_drawn_as_if_it_were_alone(seed, settings_of_rows):
    logits = logits_of(seed, len(settings_of_rows))
    rows = [row(uniform, temperature=temperature, top_k=top_k) for uniform, temperature, top_k in settings_of_rows]
    together = sample(logits.clone(), rows).tolist()
    for index, (uniform, temperature, top_k) in enumerate(settings_of_rows):
        alone = row(uniform, temperature=temperature, top_k=top_k)
        assert sample(logits[index : index + 1].clone(), [alone]).tolist() == [together[index]]
        assert alone.logprobs == pytest.approx(rows[index].logprobs, rel=1e-6, abs=1e-5)


def test_each_token_takes_the_next_number():
    logits = torch.zeros(1, 4)
    chosen = row(max_tokens=3)
    chosen.uniforms = np.array([0.1, 0.6, 0.9])
    for _ in range(3):
        sample(logits.clone(), [chosen])
    assert chosen.ids == [0, 2, 3]
    assert chosen.finished


def test_a_stop_id_ends_a_row_and_is_kept():
    chosen = row(0.6, max_tokens=8, stop_ids=(2, 3))
    sample(torch.zeros(1, 4), [chosen])
    assert (chosen.ids, chosen.stopped, chosen.finished) == ([2], True, True)
    other = row(0.1, max_tokens=8, stop_ids=(2, 3))
    sample(torch.zeros(1, 4), [other])
    assert (other.ids, other.stopped, other.finished) == ([0], False, False)


@given(seeds, st.integers(1, V), st.floats(0.01, 1.0), st.floats(0.0, 0.99))
def test_the_largest_number_draws_a_token_that_is_allowed(seed, top_k, top_p, min_p):
    """Rounding must not let the draw run past the last token that is left."""
    logits = logits_of(seed)
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    left = _truncate(torch.softmax(logits, -1).double(), [row(**options)])[0]
    for uniform in (0.0, 1.0 - 2.0**-53):
        (token,) = sample(logits.clone(), [row(uniform, **options)]).tolist()
        assert left[token] > 0


# ── truncation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def slowly_truncated(probabilities, *, top_k, top_p, min_p):
    """Probabilities that are left, by the definitions; `probabilities` are all different."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = order[:top_k] if top_k else order
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    total, mass, kept = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
    return [probability if token in kept else 0.0 for token, probability in enumerate(probabilities)]


@settings(max_examples=200)
@given(seeds, st.integers(0, V + 2), st.floats(0.01, 1.0), st.floats(0.0, 0.99))
def test_truncation_by_its_definitions(seed, top_k, top_p, min_p):
    probabilities = torch.softmax(logits_of(seed).double(), -1)
    expected = slowly_truncated(probabilities[0].tolist(), top_k=top_k, top_p=top_p, min_p=min_p)
    left = _truncate(probabilities.clone(), [row(top_k=top_k, top_p=top_p, min_p=min_p)])[0].tolist()
    assert left == pytest.approx(expected, abs=1e-12)
    assert max(left) > 0


@given(seeds)
def test_no_truncation_changes_nothing(seed):
    probabilities = torch.softmax(logits_of(seed, 3).double(), -1)
    assert torch.equal(_truncate(probabilities.clone(), [row()] * 3), probabilities)
    assert torch.equal(_truncate(probabilities.clone(), [row(top_k=V)] * 3), probabilities)
