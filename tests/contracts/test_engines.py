"""What every engine promises, demanded of each one we ship; and what only one that samples can promise.

A model's logits are checked against a forward pass over the whole sequence, one request at a time, with no cache and no
padding. Draws have fixed seeds, so a statistical test passes or fails for good.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from parts.served import Served
from parts.vllm_here import PushedHere
from parts.vllm_served import PushedVllm, needs_vllm
from polyturn.engine.base import Engine
from polyturn.engine.hf import HfEngine
from polyturn.engine.scripted import ScriptedEngine
from polyturn.errors import EngineError
from polyturn.models.tiny import build_tiny
from polyturn.types import Completion, SamplingParams

VOCAB, STOP = 24, 4
PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1,), (0, 7, 9, 9)]


@cache
def model():
    """A random model whose next token depends on all tokens before it more than a fresh one's does."""
    made = build_tiny(vocab_size=VOCAB, eos_id=STOP, pad_id=0, seed=3).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" not in name:
                weight.mul_(5 if "embed" in name else 4)
    return made


def fresh_model():
    made = build_tiny(vocab_size=VOCAB, eos_id=STOP, pad_id=0, seed=3)
    made.load_state_dict(model().state_dict())
    return made


def hf(**arguments) -> HfEngine:
    return HfEngine(fresh_model(), **arguments)


def scripted() -> ScriptedEngine:
    """Counts up from the sum of the prompt, and stops at a multiple of seven."""

    def script(context):
        first = sum(context) % 7
        return (*(10 + number for number in range(first, 7)), STOP)

    return ScriptedEngine(script)


def hf_server() -> Served:
    return Served(hf)


ENGINES = {"hf": hf, "hf_server": hf_server, "scripted": scripted}
VLLM = [pytest.param(kind, marks=needs_vllm) for kind in ("vllm", "vllm_server")]


def made_by(request) -> Engine:
    """The engine of a fixture's parameter, not started. A vLLM server is the whole session's, with this page's weights."""
    if request.param == "vllm":
        return PushedHere(request.getfixturevalue("vllm_engine"), model())
    if request.param == "vllm_server":
        return PushedVllm(request.getfixturevalue("vllm_server"), model())
    return ENGINES[request.param]()


# Plain fixtures, since the server of the session starts in one, and has a loop of its own for that.
@pytest.fixture(params=[*ENGINES, *VLLM])
def any_engine(request):
    return made_by(request)


@pytest.fixture(params=["hf", *VLLM])
def any_sampler(request):
    return made_by(request)


@pytest.fixture
async def engine(any_engine):
    await any_engine.start()
    yield any_engine
    await (any_engine.close() if isinstance(any_engine, Served) else any_engine.stop())


@pytest.fixture
async def sampler(any_sampler):
    """An engine that samples from `model()`."""
    await any_sampler.start()
    yield any_sampler
    await any_sampler.stop()


def asking(**options) -> SamplingParams:
    return replace(SamplingParams(max_tokens=24, stop_ids=(STOP,), seed=1), **options)


async def ask_all(engine: Engine, requests) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests))


def full_logits(prompt, ids, of=None) -> torch.Tensor:
    """Logits that predict each of `ids` after `prompt`, from one forward pass over everything."""
    with torch.no_grad():
        logits = (of or model())(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float()


# ── every engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_engine_speaks_the_protocol():
    for make in ENGINES.values():
        assert isinstance(make(), Engine)


@pytest.mark.parametrize("max_tokens", [1, 3, 24])
async def test_what_a_completion_holds(engine, max_tokens):
    requests = [(prompt, asking(seed=seed, max_tokens=max_tokens)) for seed, prompt in enumerate(PROMPTS * 4)]
    completions = await ask_all(engine, requests)
    for completion in completions:
        assert 1 <= len(completion.ids) <= max_tokens
        assert len(completion.engine_logprobs) == len(completion.policy_versions) == len(completion.ids)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in completion.engine_logprobs)
        assert set(completion.policy_versions) == {engine.policy_version}
        assert all(type(token) is int and 0 <= token < VOCAB for token in completion.ids)
        assert STOP not in completion.ids[:-1]
        assert completion.stop_reason == ("stop" if completion.ids[-1] == STOP else "length")
        assert completion.stop_reason == "stop" or len(completion.ids) == max_tokens
    if max_tokens == 24:
        assert any(completion.stop_reason == "stop" for completion in completions)


async def test_without_stop_ids_a_completion_runs_to_its_limit(engine):
    completion = await engine.generate((0, 7), asking(stop_ids=(), max_tokens=2))
    assert len(completion.ids) == 2
    assert completion.stop_reason == "length"


async def test_a_stop_id_as_the_last_token_allowed_is_a_stop(engine):
    whole = await engine.generate((0, 7), asking(max_tokens=24, temperature=0.0, stop_ids=()))
    place = next(index for index, token in enumerate(whole.ids) if token not in whole.ids[:index] and index > 0)
    cut = await engine.generate((0, 7), asking(max_tokens=place + 1, temperature=0.0, stop_ids=(whole.ids[place],)))
    assert cut.ids == whole.ids[: place + 1]
    assert cut.stop_reason == "stop"


async def test_many_requests_at_once_get_their_own_answers(engine):
    requests = [(prompt, asking(seed=seed)) for seed in range(20) for prompt in PROMPTS]
    together = await ask_all(engine, requests)
    alone = [await engine.generate(prompt, sampling) for prompt, sampling in requests[:15]]
    assert [completion.ids for completion in together[:15]] == [completion.ids for completion in alone]
    assert len({completion.ids for completion in together}) > 3


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 4), ((0, 7), 0), ((0, 7), -1)])
async def test_a_request_that_can_not_be_served_is_refused_and_the_next_one_served(engine, prompt, max_tokens):
    with pytest.raises(EngineError):
        await engine.generate(prompt, asking(max_tokens=max_tokens))
    assert (await engine.generate((0, 7), asking())).ids


async def test_start_and_stop_twice(engine):
    await engine.start()
    expected = await engine.generate((0, 7), asking())
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineError):
        await engine.generate((0, 7), asking())
    await engine.start()
    assert await engine.generate((0, 7), asking()) == expected


async def test_a_caller_that_gives_up_disturbs_nobody(engine):
    given_up = asyncio.create_task(engine.generate((0, 7), asking(max_tokens=10**3, stop_ids=())))
    await asyncio.sleep(0)
    others = [asyncio.create_task(engine.generate(prompt, asking())) for prompt in PROMPTS]
    given_up.cancel()
    completions = await asyncio.gather(*others)
    assert given_up.cancelled()
    assert [completion.ids for completion in completions] == [
        (await engine.generate(prompt, asking())).ids for prompt in PROMPTS
    ]


# ── the scripted engine ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_scripted_stops_where_an_engine_would():
    engine = ScriptedEngine(lambda context: (7, STOP, 9, 9))
    completion = await engine.generate((0,), asking())
    assert completion.ids == (7, STOP)
    assert completion.stop_reason == "stop"
    # An id that is no stop id of this request ends nothing.
    assert (await engine.generate((0,), asking(stop_ids=(9,)))).ids == (7, STOP, 9)


async def test_scripted_raises_what_the_script_says():
    engine = ScriptedEngine(lambda context: EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate((0,), asking())


async def test_scripted_fails_what_is_pending_when_it_is_stopped():
    engine = ScriptedEngine(lambda context: (STOP,), delay_s=0.05)
    pending = asyncio.create_task(engine.generate((0,), asking()))
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError):
        await pending


async def test_scripted_remembers_what_it_was_asked():
    engine = ScriptedEngine(lambda context: (7, STOP), logprob=-0.25)
    engine.policy_version = 3
    completion = await engine.generate((0, 1), asking(seed=5))
    assert engine.requests == [((0, 1), asking(seed=5))]
    assert completion.engine_logprobs == (-0.25, -0.25)
    assert completion.policy_versions == (3, 3)


# ── sampling from a model ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
async def test_log_probabilities_are_those_of_a_full_forward_pass(sampler, temperature):
    """Of prompts of unlike lengths in one batch, whose rows end at different times: padding, positions and cache are right."""
    requests = [(prompt, asking(seed=seed, temperature=temperature)) for seed in range(6) for prompt in PROMPTS]
    completions = await ask_all(sampler, requests)
    assert len({len(completion.ids) for completion in completions}) > 1 or temperature == 0.0
    for (prompt, _), completion in zip(requests, completions, strict=True):
        expected = torch.log_softmax(full_logits(prompt, completion.ids) / (temperature or 1.0), dim=-1)
        chosen = expected.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.engine_logprobs), chosen, atol=1e-5, rtol=0)


async def test_padding_does_not_move_positions():
    """A model with learned positions knows where a token stands; one with rotary positions only how far others are."""
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=STOP, bos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        learned = GPT2LMHeadModel(config).eval()
        torch.nn.init.normal_(learned.transformer.wpe.weight)
    engine = HfEngine(learned)
    await engine.start()
    requests = [(prompt, asking(seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    for (prompt, _), completion in zip(requests, await ask_all(engine, requests), strict=True):
        expected = torch.log_softmax(full_logits(prompt, completion.ids, learned), dim=-1)
        chosen = expected.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.engine_logprobs), chosen, atol=1e-5, rtol=0)
    await engine.stop()


def truncated(logits, top_p, top_k, min_p):
    """Logits with -inf for what one of the three cuts away."""
    probabilities, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    kept = (probabilities.cumsum(-1) - probabilities < top_p) & (probabilities >= min_p * probabilities[:, :1])
    if top_k:
        kept[:, top_k:] = False
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -math.inf)


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.5, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.5)])
async def test_log_probabilities_are_those_before_truncation(sampler, top_p, top_k, min_p):
    """vLLM's are those after it, among the tokens that are left: a recipe has to ask for truncation by name."""
    completion = await sampler.generate((0, 7, 9), asking(top_p=top_p, top_k=top_k, min_p=min_p, seed=4))
    logits = full_logits((0, 7, 9), completion.ids)
    if isinstance(sampler, PushedVllm | PushedHere):
        logits = truncated(logits, top_p, top_k, min_p)
    expected = torch.log_softmax(logits, dim=-1)
    chosen = expected.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.engine_logprobs), chosen, atol=1e-5, rtol=0)


async def test_temperature_zero_is_greedy(sampler):
    for completion, prompt in zip(
        await ask_all(sampler, [(prompt, asking(temperature=0.0, seed=seed)) for seed, prompt in enumerate(PROMPTS)]),
        PROMPTS,
        strict=True,
    ):
        assert full_logits(prompt, completion.ids).argmax(-1).tolist() == list(completion.ids)


async def test_the_same_seed_gives_the_same_tokens_in_any_company(sampler):
    requests = [(prompt, asking(seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    alone = [await sampler.generate(prompt, sampling) for prompt, sampling in requests]
    together = await ask_all(sampler, requests)
    backwards = (await ask_all(sampler, requests[::-1]))[::-1]
    crowd = [(prompt, asking(seed=100 + seed, temperature=0.5, top_k=2)) for seed in range(10) for prompt in PROMPTS]
    in_a_crowd = (await ask_all(sampler, crowd + requests))[-len(requests) :]
    ids = [completion.ids for completion in alone]
    for others in (together, backwards, in_a_crowd):
        assert [completion.ids for completion in others] == ids
        for one, other in zip(alone, others, strict=True):
            assert one.engine_logprobs == pytest.approx(other.engine_logprobs, abs=1e-5)
    assert len(set(ids)) == len(ids)


async def test_batches_of_every_size_give_the_same_tokens():
    requests = [(prompt, asking(seed=seed)) for seed in range(3) for prompt in PROMPTS]
    expected = None
    for size in (1, 2, 7, 256):
        engine = hf(max_batch_size=size)
        await engine.start()
        ids = [completion.ids for completion in await ask_all(engine, requests)]
        await engine.stop()
        expected = expected or ids
        assert ids == expected


DRAWS = 2000


async def first_tokens(sampler, prompt, **options) -> Counter:
    requests = [(prompt, asking(seed=seed, max_tokens=1, **options)) for seed in range(DRAWS)]
    return Counter(completion.ids[0] for completion in await ask_all(sampler, requests))


def allowed(probabilities: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> dict[int, float]:
    """Tokens that may be drawn and their probabilities, by the definitions: top_k, then min_p, then top_p of what is left."""
    left = sorted(enumerate(probabilities.tolist()), key=lambda item: -item[1])
    left = left[:top_k] if top_k else left
    left = [item for item in left if item[1] >= min_p * left[0][1]]
    total, kept, mass = sum(p for _, p in left), [], 0.0
    for item in left:
        if mass < top_p * total:
            kept.append(item)
        mass += item[1]
    total = sum(p for _, p in kept)
    return {token: p / total for token, p in kept}


TRUNCATIONS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB},
    {"top_p": 0.3},
    {"top_p": 0.8},
    {"min_p": 0.4},
    {"top_p": 0.9, "top_k": 6, "min_p": 0.1, "temperature": 1.3},
]


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
async def test_frequencies_match_probabilities(sampler, options):
    prompt = (0, 7, 9)
    cut = {name: value for name, value in options.items() if name != "temperature"}
    logits = full_logits(prompt, (0,))[0]
    expected = allowed(torch.softmax(logits / options.get("temperature", 1.0), dim=-1), **cut)
    counts = await first_tokens(sampler, prompt, **options)
    assert counts.keys() <= expected.keys()
    assert sum(counts.values()) == DRAWS
    # Pearson's statistic of k cells has mean k - 1 and variance 2 (k - 1); rare tokens share one cell.
    cells = {token: p for token, p in expected.items() if p * DRAWS >= 5}
    rest = 1.0 - sum(cells.values())
    observed = [(counts[token], p) for token, p in cells.items()]
    if rest * DRAWS >= 1:
        observed.append((DRAWS - sum(count for count, _ in observed), rest))
    statistic = sum((count - p * DRAWS) ** 2 / (p * DRAWS) for count, p in observed)
    freedom = len(observed) - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9
    if cut.get("top_k") != 1:
        assert len(cells) > 1


async def test_later_tokens_are_drawn_from_their_own_numbers(sampler):
    """One number for all tokens of a request would tie the second to the first."""
    requests = [((0, 7, 9), asking(seed=seed, max_tokens=2, stop_ids=())) for seed in range(DRAWS)]
    pairs = Counter(completion.ids for completion in await ask_all(sampler, requests))
    first = torch.softmax(full_logits((0, 7, 9), (0,))[0], dim=-1)
    likeliest = int(first.argmax())
    second = torch.softmax(full_logits((0, 7, 9, likeliest), (0,))[0], dim=-1)
    drawn = sum(count for pair, count in pairs.items() if pair[0] == likeliest)
    for token in second.topk(3).indices.tolist():
        share, p = pairs[likeliest, token] / drawn, float(second[token])
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / drawn)


# ── an engine that ends or breaks ──────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """Holds up a method that runs in the engine's thread until it is opened."""

    def __init__(self, method):
        self.entered, self.open = threading.Event(), threading.Event()
        self._method = method

    def __call__(self, *arguments):
        self.entered.set()
        assert self.open.wait(30), "nobody opened the gate"
        return self._method(*arguments)

    async def reached(self):
        await asyncio.to_thread(self.entered.wait, 30)


async def test_hf_is_not_served_before_its_start():
    with pytest.raises(EngineError, match="not started"):
        await hf().generate((0, 7), asking())


@pytest.mark.parametrize("wrong", [-1, 10_000])
async def test_hf_refuses_an_id_outside_the_vocabulary_and_serves_the_next(wrong):
    engine = hf()
    await engine.start()
    with pytest.raises(EngineError, match=f"a prompt has the id {wrong}, and the vocabulary ends at "):
        await engine.generate((0, wrong), asking())
    assert (await engine.generate((0, 7), asking())).ids
    await engine.stop()


async def test_hf_stop_fails_whatever_waits():
    engine = hf(max_batch_size=2)
    engine._generate = gate = Gate(engine._generate)
    await engine.start()
    requests = [asyncio.create_task(engine.generate(prompt, asking())) for prompt in PROMPTS]
    await gate.reached()
    await engine.stop()
    results = await asyncio.gather(*requests, return_exceptions=True)
    gate.open.set()
    assert all(isinstance(result, EngineError) and "stopped" in str(result) for result in results)
    await engine.stop()


async def test_hf_does_not_work_for_whoever_gave_up():
    engine = hf(max_batch_size=2)
    batches = []
    generate = engine._generate
    engine._generate = gate = Gate(lambda batch, version: batches.append(len(batch)) or generate(batch, version))
    await engine.start()
    requests = [asyncio.create_task(engine.generate(prompt, asking())) for prompt in PROMPTS]
    await gate.reached()
    for request in requests[2:4]:
        request.cancel()
    gate.open.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, False, True, True, False]
    assert batches == [2, 1]
    await engine.stop()


async def test_hf_failure_reaches_everybody_who_waits_and_whoever_comes_later():
    engine = hf(max_batch_size=2)

    def fail(batch, version):
        raise MemoryError("no room for the cache")

    engine._generate = gate = Gate(fail)
    await engine.start()
    requests = [asyncio.create_task(engine.generate(prompt, asking())) for prompt in PROMPTS]
    await gate.reached()
    gate.open.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, EngineError) and "MemoryError: no room for the cache" in str(result) for result in results)
    with pytest.raises(EngineError, match="no room for the cache"):
        await engine.generate((0, 7), asking())
    await engine.stop()


def changed_weights(engine: HfEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().flip(0) for name, tensor in engine.named_weights().items()}


async def test_hf_updates_between_two_batches():
    engine = hf(max_batch_size=2)
    engine._generate = gate = Gate(engine._generate)
    await engine.start()
    old = [asyncio.create_task(engine.generate(PROMPTS[0], asking(seed=seed))) for seed in range(2)]
    await gate.reached()
    new_weights = changed_weights(engine)
    update = asyncio.create_task(engine.update_weights(new_weights, 7))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(PROMPTS[0], asking(seed=0)))
    await asyncio.sleep(0)
    assert not update.done()
    assert engine.policy_version == 0
    gate.open.set()
    before = await asyncio.gather(*old)
    assert await update == 7
    after = await late
    assert {version for completion in before for version in completion.policy_versions} == {0}
    assert set(after.policy_versions) == {7}
    assert all(torch.equal(new_weights[name], tensor) for name, tensor in engine.named_weights().items())
    logits = full_logits(PROMPTS[0], before[0].ids)
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(before[0].ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(before[0].engine_logprobs), chosen, atol=1e-5)
    assert after.engine_logprobs[0] != pytest.approx(before[0].engine_logprobs[0], abs=1e-3)
    await engine.stop()


async def test_hf_refuses_to_serve_after_a_broken_update():
    engine = hf()
    await engine.start()
    weights = changed_weights(engine)
    last = list(weights)[-1]
    del weights[last]
    with pytest.raises(EngineError, match=rf"20 of 21 tensors; missing: \['{last}'\]"):
        await engine.update_weights(weights, 7)
    assert engine.policy_version == 0
    with pytest.raises(EngineError, match="version 7 brought 20 of 21"):
        await engine.generate((0, 7), asking())
    weights = changed_weights(engine)
    assert await engine.update_weights(weights, 8) == 8, "a whole one mends it"
    assert set((await engine.generate((0, 7), asking())).policy_versions) == {8}
    await engine.stop()


async def test_hf_does_not_serve_what_waited_while_an_update_broke():
    """A request that was let in before the weights were mixed must not be answered from them."""
    engine = hf()

    def fail(weights):
        raise RuntimeError("the copy stopped half-way")

    engine._copy = gate = Gate(fail)
    await engine.start()
    update = asyncio.create_task(engine.update_weights({}, 7))
    await gate.reached()
    waiting = [asyncio.create_task(engine.generate(prompt, asking())) for prompt in PROMPTS]
    for _ in range(30):
        await asyncio.sleep(0)
    gate.open.set()
    with pytest.raises(RuntimeError, match="half-way"):
        await update
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert all(isinstance(result, EngineError) and "half-way" in str(result) for result in results)
    await engine.stop()


async def test_hf_refuses_to_serve_after_an_update_that_was_cut():
    engine = hf()
    engine._copy = gate = Gate(engine._copy)
    await engine.start()
    update = asyncio.create_task(engine.update_weights(changed_weights(engine), 7))
    await gate.reached()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    with pytest.raises(EngineError, match="version 7"):
        await engine.generate((0, 7), asking())
    gate.open.set()
    await engine.stop()
