"""The code, the YAML and the arguments on the pages about tools and dialogues are those of the program."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from polyturn.config.load import load_recipe
from polyturn.environments.base import Reply
from polyturn.environments.builtin.tools import Tools
from polyturn.environments.builtin.user_sim import UserSim
from polyturn.environments.tools.mcp_settings import read_settings
from polyturn.loop.tasks import tasks_from_file
from polyturn.rendering.tool_calls import call_format

DOCS = Path(__file__).parents[2] / "docs"
TOOLS, DIALOGUE = ((DOCS / name).read_text(encoding="utf-8") for name in ("tools.md", "dialogue.md"))
WRITE = call_format("hermes").write


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", page, flags=re.S)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The Python blocks of both pages, as the modules that their first lines name."""
    for block in (*blocks(TOOLS, "python"), *blocks(DIALOGUE, "python")):
        name = re.match(r"# (\w+\.py)\n", block)[1]
        (tmp_path / name).write_text(block)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def recipe(page, index, folder):
    (folder / "recipe.yaml").write_text("model: {path: 'builtin:tiny'}\n" + blocks(page, "yaml")[index])
    return load_recipe(folder / "recipe.yaml")


async def play(environment, task, *replies):
    state = await environment.setup(task)
    steps = [await environment.step(state, Reply(text=reply)) for reply in replies]
    return [message.content for step in steps for message in step.messages], await environment.rewards(state)


async def test_the_shop(modules):
    (modules / "questions.jsonl").write_text('{"question": "What does the lamp cost?", "answer": "24"}\n')
    made = recipe(TOOLS, 0, modules)
    environment = Tools(**made.environment.args)
    task = tasks_from_file(made.data.path, environment)[0]
    said, outcome = await play(environment, task, WRITE("price", {"item": "sofa"}), WRITE("price", {"item": "lamp"}), "24")
    assert said == ["error: there is no sofa; try lamp, chair", "24"]
    assert outcome == {"answer": 1.0}
    assert "Its name, in small letters." in task.messages[0].content


async def test_the_basket(modules):
    (modules / "rows.jsonl").write_text('{"prompt": "A lamp, please", "answer": "done", "wanted": ["lamp"]}\n')
    environment = Tools(tools="basket:Basket")
    task = tasks_from_file("rows.jsonl", environment)[0]
    said, outcome = await play(environment, task, WRITE("put", {"item": "lamp"}), "Done.")
    assert said == ["1 in the basket"]
    assert outcome == {"score": True}


def test_the_server(modules):
    assert read_settings(recipe(TOOLS, 1, modules).environment.args["mcp"]).allow == ("search", "fetch")


async def test_the_written_dialogue(modules):
    (modules / "rows.jsonl").write_text(blocks(DIALOGUE, "json")[0])
    environment = UserSim()
    task = tasks_from_file("rows.jsonl", environment)[0]
    said, _ = await play(environment, task, *environment.gold(task))
    assert said == ["K7PLQ2", "Saturday, please."]


async def test_the_traveller(modules):
    (modules / "rows.jsonl").write_text('{"prompt": "Hello"}\n')
    environment = UserSim(script="traveller:answer")
    said, _ = await play(environment, tasks_from_file("rows.jsonl", environment)[0], "Your number?", "Hm", "Goodbye")
    assert said == ["K7PLQ2", "Sorry, what do you need?"]


def test_the_played_user(modules):
    made = recipe(DIALOGUE, 0, modules)
    assert UserSim(**made.environment.args).max_user_turns == 6
    assert [entry.path for entry in made.environment.rewards] == ["llm_judge"]


def test_every_argument_is_named():
    for page, cls in ((TOOLS, Tools), (DIALOGUE, UserSim)):
        for name in inspect.signature(cls).parameters:
            assert f"`{name}`" in page or f"`{name}:" in page or f"{name}: " in page, name
