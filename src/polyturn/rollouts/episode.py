"""One trajectory: open the task, let model and environment take turns, score the end.

Blame is assigned here. An exception or a passed deadline in the environment, and a passed deadline of the engine, are
faults, and so is an answer of it that is no answer, or that can't be rendered: the trajectory is kept with its reason, masked
and counted. A limit on the model (turns, tokens, a reply cut short) is an ending like any other and is scored. A dead engine is
neither: it ends the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.engine.base import Engine
from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.calls import call, checked_outcome, checked_step
from polyturn.errors import DeadlineError, EngineError, EnvironmentSetupError, PolyturnError, ResourceError, TrainingError
from polyturn.processes.deadlines import deadline
from polyturn.processes.tasks import leave_behind
from polyturn.rendering.renderer import Conversation, PromptDelta, Renderer
from polyturn.rollouts.barrier import TurnBarrier
from polyturn.rollouts.opening import Opened, Opening
from polyturn.types import Completion, EndReason, SamplingParams, Task, Trajectory, Turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a trajectory may use up, and how long each part may take."""

    max_turns: int
    max_turn_tokens: int
    max_trajectory_tokens: int
    tool_deadline_s: float = 30.0
    turn_deadline_s: float = 120.0
    trajectory_deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy is sampled in a rollout; each request adds its own limit, stop ids and seed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Everything that the trajectories of a step share."""

    environment: Environment
    renderer: Renderer
    engine: Engine
    limits: Limits
    sampling: Sampling
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    seed_key: str = "0"
    """Names the run and the step: with task, sibling and turn it fixes the noise of every request."""


STUCK_S = 10.0
"""How much longer than its deadline a trajectory may take to end before it is left behind."""


class Fault(PolyturnError):
    """A reason outside the model's action; never leaves this module."""


def request_seed(*parts: object) -> int:
    """A 63-bit seed from run, step, task, sibling and turn, equal on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def play(
    player: Player, task: Task, sibling: int, barrier: TurnBarrier | None = None, opening: Opening | None = None
) -> Trajectory:
    """Play `task` once; siblings share its `opening`. Always returns a trajectory, faults included.

    An environment that swallows its cancellation, so that its deadline passes without effect, loses the trajectory
    `STUCK_S` after the trajectory's own deadline; what is stuck is left behind.

    Raises:
        ResourceError, TrainingError: what must end the run.
    """
    episode = _Episode(player, task, sibling, barrier, opening or Opening())
    limits = player.limits
    playing = asyncio.create_task(_played(episode), name=f"trajectory {episode.name}")
    try:
        await asyncio.wait({playing}, timeout=limits.trajectory_deadline_s + limits.tool_deadline_s + STUCK_S)
    finally:
        await _ended(playing, episode, limits.tool_deadline_s + STUCK_S)
    what = f"{player.environment.name}.{episode.asked} of {episode.name}"
    if not playing.done():
        episode.fault(f"{what} went on after the trajectory's deadline of {limits.trajectory_deadline_s:g} s, though cancelled")
    elif playing.cancelled():
        episode.fault(f"{what} cancelled the task that it ran in")
    else:
        playing.result()
    return episode.trajectory()


async def _ended(playing: asyncio.Task[None], episode: _Episode, limit_s: float) -> None:
    """Cancel what still runs; after `limit_s` it is left behind."""
    if not playing.done():
        playing.cancel()
        await asyncio.wait({playing}, timeout=limit_s)
        if not playing.done():
            _log.warning("%s goes on after being cancelled, and is left behind", playing.get_name())
            leave_behind(playing)
            if episode.barrier is not None:
                episode.barrier.leave(episode.name)
        elif not playing.cancelled():
            playing.exception()  # whoever cancelled us doesn't want it


async def _played(episode: _Episode) -> None:
    name, barrier = episode.name, episode.barrier
    try:
        async with deadline(episode.player.limits.trajectory_deadline_s, f"trajectory {name}"):
            await episode.run()
    except DeadlineError as error:
        episode.fault(str(error))
    except Fault as fault:
        episode.fault(str(fault))
    except (ResourceError, TrainingError):
        raise
    except Exception as error:
        # Ours, or the chat template's: one trajectory is lost, and the log says where.
        _log.warning("trajectory %s is lost", name, exc_info=True)
        episode.fault(f"{type(error).__name__}: {error}")
    finally:
        if barrier is not None:
            barrier.leave(name)
        await episode.close()


class _Episode:
    """The state of one trajectory under way."""

    def __init__(self, player: Player, task: Task, sibling: int, barrier: TurnBarrier | None, opening: Opening) -> None:
        self.player = player
        self.task = task
        self.sibling = sibling
        self.barrier = barrier
        self.opening = opening
        self.name = f"{task.id}/{sibling}"
        self.turns: list[Turn] = []
        self.end: EndReason = "fault"
        self.outcome: Mapping[str, float | None] = {}
        self.success = False
        self.reason: str | None = None
        self.state: Any = None
        self.opened = False
        self.asked = "setup"
        """The environment's method that was called last."""

    async def run(self) -> None:
        environment = self.player.environment
        self.state = await self._ask("setup", environment.setup, self.task)
        self.opened = True
        self.end = await self._turns(*await self.opening.begin(self._open))
        self.outcome = await self._ask("rewards", environment.rewards, self.state, check=checked_outcome)
        self.success = bool(environment.succeeded(self.task, self.outcome))

    async def _open(self) -> Opened:
        specs = await self._ask("tool_specs", self.player.environment.tool_specs, self.task)
        conversation = self.player.renderer.open(self.task.messages, [spec.as_json() for spec in specs])
        return conversation, conversation.prompt()

    async def _turns(self, conversation: Conversation, first: PromptDelta) -> EndReason:
        limits = self.player.limits
        while len(self.turns) < limits.max_turns:
            delta = conversation.prompt() if self.turns else first
            room = limits.max_trajectory_tokens - len(conversation.context_ids)
            if room < 1 and not self.turns:
                raise Fault(
                    f"the opening messages of {self.task.id} take {len(delta.ids)} tokens, which leaves no room for a reply in "
                    f"max_trajectory_tokens={limits.max_trajectory_tokens}"
                )
            if room < 1:
                return "max_tokens"
            completion = await self._generate(conversation.context_ids, min(room, limits.max_turn_tokens))
            text = conversation.add_completion(completion.ids)
            truncated = completion.stop_reason == "length"
            # Kept before the environment speaks, so that a fault in its step loses no tokens of the record.
            self.turns.append(_turn(delta.ids, delta.continues, completion, text, StepResult()))
            reply = Reply(text=text, truncated=truncated, num_tokens=len(completion.ids))
            result = await self._ask("step", self.player.environment.step, self.state, reply, check=checked_step)
            self.turns[-1] = _turn(delta.ids, delta.continues, completion, text, result)
            if result.done:
                return "done"
            conversation.add_messages(result.messages)
        return "max_turns"

    async def _generate(self, context_ids: tuple[int, ...], max_tokens: int) -> Completion:
        sampling = self.player.sampling
        turn = len(self.turns)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=max_tokens,
            stop_ids=self.player.renderer.stop_ids,
            seed=request_seed(self.player.seed_key, self.task.id, self.sibling, turn),
        )
        if self.barrier is not None:
            await self.barrier.arrive(self.name)
        try:
            async with deadline(self.player.limits.turn_deadline_s, f"the engine's reply in turn {turn} of {self.name}"):
                session = f"{self.player.seed_key}/{self.name}"
                return await self.player.engine.generate(context_ids, params, session=session)
        except PolyturnError:
            raise
        except Exception as error:
            raise EngineError(f"the engine raised {type(error).__name__}: {error}") from error

    async def _ask(
        self, what: str, method: Callable[..., Any], *arguments: Any, check: Callable[[object, str], Any] | None = None
    ) -> Any:
        """Call a method of the environment; whatever goes wrong in it, or with what it returns, is a fault with a reason."""
        name, self.asked = f"{self.player.environment.name}.{what}", what
        cancellations = _cancellations()
        try:
            async with deadline(self.player.limits.tool_deadline_s, f"{name} of {self.name}"):
                result = await call(method, *arguments)
            return result if check is None else check(result, name)
        except (ResourceError, EnvironmentSetupError) as error:
            raise Fault(str(error)) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # A cancellation is ours, or came out of a task inside the tool. Other exceptions of this kind are SystemExit and
            # those of libraries that stop a function from outside.
            if isinstance(error, asyncio.CancelledError) and _cancellations() != cancellations:
                raise
            raise Fault(f"{name} raised {type(error).__name__}: {error}") from error

    def fault(self, reason: str) -> None:
        """End with a fault. A second one (in `close`) is added to the first."""
        reason = reason if self.reason is None else f"{self.reason}; then {reason}"
        self.end, self.reason, self.outcome, self.success = "fault", reason, {}, False

    async def close(self) -> None:
        if self.opened:
            before = self.asked
            try:
                await self._ask("close", self.player.environment.close, self.state)
                self.asked = before
            except Fault as fault:
                self.fault(str(fault))

    def trajectory(self) -> Trajectory:
        reward = None if self.reason else _weighted(self.outcome, self.player.reward_weights)
        return Trajectory(
            task=self.task,
            sibling=self.sibling,
            turns=tuple(self.turns),
            end_reason=self.end,
            outcome=self.outcome,
            outcome_reward=reward,
            success=self.success,
            fault=self.reason,
        )


def _turn(prompt_ids: tuple[int, ...], continues: bool, completion: Completion, text: str, result: StepResult) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=completion.ids,
        engine_logprobs=completion.engine_logprobs,
        policy_versions=completion.policy_versions,
        stop_reason=completion.stop_reason,
        continues=continues,
        text=text,
        reply=result.messages,
        reward=result.reward,
        state_key=result.state_key,
        counts=result.counts,
    )


def _cancellations() -> int | None:
    """How often the current task has been cancelled and not taken back; before Python 3.11 nobody counts."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None and hasattr(task, "cancelling") else None


def _weighted(outcome: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the components that are there; None when none is. `judge/clarity` weighs what `judge` does."""
    known = [
        weights.get(name, weights.get(name.partition("/")[0], 1.0)) * value
        for name, value in outcome.items()
        if value is not None
    ]
    return sum(known) if known else None
