"""Small worlds for the tests: a word-level tokenizer, environments that misbehave when told to, engines that say lines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from polyturn.engine.base import Engine
from polyturn.engine.scripted import ScriptedEngine
from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary
from polyturn.environments.builtin.lookup import Lookup
from polyturn.rendering import ChatTemplate, Renderer, Tokenizer
from polyturn.rendering.words import END_TOKEN, TINY_CHAT_TEMPLATE, word_level_tokenizer
from polyturn.rollouts.driver import rollout_groups
from polyturn.rollouts.episode import Limits, Player, Sampling
from polyturn.types import Message, Task, TrajectoryGroup

FOREVER = 3600.0
SHORT_S = 0.05
GROUP_SIZE = 8
TALK_WORDS = ("find", "look", "answer", "think", "red", "blue", "green", "again", "error", "(", ")", " ")
TALK = Vocabulary(words=TALK_WORDS, pattern=r"[a-z]+|\(|\)| ", copied=frozenset())
FORGETFUL_TEMPLATE = TINY_CHAT_TEMPLATE.replace("message['content']", "(message['content'] | replace('think ', ''))")
"""As the templates that take the thoughts out of earlier replies: what was sampled is not what is shown again."""


@cache
def renderer_of(vocabulary: Vocabulary, template: str = TINY_CHAT_TEMPLATE) -> Renderer:
    backend = word_level_tokenizer(vocabulary.words, vocabulary.pattern)
    tokenizer = Tokenizer(backend, eos_ids=[backend.token_to_id(END_TOKEN)])
    return Renderer(tokenizer, ChatTemplate.of(tokenizer, template))


def talk_renderer(template: str = TINY_CHAT_TEMPLATE) -> Renderer:
    return renderer_of(TALK, template)


def lookup(**arguments: Any) -> tuple[Lookup, Renderer]:
    environment = Lookup(instructions=False, **arguments)
    return environment, renderer_of(environment.vocabulary())


def talk_task(name: str = "talk/0", opening: str = "find red") -> Task:
    return Task(id=name, environment="talk", messages=(Message(role="user", content=opening),), answer="red")


@dataclass(slots=True)
class TalkState:
    number: int
    seen: list[Reply] = field(default_factory=list)


class Talk(Environment):
    """The tool says blue until the model says answer(red). Methods named in `acts` are replaced for one of the siblings.

    An act is called with what the method gets. Trajectories are numbered in the order in which they are set up.
    """

    name = "talk"

    def __init__(self, acts: Mapping[str, Callable[..., Any]] | None = None, *, unlucky: int = 3) -> None:
        self.acts = acts or {}
        self.unlucky = unlucky
        self.opened: list[TalkState] = []
        self.closed: list[int] = []
        self.setups = 0

    def tasks(self, split, seed):
        return TaskList([talk_task(f"{split}/{index}") for index in range(4)])

    async def _act(self, what: str, number: int, *arguments: Any) -> tuple[bool, Any]:
        if what not in self.acts or number != self.unlucky:
            return False, None
        result = self.acts[what](*arguments)
        return True, await result if inspect.isawaitable(result) else result

    async def setup(self, task):
        number, self.setups = self.setups, self.setups + 1
        acted, result = await self._act("setup", number, task)
        if acted:
            return result
        self.opened.append(TalkState(number))
        return self.opened[-1]

    async def step(self, state, reply):
        state.seen.append(reply)
        acted, result = await self._act("step", state.number, state, reply)
        if acted:
            return result
        done = reply.text.startswith("answer")
        return StepResult(messages=() if done else (Message(role="tool", content="blue"),), reward=0.25, done=done)

    async def rewards(self, state):
        acted, result = await self._act("rewards", state.number, state)
        return result if acted else {"answer": float(state.seen[-1].text == "answer(red)")}

    async def close(self, state):
        self.closed.append(state.number)
        await self._act("close", state.number, state)

    def gold(self, task):
        return ["answer(red)"]


class BlockingTalk(Talk):
    """Its step is no coroutine. The act of the unlucky sibling is called in it."""

    def step(self, state, reply):
        state.seen.append(reply)
        if state.number == self.unlucky and "step" in self.acts:
            return self.acts["step"](state, reply)
        return StepResult(reward=0.25, done=True)


def assistant_turns(renderer: Renderer, context: Sequence[int]) -> int:
    """Earlier replies in a context whose last token asks for the next one."""
    return list(context).count(renderer.tokenizer.token_id("<|assistant|>")) - 1


def reply_ids(renderer: Renderer, text: str) -> tuple[int, ...]:
    return renderer.tokenizer.encode(text + END_TOKEN)


def says(renderer: Renderer, *lines: str, **arguments: Any) -> ScriptedEngine:
    """An engine that says one line a turn, and the last one again and again."""

    def script(context: tuple[int, ...]) -> tuple[int, ...]:
        return reply_ids(renderer, lines[min(assistant_turns(renderer, context), len(lines) - 1)])

    return ScriptedEngine(script, **arguments)


def player(environment: Environment, engine: Engine, renderer: Renderer | None = None, **options: Any) -> Player:
    limits = {"max_turns": 4, "max_turn_tokens": 16, "max_trajectory_tokens": 200}
    for name in Limits.__dataclass_fields__:
        if name in options:
            limits[name] = options.pop(name)
    return Player(
        environment=environment,
        renderer=renderer or talk_renderer(),
        engine=engine,
        limits=Limits(**limits),
        sampling=options.pop("sampling", Sampling()),
        **options,
    )


async def play_group(chosen: Player, task: Task | None = None, *, size: int = GROUP_SIZE, **options: Any) -> TrajectoryGroup:
    options.setdefault("concurrency", 64)
    (group,) = await rollout_groups(chosen, [task or talk_task()], group_size=size, **options)
    return group


def other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def settled(rounds: int = 5) -> None:
    """Let callbacks that are due run."""
    for _ in range(rounds):
        await asyncio.sleep(0)
