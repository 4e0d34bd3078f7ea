"""What driver and environment process say to each other: JSON objects in binary frames of a websocket.

    driver   {"id": 7, "op": "setup", "task": {...}}                    7 is the trajectory's handle from here on
             {"id": 8, "op": "step", "handle": 7, "reply": {...}}       `rewards` and `close` likewise
             {"id": 8, "op": "cancel"}                                  gives request 8 up; nobody waits for its answer
             {"id": 9, "op": "ping"}
    process  {"name": "environment-0", "environment": "lookup", "protocol": 1}     once, when connected
             {"id": 8, "value": {...}} or {"id": 8, "error": {"type": ..., "ours": ..., "text": ...}}

What is read equals what was written: every float bit for bit, tuples as tuples (`{"()": [...]}`), texts with any code point,
lone surrogates included. What JSON can't hold, nan and inf included, is refused by the side that would send it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeGuard, get_args

from polyturn.environments.base import Reply, StepResult
from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.types import Message, Role, Task

Document: TypeAlias = dict[str, Any]
Op: TypeAlias = Literal["setup", "step", "rewards", "close", "cancel", "ping"]

PROTOCOL = 1
PATH = "/v1/trajectories"
MOST_BYTES = 64 << 20
"""Of one frame."""
MOST_OPEN = 16_384
"""Trajectories, and requests under way, of one connection."""
_TUPLE, _MAPPING = "()", "{}"
_OPS, _ROLES = get_args(Op), get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing asked of a process. `task` comes with a setup, `reply` with a step, `handle` with all that follow a setup."""

    id: int
    op: Op
    handle: int = -1
    task: Task | None = None
    reply: Reply | None = None


class _Unsendable(Exception):
    """A value that JSON can't hold; never leaves this module."""


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_decode = json.JSONDecoder(parse_constant=_no_constant).decode


def pack(document: Document, what: str) -> bytes:
    """A frame. Raises EnvironmentSetupError, starting with `what`, for one that is too large or can't be written."""
    try:
        data = _encode(document).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentSetupError(f"{what} can't be sent to another process: {error}") from error
    if len(data) > MOST_BYTES:
        raise EnvironmentSetupError(
            f"{what} takes {len(data):,} bytes, and at most {MOST_BYTES:,} can be sent between processes; make it smaller"
        )
    return data


def unpack(data: bytes) -> Document:
    """What a frame says. Raises ResourceError for one that says nothing."""
    try:
        document = _decode(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        document = None
    return _object(document, "the frame")


# ── tasks, replies, results ────────────────────────────────────────────────────────────────────────────────────────────────


def from_task(task: Task) -> Document:
    """A task. Raises EnvironmentSetupError for one that holds what JSON can't."""
    try:
        return {
            "id": _tagged(task.id),
            "environment": _tagged(task.environment),
            "messages": [[_tagged(message.role), _tagged(message.content)] for message in task.messages],
            "answer": _tagged(task.answer),
            "info": _tagged(task.info),
        }
    except _Unsendable as error:
        raise EnvironmentSetupError(
            f"task {task.id} holds {error}, which can't be sent to an environment process; use what JSON has: texts, finite "
            "numbers, true, false, None, lists, tuples, and mappings with texts as keys"
        ) from None
    except RecursionError:
        raise EnvironmentSetupError(f"task {task.id} is nested too deep to be sent to an environment process") from None


def to_task(value: object) -> Task:
    """A task. Raises ResourceError for what is none."""
    found = _object(value, "task")
    try:
        plain = {name: _untagged(found.get(name)) for name in ("id", "environment", "answer", "info")}
    except RecursionError:
        _refuse("a task is not nested that deep")
    _object(plain["info"], "task.info")
    return Task(messages=_messages(found.get("messages")), **plain)


def from_reply(reply: Reply) -> Document:
    """A reply."""
    return {"text": reply.text, "truncated": reply.truncated, "num_tokens": reply.num_tokens}


def to_reply(value: object) -> Reply:
    """A reply. Raises ResourceError for what is none."""
    found = _object(value, "reply")
    text, truncated, num_tokens = found.get("text"), found.get("truncated"), found.get("num_tokens")
    if not isinstance(text, str) or not isinstance(truncated, bool) or not isinstance(num_tokens, int):
        _refuse("a reply needs text, truncated and num_tokens")
    return Reply(text=text, truncated=truncated, num_tokens=num_tokens)


def from_step(result: StepResult) -> Document:
    """What a step gave, checked by `calls.checked_step`."""
    return {
        "messages": [[message.role, message.content] for message in result.messages],
        "reward": result.reward,
        "done": result.done,
        "state_key": result.state_key,
        "counts": dict(result.counts),
    }


def to_step(value: object) -> StepResult:
    """What a step gave. Raises ResourceError for what is none."""
    found = _object(value, "result")
    state_key, counts = found.get("state_key"), _object(found.get("counts"), "result.counts")
    if not isinstance(state_key, str | None) or not isinstance(found.get("done"), bool):
        _refuse("a result needs done and state_key")
    return StepResult(
        messages=_messages(found.get("messages")),
        reward=_number(found.get("reward")),
        done=found["done"],
        state_key=state_key,
        counts={name: _number(count) for name, count in counts.items()},
    )


def to_outcome(value: object) -> dict[str, float | None]:
    """Outcome components, which travel as they are. Raises ResourceError for what are none."""
    return {name: None if component is None else _number(component) for name, component in _object(value, "rewards").items()}


def to_request(document: Document) -> Request:
    """A request. Raises ResourceError for what is none."""
    number, op, handle = document.get("id"), document.get("op"), document.get("handle", -1)
    if not is_id(number) or not isinstance(op, str) or op not in _OPS or not isinstance(handle, int):
        _refuse(f"a request needs an id and one of the operations {', '.join(sorted(_OPS))}")
    return Request(
        id=number,
        op=op,  # type: ignore[arg-type]  # one of _OPS
        handle=handle,
        task=to_task(document.get("task")) if op == "setup" else None,
        reply=to_reply(document.get("reply")) if op == "step" else None,
    )


def is_id(value: object) -> TypeGuard[int]:
    """Whether `value` may be the number of a request."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tagged(value: Any) -> Any:
    """`value` with its tuples marked, and mappings that look like a mark marked themselves."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if type(value) is tuple:
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        found = {key: _tagged(item) for key, item in value.items()}
        return {_MAPPING: found} if len(found) == 1 and (_TUPLE in found or _MAPPING in found) else found
    raise _Unsendable(f"{value!r:.80} ({type(value).__name__})")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and isinstance(value.get(_TUPLE), list):
        return tuple(_untagged(item) for item in value[_TUPLE])
    if len(value) == 1 and isinstance(value.get(_MAPPING), dict):
        value = value[_MAPPING]
    return {key: _untagged(item) for key, item in value.items()}


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        _refuse("messages are a list")
    messages = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in _ROLES or not isinstance(pair[1], str):
            _refuse("a message is a pair of a role and a text")
        messages.append(Message(role=pair[0], content=pair[1]))
    return tuple(messages)


def _number(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        _refuse("a reward and a count are finite floats")
    return value


def _object(value: object, where: str) -> Document:
    if not isinstance(value, dict):
        _refuse(f"{where} is a JSON object")
    return value


def _refuse(rule: str) -> NoReturn:
    raise ResourceError(f"a frame breaks the protocol between driver and environment processes: {rule}")
