"""Programs in a recipe: rewards that run them, and `python_code`, with the sandbox that the recipe describes."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from polyturn.config.load import load_recipe
from polyturn.environments.contract import play_by_hand
from polyturn.errors import SandboxError
from polyturn.loop.parts import opened, recipe_environment, recipe_resources
from polyturn.loop.tasks import load_tasks

ADD = "def add(a, b):\n    return a + b"
ROWS = [
    {"prompt": "Write add(a, b).", "response": ADD, "tests": ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]},
    {"prompt": "Double what is read.", "response": "print(2 * int(input()))", "test_cases": [{"input": 4, "output": "8"}]},
]
RECIPE = """\
run: {name: code, steps: 1}
model: {path: builtin:smollm2}
data: {path: ROWS}
environment: ENVIRONMENT
sandbox: {wall_s: 5, concurrency: 2}
rollout: {group_size: 2, groups_per_step: 2}
"""
CHAT = "{id: chat, rewards: [{path: tests_passed}, {path: code_runs, weight: 0.1}]}"


@pytest.fixture
def parts(tmp_path):
    """Recipe, environment and resources for the words of `environment:`."""

    def _parts(environment: str):
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.replace("ROWS", str(rows)).replace("ENVIRONMENT", environment))
        recipe = load_recipe(str(path))
        resources = recipe_resources(recipe.sandbox)
        return recipe, recipe_environment(recipe, resources), resources

    return _parts


async def test_rewards_run_the_programs_of_a_chat(parts):
    recipe, environment, resources = parts(CHAT)
    tasks = load_tasks(recipe, environment, "train")
    async with opened(environment, resources, 60):
        right = [await play_by_hand(environment, tasks[n], [f"So:\n```python\n{ROWS[n]['response']}\n```"]) for n in (0, 1)]
        wrong = await play_by_hand(environment, tasks[0], ["def add(a, b):\n    return 3"])
        prose = await play_by_hand(environment, tasks[0], ["It adds the two."])
    assert [episode.outcome for episode in right] == [{"tests_passed": 1, "code_runs": 1}, {"tests_passed": 1, "code_runs": 0}]
    assert wrong.outcome == {"tests_passed": 0.5, "code_runs": 1}
    assert prose.outcome == {"tests_passed": 0, "code_runs": 0}
    assert environment.succeeded(tasks[0], right[0].outcome)
    assert not environment.succeeded(tasks[0], wrong.outcome)


async def test_a_helper_that_the_tests_forgot_is_not_the_models_to_choose(parts):
    ROWS[0]["tests"].append("assert close(add(1, 1), 2)")
    try:
        recipe, environment, resources = parts(CHAT)
    finally:
        ROWS[0]["tests"].pop()
    task = load_tasks(recipe, environment, "train")[0]
    async with opened(environment, resources, 60):
        forged = await play_by_hand(environment, task, ["def add(a, b):\n    return a\ndef close(a, b):\n    return True"])
    assert forged.outcome["tests_passed"] == 0


async def test_python_code_gets_the_recipes_sandbox(parts):
    recipe, environment, resources = parts("{id: python_code, args: {tool_format: fenced, turn_reward: 0.1}}")
    tasks = load_tasks(recipe, environment, "train")
    async with opened(environment, resources, 60):
        episodes = [await play_by_hand(environment, tasks[n], environment.gold(tasks[n])) for n in (0, 1)]
    assert [(episode.score, episode.turn_rewards) for episode in episodes] == [(1, (0.1, 0))] * 2


async def test_a_pool_that_dies_is_a_fault_and_no_reward(parts):
    recipe, environment, resources = parts(CHAT)
    task = load_tasks(recipe, environment, "train")[0]
    async with opened(environment, resources, 60):
        pid = resources.give("sandbox").pid
        killer = f"import time\ntime.sleep(0.2)\n{ADD}"
        os.kill(pid, signal.SIGSTOP)
        playing = asyncio.ensure_future(play_by_hand(environment, task, [killer]))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await playing
