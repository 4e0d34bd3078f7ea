"""What an engine server and its client say to each other about a completion: `POST /inference/v1/generate`.

The bodies are those of vLLM 0.32 (its token-in, token-out route), as far as Polyturn uses them:

    {"token_ids": [5, 9], "sampling_params": {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [2], "logprobs": 0, ...}}

    {"request_id": "...", "model": "policy", "usage": {...}, "choices": [{"index": 0, "token_ids": [7, 2],
      "finish_reason": "stop", "stop_reason": 2, "logprobs": {"content": [{"token_id": 7, "logprob": -0.5, ...}, ...]},
      "weight_versions": [{"version": "3", "start": 0, "end": 2}]}]}

Versions are text there. Before the first weight update a server calls its weights `default`, which is version 0 here.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyturn.types import Completion, SamplingParams
from polyturn.weight_sync.labels import DEFAULT_LABEL

GENERATE = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingBody(_Body):
    """`sampling_params` of a request. What has one value only changes nothing in an engine that knows ids and no text."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop_token_ids: list[int] = Field(default_factory=list)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    logprobs: Literal[0] | None = None
    n: Literal[1] = 1
    ignore_eos: bool = True
    detokenize: bool = False
    skip_special_tokens: bool = True


class GenerateBody(_Body):
    """A request. `priority`, `cache_salt` and `model` are read and make no difference."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: SamplingBody
    request_id: str | None = None
    model: str | None = None
    stream: Literal[False] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int = 0


def request_body(
    prompt_ids: Sequence[int], sampling: SamplingParams, *, version: int = 0, model: str | None = None
) -> dict[str, Any]:
    """The request for one completion. Stop ids are ours only: the model's own end of text stops nothing by itself.

    Keys and values that a server keeps are shared among requests of one `version` only. `model` names adapters.
    """
    return {
        "cache_salt": f"version {version}",
        **({} if model is None else {"model": model}),
        "token_ids": list(prompt_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "seed": sampling.seed,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        },
    }


def read_request(body: object, *, context_limit: int | None, vocab_size: int) -> tuple[GenerateBody, SamplingParams]:
    """A request and how it is sampled. Raises ValueError with a sentence for one that can't be served."""
    try:
        request = GenerateBody.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else f"the body: {first['msg']}") from error
    largest = max(request.token_ids)
    if largest >= vocab_size:
        raise ValueError(f"token_ids has {largest}, and the model's vocabulary ends at {vocab_size - 1}")
    asked, num_prompt = request.sampling_params, len(request.token_ids)
    room = None if context_limit is None else context_limit - num_prompt
    if room is not None and room < 1:
        raise ValueError(
            f"the prompt has {num_prompt} tokens, and the model's context of {context_limit} must hold it and one token more"
        )
    limits = [limit for limit in (asked.max_tokens, room) if limit is not None]
    if not limits:
        raise ValueError("sampling_params.max_tokens is needed: the model does not say how long its context is")
    sampling = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        min_p=asked.min_p,
        max_tokens=min(limits),
        stop_ids=tuple(asked.stop_token_ids),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
    )
    return request, sampling


def answer_body(
    request: GenerateBody, completion: Completion | None, *, model: str, label: Mapping[int, str]
) -> dict[str, Any]:
    """The answer to a request; `completion` None says that it was aborted. `label` names versions."""
    ids = () if completion is None else completion.ids
    finish = "abort" if completion is None else completion.stop_reason
    logprobs = None
    if completion is not None and request.sampling_params.logprobs is not None:
        pairs = zip(completion.ids, completion.engine_logprobs, strict=True)
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []} for token, logprob in pairs
        ]
        logprobs = {"content": content}
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": ids[-1] if finish == "stop" else None,
        "token_ids": list(ids),
        "logprobs": logprobs,
        "weight_versions": [] if completion is None else _spans(completion.policy_versions, label),
    }
    num_prompt = len(request.token_ids)
    return {
        "request_id": request.request_id or uuid.uuid4().hex,
        "model": model,
        "created": int(time.time()),
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": len(ids), "total_tokens": num_prompt + len(ids)},
        "prompt_token_ids": request.token_ids if request.return_token_ids else None,
        "choices": [choice],
    }


def _spans(versions: Sequence[int], label: Mapping[int, str]) -> list[dict[str, Any]]:
    spans, start = [], 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        spans.append({"version": label.get(version, str(version)), "start": start, "end": end})
        start = end
    return spans


def read_answer(answer: Any, *, version: int = 0, adapter: str | None = None) -> Completion:
    """The completion in an answer, of `version` where the server does not say so itself, or was asked for an `adapter`.

    Raises ValueError with a sentence when there is none in it.
    """
    try:
        (choice,) = answer["choices"]
        ids = tuple(map(_whole, choice["token_ids"]))
        finish = choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise ValueError(f"the request ended with {finish!r} instead of a completion")
        content = choice["logprobs"]["content"]
        if [_token_of(entry) for entry in content] != list(ids):
            raise ValueError("its log-probabilities are of other tokens than its ids")
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        if adapter is not None and answer["model"] != adapter:
            raise ValueError(f"it was sampled by {answer['model']!r}, and {adapter!r} was asked for")
        # Versions of vLLM before 0.28 name none; a server with adapters names its base's.
        told = adapter is None and "weight_versions" in choice
        versions = _versions(choice["weight_versions"], len(ids)) if told else (version,) * len(ids)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer lacks what a completion needs ({type(error).__name__}: {error})") from error
    if not ids:
        raise ValueError("the answer has no token")
    return Completion(ids=ids, engine_logprobs=logprobs, policy_versions=versions, stop_reason=finish)


def _token_of(entry: Mapping[str, Any]) -> int:
    """The id that a log-probability is of; older vLLM writes it as the text `token_id:7`."""
    if "token_id" in entry:
        return _whole(entry["token_id"])
    return int(str(entry["token"]).removeprefix("token_id:"))


def _versions(spans: Sequence[Mapping[str, Any]], count: int) -> tuple[int, ...]:
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] <= span["start"]:
            raise ValueError("its weight versions do not cover its tokens one after the other")
        versions += [read_label(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"its weight versions cover {len(versions)} of its {count} tokens")
    return tuple(versions)


def read_label(label: object) -> int:
    """The version that a label names. Raises ValueError for one that Polyturn never gave."""
    if label == DEFAULT_LABEL:
        return 0
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label)
    raise ValueError(f"its weights are labelled {label!r}, which is no version of this run")


def _whole(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        raise ValueError(f"{token!r} among its ids is no id")
    return token
