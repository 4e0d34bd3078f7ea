"""The `vllm` engine: vLLM in this process, stepped by a thread of ours; its weights can be replaced in place, or shared.

Requests come and go between two tokens of the others. A change of weights is let in when nobody is being answered: those under
way are finished first, and later ones wait, so that every completion has one policy version and keys and values of older
weights serve nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from polyturn.errors import EngineError, NonFiniteError, PolyturnError
from polyturn.plan.engine_report import EngineReport
from polyturn.processes.deadlines import deadline
from polyturn.processes.threads import in_thread_within
from polyturn.types import Completion, SamplingParams

if TYPE_CHECKING:
    from polyturn.engine.vllm_core import Sampled, VllmSettings

Answer: TypeAlias = "tuple[asyncio.Future[Any], Any, BaseException | None]"
"""A future, and what to give it: a result or an error."""
SWITCH_S = 0.00005
"""After how long a thread that computes in Python lets another one. Each operation of PyTorch in vLLM's thread lets go of the
interpreter, and waits so long to have it back while others have work; Python's 5 ms are as long as a step of a small model."""
STOP_S = 30.0
"""How long the thread may take to end: a step, and giving memory back."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    key: str = ""


@dataclass(slots=True, eq=False)
class _Change:
    """A change of the weights that waits for its turn; without a version it is the wish to sleep."""

    change: Callable[[Mapping[str, torch.Tensor]], None]
    version: int | None
    done: asyncio.Future[None]


class VllmEngine:
    """Generates with vLLM in this process. Until weights are pushed it serves those of the model folder, as version 0."""

    def __init__(self, settings: VllmSettings, *, start_deadline_s: float) -> None:
        self._settings = settings
        self._start_deadline_s = start_deadline_s
        self._thread: _Thread | None = None

    @property
    def policy_version(self) -> int:
        """The version of the weights that would serve a request arriving now."""
        return 0 if self._thread is None else self._thread.version

    @property
    def context_limit(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._settings.max_model_len

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device(self._settings.device)

    @property
    def report(self) -> EngineReport | None:
        """Memory as vLLM found it at its start; None before."""
        return None if self._thread is None else self._thread.report

    async def start(self) -> None:
        """Build the engine. Raises MissingDependencyError, EngineError, DeadlineError."""
        if self._thread is None:
            thread = _Thread(self._settings)
            try:
                async with deadline(self._start_deadline_s, "vLLM to start (engine.start_deadline_s)"):
                    await thread.started
            except BaseException:
                thread.end()  # one that comes up later gives back what it took
                raise
            sys.setswitchinterval(SWITCH_S)
            self._thread = thread

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion. Raises EngineError when the engine is stopped or broken, or can't serve this request."""
        thread = self._alive()
        _refuse_impossible(prompt_ids, sampling, max_model_len=thread.max_model_len, vocab_size=thread.vocab_size)
        request = _Request(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        thread.post(lambda: thread.admit(request))
        try:
            return await request.future
        except asyncio.CancelledError:
            thread.post(lambda: thread.drop(request))
            raise

    async def stop(self) -> None:
        """End the thread and give memory back; requests still waiting get EngineError."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
            await in_thread_within(STOP_S, "vLLM to stop", thread.join)

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Every weight by the name that transformers gives it: views of vLLM's own tensors."""
        return self._alive().weights

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Copy all weights, while nobody is answered, and return the version now served.

        An update that breaks half-way leaves mixed weights, so the engine refuses to serve until another one came through.
        """

        def copy(own: Mapping[str, torch.Tensor]) -> None:
            with torch.no_grad():
                for name, view in own.items():
                    view.copy_(weights[name])

        return await self.change_weights(copy, version)

    async def change_weights(self, change: Callable[[Mapping[str, torch.Tensor]], None], version: int) -> int:
        """Let `change` do what it will to the weights, while nobody is answered, and return the version now served.

        Whatever was kept of older weights is forgotten. As in `update_weights`, a change that breaks is not served from.
        """
        await self._alive().change(change, version)
        return version

    async def sleep(self) -> None:
        """Give memory back when those who are being answered have their answers: what `VllmSettings.sleep` says.

        The next push takes it again, and so does a request; one whose weights were dropped and not brought is refused.
        """
        await self._alive().change(lambda own: None, None)

    def _alive(self) -> _Thread:
        if self._thread is None:
            raise EngineError("the vllm engine is not started")
        if self._thread.failure is not None:
            raise EngineError(f"the vllm engine failed earlier: {self._thread.failure}")
        return self._thread


class _Thread:
    """The thread that owns vLLM. `post`, `end`, `change` and `join` are for others, the rest is called by this one."""

    def __init__(self, settings: VllmSettings) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: str | None = None
        self.version = 0
        self.weights: Mapping[str, torch.Tensor] = {}
        self.report: EngineReport | None = None
        self.max_model_len = self.vocab_size = 0
        self._settings = settings
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._changes: deque[_Change] = deque()
        self._mixed: str | None = None
        self._ending = False
        self._core: Any = None
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run here before the next step."""
        self._inbox.put(call)

    def end(self) -> None:
        """Ask the thread to end."""
        self.post(lambda: setattr(self, "_ending", True))

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    async def change(self, change: Callable[[Mapping[str, torch.Tensor]], None], version: int | None) -> None:
        """Run `change` on the weights when those who are being answered now have their answers; without a version, sleep."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.post(lambda: self._changes.append(_Change(change, version, done)))
        await done

    def admit(self, request: _Request) -> None:
        """Take a request in, now or after the changes that wait."""
        self._waiting.append(request)

    def drop(self, request: _Request) -> None:
        """Its caller gave up."""
        if self._running.pop(request.key, None) is not None:
            self._core.abort([request.key])

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._build()
        except BaseException as error:
            reason = error if isinstance(error, PolyturnError) else EngineError(f"vLLM did not start: {_words(error)}")
            self._tell([(self.started, None, reason)])
            return
        self._tell([(self.started, None, None)])
        try:
            while not self._ending:
                self._turn()
        except BaseException as error:
            self.failure = _words(error)
        while not self._ending:
            self._fail_all(f"the vllm engine failed: {self.failure}")
            self._read_inbox(block=True)
        self._read_inbox(block=False)
        self._fail_all("the vllm engine was stopped")
        self.weights = {}
        self._core.close()

    def _build(self) -> None:
        from polyturn.engine.vllm_core import VllmCore

        self._core = VllmCore(self._settings)
        self.weights = self._core.weights()
        self.report = self._core.report()
        self.max_model_len, self.vocab_size = self._core.max_model_len, self._core.vocab_size

    def _turn(self) -> None:
        """One round: what was posted, changes of the weights, whoever waits, one token for everybody."""
        self._read_inbox(block=not (self._running or self._waiting or self._changes))
        if self._changes and not self._running:
            self._make_changes()
        while self._waiting and not self._changes:
            self._start(self._waiting.popleft())
        if self._core.busy:
            self._step()

    def _read_inbox(self, *, block: bool) -> None:
        try:
            self._inbox.get(block=block)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _make_changes(self) -> None:
        while self._changes:
            wanted = self._changes.popleft()
            try:
                if wanted.version is None:
                    self._core.sleep()
                else:
                    self._change(wanted.change, wanted.version)
            except Exception as error:
                self._tell([(wanted.done, None, error)])
            else:
                self._tell([(wanted.done, None, None)])

    def _change(self, change: Callable[[Mapping[str, torch.Tensor]], None], version: int) -> None:
        """A change, with memory for the weights; the cache takes its own again when they are there."""
        self._mixed = f"a weight update to version {version} did not complete"
        self._core.wake_weights()
        self._core.settle()
        change(self.weights)
        self._core.settle()
        self._core.brought()
        self._core.wake()
        self._core.forget()
        self._mixed, self.version = None, version

    def _start(self, request: _Request) -> None:
        if request.future.cancelled():
            return
        try:
            if self._mixed is not None:
                raise EngineError(f"the vllm engine failed: {self._mixed}")
            self._core.wake()
            request.key = self._core.add(request.prompt_ids, request.sampling)
        except (PolyturnError, ValueError, TypeError) as error:
            reason = error if isinstance(error, PolyturnError) else EngineError(f"vLLM refused a request: {_words(error)}")
            self._tell([(request.future, None, reason)])
        else:
            self._running[request.key] = request

    def _step(self) -> None:
        answers: list[Answer] = []
        for sampled in self._core.step():
            answers.append(_answer(self._running.pop(sampled.key).future, sampled, self.version))
        self._tell(answers)

    def _fail_all(self, reason: str) -> None:
        futures: list[asyncio.Future[Any]] = [request.future for request in (*self._running.values(), *self._waiting)]
        futures += [wanted.done for wanted in self._changes]
        self._running.clear()
        self._waiting.clear()
        self._changes.clear()
        self._tell([(future, None, EngineError(reason)) for future in futures])

    def _tell(self, answers: Sequence[Answer]) -> None:
        """Hand results and errors to those who wait, all of a loop at once."""
        for loop in {answer[0].get_loop() for answer in answers}:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, [answer for answer in answers if answer[0].get_loop() is loop])


def _settle(answers: Sequence[Answer]) -> None:
    for future, result, error in answers:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _answer(future: asyncio.Future[Completion], sampled: Sampled, version: int) -> Answer:
    """A finished request as what its caller gets."""
    if sampled.finish not in ("stop", "length"):
        return future, None, EngineError(f"vLLM ended a request with {sampled.finish!r} instead of a completion")
    if len(sampled.ids) != len(sampled.logprobs):
        told = f"{len(sampled.logprobs)} log-probabilities for {len(sampled.ids)} tokens"
        return future, None, EngineError(f"vLLM returned {told}")
    wrong = next((value for value in sampled.logprobs if not math.isfinite(value)), None)
    if wrong is not None:
        return future, None, NonFiniteError(f"vLLM sampled a token with a log-probability of {wrong}")
    completion = Completion(
        ids=tuple(sampled.ids),
        engine_logprobs=tuple(sampled.logprobs),
        policy_versions=(version,) * len(sampled.ids),
        stop_reason="stop" if sampled.finish == "stop" else "length",
    )
    return future, completion, None


def _refuse_impossible(prompt_ids: tuple[int, ...], sampling: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Raise EngineError for a request that can't be served."""
    if not prompt_ids or sampling.max_tokens < 1:
        raise EngineError(
            f"a request needs a prompt and room for a token; got {len(prompt_ids)} ids, max_tokens={sampling.max_tokens}"
        )
    if len(prompt_ids) >= max_model_len:
        raise EngineError(
            f"a prompt of {len(prompt_ids)} ids leaves no room in vLLM's context of {max_model_len} (engine.max_model_len)"
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        wrong = min(prompt_ids) if min(prompt_ids) < 0 else max(prompt_ids)
        raise EngineError(
            f"a prompt has the id {wrong}, and the vocabulary ends at {vocab_size - 1}: the tokenizer is not this model's"
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
