"""The `hf` engine: transformers in this process, batching whatever waits.

One task collects the requests that are waiting and hands them to a thread, which prefills and decodes them together and
returns when the last has ended. Each request draws its noise from its own seed, so its tokens don't depend on who shares
its batch (beyond the rounding of the logits).

Weights change between two batches only. While an update is open, requests wait; one that did not come through whole leaves
mixed weights, and the engine serves nobody until another one did.

Shapes: B requests of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from polyturn.engine.sampling import Row, sample, uniforms_of
from polyturn.errors import EngineError, NonFiniteError
from polyturn.models.adapters import frozen_weights, pushed_weights
from polyturn.processes.threads import in_thread
from polyturn.types import Completion, SamplingParams

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]

_QUIET_ROUNDS = 8
"""Event-loop rounds without a new request before a batch is closed: enough for every ready trajectory to speak."""


class AbortedError(EngineError):
    """A request was aborted by a pause."""


@dataclass(slots=True)
class _Request:
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    future: asyncio.Future[Completion]


class WeightUpdate:
    """One replacement of all weights, which may arrive in parts. Made by `HfEngine.begin_update`."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        self.own = own
        self.missing = set(own)


class HfEngine:
    """Generates with a transformers model of its own; `update_weights` replaces its parameters between two batches.

    A batch is closed when no request has come for `linger_s` (or for a few rounds of the event loop, when that is 0).
    """

    def __init__(self, model: torch.nn.Module, *, max_batch_size: int = 256, pad_id: int = 0, linger_s: float = 0.0) -> None:
        self.policy_version = 0
        self._model = model.eval()
        # transformers renamed it; both names are in the range we accept.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._device = next(model.parameters()).device
        self._max_batch_size = max_batch_size
        self._pad_id = pad_id
        self._linger_s = linger_s
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._unfinished: set[asyncio.Future[Completion]] = set()
        self._turn = asyncio.Lock()
        self._loading = threading.Lock()
        self._permit = asyncio.Event()
        self._permit.set()
        self._server: asyncio.Task[None] | None = None
        self._paused = False
        self._update: WeightUpdate | None = None
        self._broken: str | None = None
        self._not_finite: NonFiniteError | None = None
        self._mixed: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine can't serve; None while it can."""
        return self._broken or self._mixed

    @property
    def paused(self) -> bool:
        """Whether a pause is on."""
        return self._paused

    @property
    def context_limit(self) -> int | None:
        """Most tokens of prompt and completion together that the model's positions allow; None when it does not say."""
        limit = getattr(getattr(self._model, "config", None), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    @property
    def vocab_size(self) -> int:
        """Ids from 0 to below this have an embedding."""
        embeddings: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        return int(embeddings.weight.shape[0])

    async def start(self) -> None:
        """Start the batching task."""
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="hf-engine")

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion. Raises EngineError when the engine is stopped or broken."""
        if self._not_finite is not None:
            raise self._not_finite  # whoever comes later must not end the run as if the engine were gone
        if self.failure is not None:
            raise EngineError(f"the hf engine failed earlier: {self.failure}")
        if self._server is None:
            raise EngineError("the hf engine is not started")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(
                f"a request needs a prompt and room for a token; got {len(prompt_ids)} ids, max_tokens={sampling.max_tokens}"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            wrong, last = min(prompt_ids) if min(prompt_ids) < 0 else max(prompt_ids), self.vocab_size - 1
            raise EngineError(
                f"a prompt has the id {wrong}, and the vocabulary ends at {last}: the tokenizer is not this model's"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._queue.put_nowait(_Request(prompt_ids, sampling, future))
        return await future

    async def pause(self, mode: PauseMode) -> None:
        """Start no batch until `resume`. Returns when none runs any more.

        `keep`: whoever has not been answered waits. `wait`: whoever is here now is answered first. `abort`: they get
        AbortedError. Requests that come later wait, in every mode.
        """
        if mode == "wait" and not self._paused and self._unfinished:
            await asyncio.wait(set(self._unfinished))
        self._paused = True
        self._refresh()
        if mode == "abort":
            for future in list(self._unfinished):
                if not future.done():
                    future.set_exception(AbortedError("the request was aborted: the engine was paused"))
        async with self._turn:
            pass

    def resume(self) -> None:
        """Go on after a pause. An update that is still open is given up: nobody holds the requests back for it any more."""
        self._paused = False
        if self._update is not None:
            self.fail_update(self._update, "a weight update was started and not finished")
        self._refresh()

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

        An update that fails half-way leaves mixed weights, so the engine refuses to serve until another one came through.
        """
        update = await self.begin_update()
        try:
            await in_thread(self.load, update, weights)
            return self.finish_update(update, version)
        except BaseException as error:
            reason = f"a weight update to version {version} did not complete ({type(error).__name__}: {error})"
            self.fail_update(update, reason)
            raise

    async def begin_update(self) -> WeightUpdate:
        """Open an update: from now until it is finished or failed, requests wait. Returns when no batch runs.

        An update that is still open is given up for this one, which brings everything and so mends what that one left.
        """
        async with self._turn:
            # A thread may still copy a part of an older update.
            while not self._loading.acquire(blocking=False):  # noqa: ASYNC110 - a lock of threads wakes no task
                await asyncio.sleep(0.001)
            self._update = WeightUpdate(self.named_weights())
            self._loading.release()
            self._refresh()
            return self._update

    def load(self, update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy a part of an update into the model; blocks. Raises EngineError when it was given up, or a name is unknown."""
        with self._loading:
            if update is not self._update:
                raise EngineError("this weight update was given up, for a newer one or because it failed")
            unknown = weights.keys() - update.own.keys()
            if unknown:
                raise EngineError(f"{min(unknown)} is no weight of this model")
            self._copy(weights)
            update.missing -= weights.keys()

    def finish_update(self, update: WeightUpdate, version: int) -> int:
        """Close an update and return the version now served. Raises EngineError unless every tensor came."""
        if update is not self._update:
            raise EngineError("this weight update was given up, for a newer one or because it failed")
        if update.missing:
            reason = (
                f"a weight update to version {version} brought {len(update.own) - len(update.missing)} of {len(update.own)} "
                f"tensors; missing: {sorted(update.missing)[:3]}"
            )
            self.fail_update(update, reason)
            raise EngineError(reason)
        self.policy_version = version
        self._update = self._mixed = None
        self._refresh()
        return version

    def fail_update(self, update: WeightUpdate, reason: str) -> None:
        """Close an update that did not come through: nothing is served from what it left. No effect on one that is closed."""
        if update is self._update:
            self._update, self._mixed = None, reason
            self._refresh()

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = self.named_weights()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    # ── generation ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refresh(self) -> None:
        """Permit batches, or not. With mixed weights they are permitted, and fail."""
        if self._mixed is not None or not (self._paused or self._update is not None):
            self._permit.set()
        else:
            self._permit.clear()

    async def _serve(self) -> None:
        batch: list[_Request] = []
        try:
            while True:
                batch.append(await self._queue.get())
                while batch:
                    await self._permit.wait()
                    async with self._turn:
                        if self._permit.is_set():
                            await self._answer(batch)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._not_finite = error if isinstance(error, NonFiniteError) else None
            self._fail(batch, self._broken)
            self._fail_waiting(self._broken)
        except asyncio.CancelledError:
            self._fail(batch, "the engine was stopped")
            raise

    async def _answer(self, batch: list[_Request]) -> None:
        """Answer `batch` and whoever joins it, and empty it."""
        await self._gather(batch)
        batch[:] = [request for request in batch if not request.future.done()]
        if self._mixed is not None:
            # These were let in before a weight update broke.
            self._fail(batch, self._mixed)
        elif batch:
            completions = await in_thread(self._generate, batch, self.policy_version)
            for request, completion in zip(batch, completions, strict=True):
                if not request.future.done():
                    request.future.set_result(completion)
        batch.clear()

    async def _gather(self, batch: list[_Request]) -> None:
        quiet = 0
        while quiet < _QUIET_ROUNDS and len(batch) < self._max_batch_size:
            await asyncio.sleep(self._linger_s / _QUIET_ROUNDS)
            quiet += 1
            while not self._queue.empty() and len(batch) < self._max_batch_size:
                batch.append(self._queue.get_nowait())
                quiet = 0

    def _fail_waiting(self, reason: str) -> None:
        waiting = []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        self._fail(waiting, reason)

    def _fail(self, requests: Sequence[_Request], reason: str) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(self._not_finite or EngineError(f"the hf engine failed: {reason}"))

    @torch.inference_mode()
    def _generate(self, batch: Sequence[_Request], version: int) -> list[Completion]:
        """Prefill, then decode until every row has ended or nobody waits for it; such rows leave the batch."""
        rows = [Row(sampling=request.sampling, uniforms=uniforms_of(request.sampling)) for request in batch]
        futures = [request.future for request in batch]
        input_ids_BT, attention_BT = self._pad([request.prompt_ids for request in batch])
        position_ids_BT = (attention_BT.cumsum(-1) - 1).clamp_min(0)
        alive = list(range(len(batch)))
        step: dict[str, Any] = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
        cache: Any = None
        while True:
            step[self._cache_argument] = cache
            out: Any = self._model(**step, attention_mask=attention_BT, use_cache=True, logits_to_keep=1)
            cache = getattr(out, self._cache_argument)
            next_B = sample(out.logits[:, -1].float(), [rows[index] for index in alive])
            keep = [place for place, index in enumerate(alive) if not (rows[index].finished or futures[index].done())]
            if not keep:
                break
            if len(keep) < len(alive):
                kept = torch.tensor(keep, device=self._device)
                cache.batch_select_indices(kept)
                attention_BT, next_B, position_ids_BT = attention_BT[kept], next_B[kept], position_ids_BT[kept]
                alive = [alive[place] for place in keep]
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
