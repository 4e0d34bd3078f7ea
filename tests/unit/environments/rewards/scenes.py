"""Short ways to write trajectories and tasks for the tests of rewards."""

from __future__ import annotations

from typing import Any

from polyturn.environments.rewards.view import TrajectoryView, TurnView
from polyturn.types import Message, Task


def task(answer: str | None = "Lima", question: str = "Capital of Peru?", **info: Any) -> Task:
    return Task(id="a:1", environment="chat", messages=(Message(role="user", content=question),), answer=answer, info=info)


def said(*texts: str, results: tuple[str | None, ...] = (), scope: str = "trajectory", of: Task | None = None, **turn: Any):
    """A trajectory of these replies; `results` are tool messages, one a turn."""
    shown = [*results, *[None] * len(texts)]
    turns = tuple(
        TurnView(
            text=text,
            reply=() if result is None else (Message(role="tool", content=result),),
            num_tokens=len(text.split()),
            **turn,
        )
        for text, result in zip(texts, shown, strict=False)
    )
    return TrajectoryView(task=of or task(), turns=turns, scope=scope)  # type: ignore[arg-type]
