"""The `hf` engine: transformers in this process, batching whatever waits.

One task collects the requests that are waiting and hands them to a thread, which prefills and decodes them together and
returns when the last has ended. Each request draws its noise from its own seed, so its tokens don't depend on who shares
its batch (beyond the rounding of the logits).

Shapes: B requests of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polyturn.errors import EngineError, NonFiniteError
from polyturn.models.adapters import frozen_weights, pushed_weights
from polyturn.processes.threads import in_thread
from polyturn.types import Completion, SamplingParams

_QUIET_ROUNDS = 8
"""Event-loop rounds without a new request before a batch is closed: enough for every ready trajectory to speak."""


@dataclass(slots=True)
class _Request:
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    future: asyncio.Future[Completion]


@dataclass(slots=True)
class _Row:
    """A request while it is being sampled."""

    sampling: SamplingParams
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.ids) >= self.sampling.max_tokens


class HfEngine:
    """Generates with a transformers model of its own; `update_weights` replaces its parameters between two batches."""

    def __init__(self, model: torch.nn.Module, *, max_batch_size: int = 256, pad_id: int = 0) -> None:
        self.policy_version = 0
        self._model = model.eval()
        # transformers renamed it; both names are in the range we accept.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._device = next(model.parameters()).device
        self._max_batch_size = max_batch_size
        self._pad_id = pad_id
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._busy = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._broken: str | None = None

    async def start(self) -> None:
        """Start the batching task."""
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="hf-engine")

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """Sample one completion. Raises EngineError when the engine is stopped or broken."""
        if self._broken is not None:
            raise EngineError(f"the hf engine failed earlier: {self._broken}")
        if self._server is None:
            raise EngineError("the hf engine is not started")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(
                f"a request needs a prompt and room for a token; got {len(prompt_ids)} ids, max_tokens={sampling.max_tokens}"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Request(prompt_ids, sampling, future))
        return await future

    async def stop(self) -> None:
        """End the batching task; requests still waiting get EngineError."""
        server, self._server = self._server, None
        if server is not None:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        # A batch that runs can't be interrupted; its thread ends with it, and nobody waits for it.
        self._fail_waiting("the engine was stopped")

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Every parameter and buffer a push has to cover, by name: all of them, or the trained ones where others are frozen."""
        return pushed_weights(self._model)

    def frozen_weights(self) -> Mapping[str, torch.Tensor]:
        """The others, which no push brings."""
        return frozen_weights(self._model)

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Replace all weights between two batches and return the version now served.

        An update that fails half-way leaves mixed weights, so the engine refuses to serve from then on.
        """
        async with self._busy:
            try:
                await in_thread(self._copy, weights)
            except BaseException as error:
                self._broken = f"a weight update to version {version} did not complete ({type(error).__name__}: {error})"
                raise
            self.policy_version = version
        return self.policy_version

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.named_weights().items():
                own.copy_(weights[name])

    # ── generation ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        batch: list[_Request] = []
        try:
            while True:
                batch = [await self._queue.get()]
                await self._gather(batch)
                batch = [request for request in batch if not request.future.cancelled()]
                if not batch:
                    continue
                async with self._busy:
                    if self._broken is not None:
                        # These were let in before a weight update broke: the weights are mixed now.
                        self._fail(batch, self._broken)
                        continue
                    completions = await in_thread(self._generate, batch, self.policy_version)
                for request, completion in zip(batch, completions, strict=True):
                    if not request.future.done():
                        request.future.set_result(completion)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._fail(batch, self._broken, error if isinstance(error, NonFiniteError) else None)
            self._fail_waiting(self._broken)
        except asyncio.CancelledError:
            self._fail(batch, "the engine was stopped")
            raise

    async def _gather(self, batch: list[_Request]) -> None:
        quiet = 0
        while quiet < _QUIET_ROUNDS and len(batch) < self._max_batch_size:
            await asyncio.sleep(0)
            quiet += 1
            while not self._queue.empty() and len(batch) < self._max_batch_size:
                batch.append(self._queue.get_nowait())
                quiet = 0

    def _fail_waiting(self, reason: str) -> None:
        waiting = []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        self._fail(waiting, reason)

    @staticmethod
    def _fail(requests: Sequence[_Request], reason: str, error: NonFiniteError | None = None) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error or EngineError(f"the hf engine failed: {reason}"))

    @torch.inference_mode()
    def _generate(self, batch: Sequence[_Request], version: int) -> list[Completion]:
        """Prefill, then decode until every row has ended; rows that end leave the batch."""
        rows = [_Row(sampling=request.sampling, uniforms=_uniforms(request.sampling)) for request in batch]
        input_ids_BT, attention_BT = self._pad([request.prompt_ids for request in batch])
        position_ids_BT = (attention_BT.cumsum(-1) - 1).clamp_min(0)
        alive = rows
        step: dict[str, Any] = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
        cache: Any = None
        while True:
            step[self._cache_argument] = cache
            out: Any = self._model(**step, attention_mask=attention_BT, use_cache=True, logits_to_keep=1)
            cache = getattr(out, self._cache_argument)
            next_B = _sample(out.logits[:, -1].float(), alive)
            keep = [index for index, row in enumerate(alive) if not row.finished]
            if not keep:
                break
            if len(keep) < len(alive):
                kept = torch.tensor(keep, device=self._device)
                cache.batch_select_indices(kept)
                attention_BT, next_B, position_ids_BT = attention_BT[kept], next_B[kept], position_ids_BT[kept]
                alive = [alive[index] for index in keep]
            attention_BT = torch.cat([attention_BT, attention_BT.new_ones(len(alive), 1)], dim=1)
            position_ids_BT = position_ids_BT[:, -1:] + 1
            step = {"input_ids": next_B[:, None], "position_ids": position_ids_BT}
        return [
            Completion(
                ids=tuple(row.ids),
                engine_logprobs=tuple(row.logprobs),
                policy_versions=(version,) * len(row.ids),
                stop_reason="stop" if row.stopped else "length",
            )
            for row in rows
        ]

    def _pad(self, prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded ids and attention mask, `[B, T]`."""
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._pad_id, dtype=np.int64)
        attention = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            attention[row, longest - len(prompt) :] = 1
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(attention).to(self._device)


def _uniforms(sampling: SamplingParams) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One uniform number per token, from the request's own seed."""
    return np.random.Generator(np.random.Philox(key=sampling.seed)).random(sampling.max_tokens)


def _sample(logits_BV: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Append one token to each row and return them, `[B]`. Log-probabilities are under temperature, before truncation."""
    temperature_B = torch.tensor([row.sampling.temperature or 1.0 for row in rows], device=logits_BV.device)
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], dim=-1)
    probs_BV = _truncate(logprobs_BV.exp().double(), rows)
    cumulative_BV = probs_BV.cumsum(dim=-1)
    uniform_B = torch.tensor([row.uniforms[len(row.ids)] for row in rows], dtype=torch.float64, device=logits_BV.device)
    # Inverse of the cumulative distribution: the first token whose cumulative probability exceeds the number drawn.
    token_B = torch.searchsorted(cumulative_BV, (uniform_B * cumulative_BV[:, -1])[:, None], right=True)[:, 0]
    token_B = token_B.clamp_max(logits_BV.shape[-1] - 1)
    greedy_B = torch.tensor([row.sampling.temperature == 0 for row in rows], device=logits_BV.device)
    token_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), token_B)
    chosen = logprobs_BV.gather(-1, token_B[:, None])[:, 0].tolist()
    if not all(map(math.isfinite, chosen)):
        raise NonFiniteError("a log-probability of the engine is nan or inf: the weights that it samples with are broken")
    for row, token, logprob in zip(rows, token_B.tolist(), chosen, strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.stopped = token in row.sampling.stop_ids
    return token_B


def _truncate(probs_BV: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """Zero what top_k, min_p and top_p exclude, row by row; untouched when no row asks for it."""
    for index, row in enumerate(rows):
        sampling, probs_V = row.sampling, probs_BV[index]
        if sampling.top_k and sampling.top_k < probs_V.shape[-1]:
            probs_V[probs_V < probs_V.topk(sampling.top_k).values[-1]] = 0
        if sampling.min_p > 0:
            probs_V[probs_V < sampling.min_p * probs_V.max()] = 0
        if sampling.top_p < 1:
            ordered, order = probs_V.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            probs_V[order[before >= sampling.top_p * ordered.sum()]] = 0
    return probs_BV
