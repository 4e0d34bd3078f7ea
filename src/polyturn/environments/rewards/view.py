"""What a reward sees of a trajectory: texts and counts, no ids and no probabilities."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from polyturn.types import Message, Task

Scope = Literal["trajectory", "turn"]
_THOUGHT_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One reply of the model, and what the environment made of it."""

    text: str
    reply: tuple[Message, ...] = ()
    """What the environment answered."""
    truncated: bool = False
    num_tokens: int = 0
    reward: float = 0.0
    """The environment's own reward of this turn."""
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def results(self) -> tuple[str, ...]:
        """Texts of the tool messages that came back."""
        return tuple(message.content for message in self.reply if message.role == "tool")


@dataclass(frozen=True, kw_only=True)
class TrajectoryView:
    """A trajectory as a reward sees it: whole, or with `scope="turn"` up to a turn that has just ended and is to be scored.

    >>> task = Task(id="1", environment="chat", messages=(Message(role="user", content="2 + 2?"),), answer="4")
    >>> TrajectoryView(task=task, turns=(TurnView(text="It is 4."),)).text
    'It is 4.'
    """

    task: Task
    turns: tuple[TurnView, ...]
    scope: Scope = "trajectory"
    done: bool = False
    """Whether the environment ended it."""

    @property
    def scored(self) -> tuple[TurnView, ...]:
        """The turns that the reward is about: the last one, or all of them."""
        return self.turns[-1:] if self.scope == "turn" else self.turns

    @property
    def text(self) -> str:
        """The last reply; empty when there is none."""
        return self.turns[-1].text if self.turns else ""

    @property
    def spoken(self) -> str:
        """The last reply without the thoughts before it (`<think>...</think>`)."""
        return without_thoughts(self.text)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, opening messages included."""
        said = list(self.task.messages)
        for turn in self.turns:
            said.append(Message(role="assistant", content=turn.text))
            said.extend(turn.reply)
        return tuple(said)


def without_thoughts(text: str) -> str:
    """What stands behind the last end of thoughts, `</think>`."""
    return _THOUGHT_END.split(text)[-1]
