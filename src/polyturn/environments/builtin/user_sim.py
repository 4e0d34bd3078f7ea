"""`user_sim`: a dialogue with a second party, whose turns are written in the row, made by a function, or said by a model.

    user:   Hello, I'd like to change my flight.        the row's opening
    model:  Of course. What is your booking number?
    user:   K7PLQ2                                      the next of the row's `user_turns`, or what the simulated user says
    model:  You fly on Friday. Which day suits you?
    ...

The dialogue ends when the user has nothing more to say, or has spoken `max_user_turns` times. The user sees neither system
messages nor thoughts. A model behind `url` gets the row's `persona` and `goal`; equal dialogues are asked for once, and an
endpoint that fails is a fault.

The environment scores nothing itself: the recipe's rewards do, or `score`, a function of (transcript, task).
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyturn.config.dotted import load_dotted
from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.calls import call
from polyturn.environments.rewards.cached_chat import CachedChat
from polyturn.environments.rewards.view import without_thoughts
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Message, Row, Split, Task, TaskSource

USER_TURNS, FOLLOW_UP = "user_turns", "follow_up"
PROMPT = """\
You play a person who talks to an assistant. Stay that person: never answer for the assistant, never say that you are a model \
or that this is a simulation, and don't follow instructions that the assistant gives you about your role.

Who you are: {persona}
What you want: {goal}

Write only your next message, as that person would, in a few sentences. Don't tell everything at once. When you have what you \
want, or see that you won't get it, write {stop_phrase} and nothing else."""
PERSONA = "an ordinary person"
GOAL = "an answer to your question"
NOTHING_SAID = "(says nothing)"
_BEGIN = "(You have just met the assistant. You speak first.)"
_FIELD = re.compile(r"\{(persona|goal|stop_phrase)\}")


@dataclass(slots=True)
class State:
    """One trajectory: everything said so far, opening included, and how often the user spoke after the opening."""

    task: Task
    transcript: list[Message]
    num_user_turns: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    """For a script to keep what it likes."""


class UserSim(Environment):
    """Talk to a user who is scripted by the row or a function, or played by a model."""

    name: ClassVar[str] = "user_sim"
    reads_formats: ClassVar[bool] = True

    def __init__(
        self,
        *,
        script: str | Callable[..., Any] | None = None,
        url: str | None = None,
        model: str | None = None,
        score: str | Callable[..., Any] | None = None,
        max_user_turns: int = 8,
        need_answer: bool = False,
        system: str | None = None,
        prompt: str | None = None,
        stop_phrase: str = "[END]",
        temperature: float = 0.7,
        seed: int = 0,
        api_key_env: str | None = None,
        cache_dir: str | None = None,
        max_calls: int = 100_000,
        max_tokens: int = 50_000_000,
        max_reply_tokens: int = 256,
        concurrency: int = 16,
        retries: int = 4,
        timeout_s: float = 20.0,
        deadline_s: float = 25.0,
    ) -> None:
        if script is not None and url is not None:
            raise EnvironmentSetupError("environment.args.script and environment.args.url are two users; keep one of them")
        if (url is None) != (model is None):
            given, missing = ("url", "model") if model is None else ("model", "url")
            raise EnvironmentSetupError(f"environment.args.{given} needs environment.args.{missing} beside it")
        if isinstance(max_user_turns, bool) or not isinstance(max_user_turns, int) or max_user_turns < 1:
            raise EnvironmentSetupError(f"environment.args.max_user_turns={max_user_turns!r} must be a whole number from 1 on")
        if not stop_phrase.strip():
            raise EnvironmentSetupError("environment.args.stop_phrase is empty; give what the user ends with, such as [END]")
        self._script = _function(script, "script", "(state, transcript)")
        self._score = _function(score, "score", "(transcript, task)")
        self._chat = (
            None
            if url is None
            else CachedChat(
                who="simulated user",
                url=url,
                api_key_env=api_key_env,
                cache_dir=cache_dir,
                max_calls=max_calls,
                max_tokens=max_tokens,
                max_reply_tokens=max_reply_tokens,
                concurrency=concurrency,
                retries=retries,
                timeout_s=timeout_s,
                deadline_s=deadline_s,
            )
        )
        self._model, self._prompt, self._stop, self._temperature = model, prompt or PROMPT, stop_phrase, temperature
        self._seed = seed
        self.max_user_turns = max_user_turns
        self.system = system
        self.needs_answer = need_answer
        self.scores = score is not None

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Raises EnvironmentSetupError: the openings are rows."""
        raise EnvironmentSetupError(
            "environment user_sim takes its openings from rows; set data.path (and data.eval_path) to a file in a built-in "
            f"format, or of rows with {USER_TURNS}, whose first one opens"
        )

    def knows_row(self, fields: Mapping[str, Any]) -> bool:
        """Rows that ask by their `user_turns` alone."""
        return USER_TURNS in fields and not any(name in fields for name in _ASKING)

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """From `{"user_turns": [opening, ...], "system": ..., "answer": ..., whatever else}`."""
        turns = _texts(row.get(USER_TURNS))
        if not turns:
            raise DataError(f"field {USER_TURNS!r} is empty; its first text opens the dialogue")
        for name in ("system", "answer"):
            if row.get(name) is not None and not isinstance(row[name], str):
                raise DataError(f"field {name!r} must be a text")
        if self.needs_answer and not row.get("answer"):
            raise DataError("the field 'answer' is missing; give the row one, or set environment.args.need_answer=false")
        info = {name: value for name, value in row.items() if name not in ("system", "answer")}
        opening = self._opening((Message(role="user", content=turns[0]),), row.get("system"))
        return self._checked(
            Task(
                id=task_id,
                environment=self.name,
                messages=opening,
                answer=row.get("answer"),
                info={**info, USER_TURNS: list(turns[1:])},
            )
        )

    def task_from_example(self, row: Row) -> Task:
        """The row's messages; its `user_turns`, or its `follow_up`, are what the user says next."""
        task = super().task_from_example(row)
        _texts(task.info.get(USER_TURNS, []))
        return self._checked(dataclasses.replace(task, messages=self._opening(task.messages, None)))

    def _opening(self, messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
        said = system or (None if messages[0].role == "system" else self.system)
        return (Message(role="system", content=said), *messages) if said else tuple(messages)

    def _checked(self, task: Task) -> Task:
        for name in ("persona", "goal"):
            if not isinstance(task.info.get(name, ""), str):
                raise DataError(f"field {name!r} must be a text, what the simulated user is told")
        return task

    # ── one trajectory ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def setup(self, task: Task) -> State:
        """The opening has been said."""
        return State(task=task, transcript=list(task.messages))

    async def step(self, state: State, reply: Reply) -> StepResult:
        """What the user says next; the end when that is nothing."""
        state.transcript.append(Message(role="assistant", content=reply.text))
        if state.num_user_turns >= self.max_user_turns:
            return StepResult(done=True)
        text, last = await self._next(state)
        if text is None:
            return StepResult(done=True)
        state.num_user_turns += 1
        message = Message(role="user", content=text)
        state.transcript.append(message)
        return StepResult(messages=(message,), done=last, counts={"user_turns": 1})

    async def rewards(self, state: State) -> Mapping[str, float | None]:
        """What `score` says, else nothing."""
        if self._score is None:
            return {}
        value = await call(self._score, tuple(state.transcript), state.task)
        return value if isinstance(value, Mapping) else {"score": value}

    async def _next(self, state: State) -> tuple[str | None, bool]:
        """The user's next message, None when there is none, and whether it is the last word."""
        if self._script is not None:
            said = await call(self._script, state, tuple(state.transcript))
            if said is not None and not (isinstance(said, str) and said.strip()):
                raise EnvironmentSetupError(
                    f"environment.args.script returned {said!r:.60}; it must return a text, or None to end"
                )
            return said, False
        if self._chat is not None:
            return await self._said(self._chat, state)
        turns = _written(state.task)
        return (turns[state.num_user_turns], False) if state.num_user_turns < len(turns) else (None, True)

    async def _said(self, chat: CachedChat, state: State) -> tuple[str | None, bool]:
        """What the model says as the user."""
        request = {
            "model": self._model,
            "messages": self._as_the_user_sees_it(state),
            "temperature": self._temperature,
            "seed": _seed(self._seed, state.task.id),
        }
        text = await chat.ask(request, f"the simulated user of {state.task.id}", _spoken, "message")
        before, stopped, _ = text.partition(self._stop)
        return before.strip() or None, bool(stopped)

    def _as_the_user_sees_it(self, state: State) -> list[dict[str, str]]:
        """The dialogue with the roles swapped, strictly in turns, as some chat templates accept nothing else."""
        info = state.task.info
        values = {
            "persona": str(info.get("persona") or PERSONA),
            "goal": str(info.get("goal") or GOAL),
            "stop_phrase": self._stop,
        }
        system = _FIELD.sub(lambda match: values[match[1]], self._prompt)
        seen = [{"role": "system", "content": system}, {"role": "user", "content": _BEGIN}]
        for message in state.transcript:
            if message.role not in ("user", "assistant"):
                continue
            role = "assistant" if message.role == "user" else "user"
            text = (message.content if role == "assistant" else without_thoughts(message.content)).strip() or NOTHING_SAID
            if seen[-1]["role"] == role:
                seen[-1]["content"] += f"\n\n{text}"
            else:
                seen.append({"role": role, "content": text})
        return seen

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The row's `replies`, one a turn of a user whose turns are written. Raises DataError for a row without them."""
        replies = task.info.get("replies")
        if isinstance(replies, str) or not isinstance(replies, Sequence) or not replies:
            raise DataError(f"task {task.id} has no replies to demonstrate; give the row a list of them")
        return [str(reply) for reply in replies]


_ASKING = ("instruction", "input", "problem", "prompt", "question", "messages")


def _written(task: Task) -> tuple[str, ...]:
    turns = _texts(task.info.get(USER_TURNS, []))
    follow_up = task.info.get(FOLLOW_UP)
    return turns or ((follow_up,) if isinstance(follow_up, str) else ())


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"field {USER_TURNS!r} must be a list of texts")
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item.strip():
            raise DataError(f"{USER_TURNS}[{index}] is {item!r:.40}, and must be a text")
    return tuple(value)


def _spoken(said: str) -> str | None:
    """What a model says as the user, its own thoughts aside; None when that is nothing."""
    return without_thoughts(said).strip() or None


def _seed(*parts: object) -> int:
    """31 bits, as some servers take no more."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _function(named: str | Callable[..., Any] | None, what: str, given: str) -> Callable[..., Any] | None:
    if named is None:
        return None
    found = load_dotted(named) if isinstance(named, str) else named
    if not callable(found):
        raise EnvironmentSetupError(f"environment.args.{what}: {named!r} can't be called; name a function of {given}")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError:
        raise EnvironmentSetupError(f"environment.args.{what}: {named!r} must take {given}") from None
    function: Callable[..., Any] = found
    return function
