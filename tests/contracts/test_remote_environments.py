"""Environments keep their contract when they are played through a server, and breaking it reads as it does in process."""

from __future__ import annotations

import pytest

from contracts.test_environments import RULES, Blocking, Endless, Twice, python_code
from parts.environment_processes import connected, remote, served
from polyturn.environments import contract
from polyturn.environments.base import StepResult
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.builtin.search_qa import SearchQa
from polyturn.environments.code import generated
from polyturn.environments.contract import check_contract, play_by_hand
from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.base import Reward


def rewarded():
    return Rewarded(
        Lookup(level="maze"), [Reward(name="length", function=lambda view, task: -len(view.turns) / 3, scope="turn")]
    )


BUILDS = [rewarded, Twice, Endless, Blocking, lambda: SearchQa(corpus="builtin:facts", turn_reward=0.1)]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: getattr(build, "__name__", "search"))
async def test_environments_keep_their_contract(build, monkeypatch):
    monkeypatch.setattr(contract, "NUM_TASKS", 3)
    here = await check_contract(build())
    with served(build()) as first, served(build(), name="environment-1") as second:
        there = await check_contract(remote(build(), first, second))
        assert first.num_open == second.num_open == 0
    assert there.failed == []
    assert there.passed == RULES
    assert there.shown == here.shown, "the same episode, every float of it"


@pytest.mark.real
async def test_programs_keep_their_contract():
    def build():
        return python_code(tasks=generated.NAME, public_tests=2)

    with served(build()) as server:
        report = await check_contract(remote(build(), server))
    assert (report.failed, report.passed) == ([], RULES)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("step", None),
        ("step", StepResult(reward=float("nan"), done=True)),
        ("rewards", {"said": "1"}),
        ("setup", OSError("no")),
    ],
)
async def test_a_broken_rule_reads_as_in_process(method, value):
    async def act(self, *arguments):
        if isinstance(value, Exception):
            raise value
        return value

    broken = type("Broken", (Twice,), {method: act})
    here = await check_contract(broken())
    with served(broken()) as server:
        there = await check_contract(remote(broken(), server))
    assert here.failed
    assert [line.replace(" (in environment-0)", "") for line in there.failed] == here.failed
    assert there.passed == here.passed


async def test_an_episode_by_hand():
    environment = Twice()
    task = environment.tasks("eval", 0)[1]
    with served(Twice()) as server:
        async with connected(remote(environment, server)) as elsewhere:
            for replies in (["b", "b"], ["b", "x"], ["", ""]):
                assert await play_by_hand(elsewhere, task, replies) == await play_by_hand(environment, task, replies)
