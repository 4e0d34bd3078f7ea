"""What siblings begin with is made once, and what becomes of it when the first one comes to grief."""

from __future__ import annotations

import asyncio
import threading

import pytest

from parts.patience import PATIENCE_S
from polyturn.engine.scripted import ScriptedEngine
from polyturn.rendering.renderer import Renderer
from polyturn.rendering.template import ChatTemplate
from polyturn.rollouts.driver import rollout_groups
from polyturn.rollouts.opening import Opening
from semantics.scenes import GROUP_SIZE, Talk, play_group, player, reply_ids, says, talk_renderer, talk_task


class Announces(Talk):
    """Counts who asks for its tools; `first` is called when it is the first."""

    def __init__(self, first=None):
        super().__init__()
        self.first = first
        self.asked: list[str] = []

    def tool_specs(self, task):
        self.asked.append(task.id)
        if self.first is not None and len(self.asked) == 1:
            self.first()
        return ()


class CountingTemplate(ChatTemplate):
    """Counts what it renders."""

    rendered = 0

    def render(self, *arguments):
        self.rendered += 1
        return super().render(*arguments)


def counting_renderer() -> tuple[Renderer, CountingTemplate]:
    plain = talk_renderer()
    template = CountingTemplate.of(plain.tokenizer, plain.template.source)
    return Renderer(plain.tokenizer, template), template


async def test_tools_and_first_prompt_of_a_task_are_made_once_for_all_siblings():
    renderer, template = counting_renderer()
    environment, tasks = Announces(), [talk_task("talk/0"), talk_task("talk/1", "find blue")]
    before = template.rendered
    chosen = player(environment, says(renderer, "answer(red)"), renderer)
    groups = await rollout_groups(chosen, tasks, group_size=GROUP_SIZE, concurrency=64)
    assert sorted(environment.asked) == ["talk/0", "talk/1"]
    assert template.rendered - before == 2
    for task, group in zip(tasks, groups, strict=True):
        wanted = renderer.open(task.messages).prompt().ids
        assert [trajectory.turns[0].prompt_ids for trajectory in group.trajectories] == [wanted] * GROUP_SIZE


class ByTurns(ScriptedEngine):
    """Lets every other sibling say more in its first turn, and remembers what it was asked after."""

    def __init__(self, renderer):
        super().__init__(lambda context: ())
        self.renderer = renderer
        self.contexts: dict[str, list[tuple[int, ...]]] = {}

    async def generate(self, prompt_ids, sampling, *, session=None):
        contexts = self.contexts.setdefault(session.rpartition("/")[2], [])
        contexts.append(prompt_ids)
        wordy = int(session[-1]) % 2 and len(contexts) == 1
        ids = reply_ids(self.renderer, "think look(blue)" if wordy else LINES[len(contexts) - 1])
        return await ScriptedEngine(lambda context: ids).generate(prompt_ids, sampling)


LINES = ["look(blue)", "answer(red)"]


async def test_siblings_that_began_together_go_their_own_ways():
    renderer = talk_renderer()
    engine = ByTurns(renderer)
    group = await play_group(player(Announces(), engine, renderer))
    for trajectory in group.trajectories:
        first, second = trajectory.turns
        assert second.continues
        context = first.prompt_ids + first.completion_ids + second.prompt_ids
        assert engine.contexts[str(trajectory.sibling)] == [first.prompt_ids, context]
    assert len({trajectory.turns[0].completion_ids for trajectory in group.trajectories}) == 2


@pytest.mark.parametrize("concurrency", [1, 64])
async def test_when_the_first_one_comes_to_grief_the_others_make_their_own(concurrency):
    def fails():
        raise OSError("no tools today")

    environment = Announces(fails)
    group = await play_group(player(environment, says(talk_renderer(), "answer(red)")), concurrency=concurrency)
    faults = [trajectory.fault for trajectory in group.trajectories]
    assert faults == ["talk.tool_specs raised OSError: no tools today"] + [None] * (GROUP_SIZE - 1)
    assert len(environment.asked) == GROUP_SIZE


async def test_when_the_first_one_hangs_the_others_wait_for_its_deadline_only():
    release = threading.Event()
    environment = Announces(lambda: release.wait(PATIENCE_S))
    try:
        group = await play_group(player(environment, says(talk_renderer(), "answer(red)"), tool_deadline_s=0.3))
    finally:
        release.set()
    (lost,) = [trajectory for trajectory in group.trajectories if trajectory.fault]
    assert lost.fault == "waited 0.3 s for talk.tool_specs of talk/0/0, which is its deadline, and it did not come"


async def test_one_who_is_cancelled_while_it_makes_the_opening_leaves_the_others_to_themselves():
    opening, made = Opening(), talk_renderer().open(talk_task().messages)
    delta = made.prompt()

    async def never():
        await asyncio.Event().wait()

    async def make():
        return made, delta

    first = asyncio.create_task(opening.begin(never))
    await asyncio.sleep(0)
    second = asyncio.create_task(opening.begin(make))
    await asyncio.sleep(0)
    first.cancel()
    assert (await asyncio.wait_for(second, PATIENCE_S))[1] is delta
