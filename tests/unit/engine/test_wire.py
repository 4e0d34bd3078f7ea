"""The bodies of completions over HTTP: what goes out comes back, and whatever else arrives is refused in a sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.engine.wire import answer_body, read_answer, read_label, read_request, request_body
from polyturn.types import Completion, SamplingParams

VOCAB, CONTEXT = 100, 32

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 200),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(1, CONTEXT - 20),
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    seed=st.integers(0, (1 << 63) - 1),
)


@st.composite
def completions(draw):
    tokens = draw(ids)
    start = draw(st.integers(0, 10**6))
    steps = draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    return Completion(
        ids=tokens,
        engine_logprobs=tuple(draw(st.lists(st.floats(-1e4, 0), min_size=len(tokens), max_size=len(tokens)))),
        policy_versions=tuple(start + sum(steps[: place + 1]) for place in range(len(tokens))),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
    )


def over_the_wire(body):
    return json.loads(json.dumps(body))


def plain_request(**sampling):
    body = request_body((5, 9), SamplingParams(max_tokens=4, stop_ids=(2,), seed=1))
    body["sampling_params"].update(sampling)
    return body


@given(ids, samplings)
def test_a_request_arrives_as_it_was_made(prompt, sampling):
    request, found = read_request(over_the_wire(request_body(prompt, sampling)), context_limit=CONTEXT + 8, vocab_size=VOCAB)
    assert tuple(request.token_ids) == prompt
    assert found == sampling


@given(completions())
def test_a_completion_arrives_as_it_was_sampled(completion):
    request, _ = read_request(plain_request(), context_limit=CONTEXT, vocab_size=VOCAB)
    assert read_answer(over_the_wire(answer_body(request, completion, model="m", label={}))) == completion


def test_the_answer_has_the_form_of_vllm():
    request, _ = read_request(plain_request(), context_limit=CONTEXT, vocab_size=VOCAB)
    completion = Completion(ids=(7, 8, 2), engine_logprobs=(-0.5, -1.0, -0.25), policy_versions=(3, 4, 4), stop_reason="stop")
    answer = answer_body(request, completion, model="m", label={})
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": [7, 8, 2],
        "logprobs": {
            "content": [
                {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
                for token, logprob in ((7, -0.5), (8, -1.0), (2, -0.25))
            ]
        },
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_weights_that_were_never_pushed_have_vllms_label_and_are_version_0():
    request, _ = read_request(plain_request(), context_limit=CONTEXT, vocab_size=VOCAB)
    completion = Completion(ids=(7,), engine_logprobs=(-0.5,), policy_versions=(0,), stop_reason="length")
    answer = answer_body(request, completion, model="m", label={0: "default"})
    assert answer["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 1}]
    assert read_answer(answer).policy_versions == (0,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.pop("token_ids"), "token_ids"),
        (lambda body: body.update(token_ids=[]), "token_ids"),
        (lambda body: body.update(token_ids="5 9"), "token_ids"),
        (lambda body: body.update(token_ids=[5, "9"]), "token_ids.1"),
        (lambda body: body.update(token_ids=[5, 9.0]), "token_ids.1"),
        (lambda body: body.update(token_ids=[5, True]), "token_ids.1"),
        (lambda body: body.update(token_ids=[5, -1]), "token_ids.1"),
        (lambda body: body.update(token_ids=[5, 100]), "token_ids has 100, and the model's vocabulary ends at 99"),
        (lambda body: body.update(token_ids=[5] * 32), "the prompt has 32 tokens, and the model's context of 32"),
        (lambda body: body.update(stream=True), "stream"),
        (lambda body: body.update(prompt="hello"), "prompt"),
        (lambda body: body.pop("sampling_params"), "sampling_params"),
        (lambda body: body["sampling_params"].update(temperature=-1.0), "sampling_params.temperature"),
        (lambda body: body["sampling_params"].update(temperature=float("nan")), "sampling_params.temperature"),
        (lambda body: body["sampling_params"].update(top_p=0.0), "sampling_params.top_p"),
        (lambda body: body["sampling_params"].update(max_tokens=0), "sampling_params.max_tokens"),
        (lambda body: body["sampling_params"].update(seed=-1), "sampling_params.seed"),
        (lambda body: body["sampling_params"].update(n=2), "sampling_params.n"),
        (lambda body: body["sampling_params"].update(logprobs=5), "sampling_params.logprobs"),
        (lambda body: body["sampling_params"].update(presence_penalty=1.0), "sampling_params.presence_penalty"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused(change, said):
    body = plain_request()
    change(body)
    with pytest.raises(ValueError, match="^" + said.replace(".", r"\.")):
        read_request(body, context_limit=32, vocab_size=VOCAB)


@pytest.mark.parametrize("body", [None, [], 3, "text", {}])
def test_what_is_no_request(body):
    with pytest.raises(ValueError, match=r"body|token_ids"):
        read_request(body, context_limit=32, vocab_size=VOCAB)


def test_max_tokens_is_what_is_left_of_the_context():
    for asked, given_limit, expected in ((4, 32, 4), (400, 32, 30), (None, 32, 30), (400, None, 400)):
        _, sampling = read_request(plain_request(max_tokens=asked), context_limit=given_limit, vocab_size=VOCAB)
        assert sampling.max_tokens == expected
    with pytest.raises(ValueError, match="max_tokens is needed"):
        read_request(plain_request(max_tokens=None), context_limit=None, vocab_size=VOCAB)


def test_a_request_without_a_seed_gets_one_of_its_own():
    seeds = {read_request(plain_request(seed=None), context_limit=32, vocab_size=VOCAB)[1].seed for _ in range(4)}
    assert len(seeds) == 4


def good_answer():
    request, _ = read_request(plain_request(), context_limit=CONTEXT, vocab_size=VOCAB)
    completion = Completion(ids=(7, 2), engine_logprobs=(-0.5, -1.0), policy_versions=(3, 3), stop_reason="stop")
    return answer_body(request, completion, model="m", label={})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda choice: choice.pop("token_ids"), "lacks"),
        (lambda choice: choice.update(token_ids=[7, "2"]), "no id"),
        (lambda choice: choice.update(token_ids=[7]), "other tokens"),
        (lambda choice: choice.update(token_ids=[], logprobs={"content": []}, weight_versions=[]), "no token"),
        (lambda choice: choice.update(logprobs=None), "lacks"),
        (lambda choice: choice.update(finish_reason="abort"), "ended with 'abort'"),
        (lambda choice: choice.update(weight_versions=None), "lacks"),
        (lambda choice: choice.update(weight_versions=[]), "0 of its 2 tokens"),
        (lambda choice: choice["weight_versions"][0].update(start=1), "one after the other"),
        (lambda choice: choice["weight_versions"][0].update(end=0), "one after the other"),
        (lambda choice: choice["weight_versions"][0].update(end=1), "1 of its 2 tokens"),
        (lambda choice: choice["weight_versions"][0].update(version="step-1"), "'step-1'"),
    ],
)
def test_an_answer_that_is_no_completion_is_refused(change, said):
    answer = good_answer()
    change(answer["choices"][0])
    with pytest.raises(ValueError, match=said):
        read_answer(answer)


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [1]}, "text"])
def test_what_is_no_answer(answer):
    with pytest.raises(ValueError, match=r"lacks|not enough values"):
        read_answer(answer)


@pytest.mark.parametrize("label", [None, 3, "", "-1", "३", "3.0", "v3"])
def test_labels_that_are_no_version(label):
    with pytest.raises(ValueError, match="no version of this run"):
        read_label(label)
