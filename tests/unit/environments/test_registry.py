"""From an id and arguments to an environment, and one sentence for whatever is wrong with them."""

from __future__ import annotations

import sys

import pytest

from polyturn.environments.base import Environment, TaskList
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.registry import build_environment, environment_class, environment_names
from polyturn.errors import ConfigError, EnvironmentSetupError

AUTHORS_FILE = """
from polyturn.environments.base import Environment, StepResult, TaskList

class Base(Environment):
    name = "authors"
    def tasks(self, split, seed): return TaskList([])
    async def setup(self, task): return None
    async def step(self, state, reply): return StepResult(done=True)
    async def rewards(self, state): return {}
    def gold(self, task): return []

class Plain(Base): pass

class Sized(Base):
    def __init__(self, size, *, colour="red"):
        self.size, self.colour = size, colour

class Open(Base):
    def __init__(self, *words, **options):
        self.options = options

class Moody(Base):
    def __init__(self, mood="bad"):
        if mood == "bad":
            raise OSError("the disk is full")

class Half(Environment):
    name = "half"
    def tasks(self, split, seed): return TaskList([])
    async def setup(self, task): return None
    async def step(self, state, reply): return StepResult(done=True)

class Nameless(Base):
    name = None

class Unnamed(Environment):
    def tasks(self, split, seed): return TaskList([])
    async def setup(self, task): return None
    async def step(self, state, reply): return StepResult(done=True)
    async def rewards(self, state): return {}
    def gold(self, task): return []

def function(): pass
not_a_class = Plain()
"""


@pytest.fixture(autouse=True)
def authors_file(tmp_path, monkeypatch):
    (tmp_path / "authors_environments.py").write_text(AUTHORS_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "authors_environments", raising=False)


def of_author(name: str) -> str:
    return f"authors_environments:{name}"


def test_builtin_environments_by_name():
    assert environment_names() == sorted(environment_names())
    assert "lookup" in environment_names()
    for name in environment_names():
        assert environment_class(name).name == name
    built = build_environment("lookup", {"level": "maze", "max_hops": 3})
    assert isinstance(built, Lookup)
    assert (built.level, built.max_hops) == ("maze", 3)


def test_an_authors_class_by_dotted_path():
    built = build_environment(of_author("Sized"), {"size": 3})
    assert isinstance(built, Environment)
    assert (built.name, built.size, built.colour) == ("authors", 3, "red")
    assert build_environment(of_author("Plain"), {}).tasks("train", 0).size == TaskList([]).size == 0
    assert build_environment(of_author("Open"), {"anything": 1}).options == {"anything": 1}


@pytest.mark.parametrize(
    ("environment_id", "arguments", "said"),
    [
        ("lokup", {}, "environment.id='lokup' is unknown; did you mean lookup?, or give package.module:Class"),
        (
            "poker",
            {},
            "environment.id='poker' is unknown; valid: chat, gsm8k, lookup, python_code, search_qa, tools, user_sim, or give ",
        ),
        ("lookup", {"levle": "maze"}, "environment.args.levle is no argument of lookup; did you mean level?"),
        ("lookup", {"level": "mace"}, "environment.args.level='mace' is no level of lookup; did you mean maze?"),
        ("lookup", {"self": 1}, "environment.args.self is no argument of lookup; "),
        ("Plain", {"size": 1}, "environment.args.size is no argument of authors_environments:Plain; it takes none"),
        ("Sized", {}, "environment authors_environments:Sized needs environment.args.size"),
        (
            "Sized",
            {"color": "blue"},
            "environment.args.color is no argument of authors_environments:Sized; did you mean colour?",
        ),
        ("Moody", {}, "environment authors_environments:Moody could not be built: OSError: the disk is full"),
        ("Half", {}, "authors_environments:Half lacks gold, rewards; every environment has them"),
        ("Nameless", {}, "authors_environments:Nameless has no name; "),
        ("Unnamed", {}, "authors_environments:Unnamed has no name; "),
        ("function", {}, "authors_environments:function is not a subclass of polyturn.environments.Environment"),
        ("not_a_class", {}, "authors_environments:not_a_class is not a subclass of polyturn.environments.Environment"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(environment_id, arguments, said):
    if "authors_environments" in said:
        environment_id = of_author(environment_id)
    with pytest.raises(EnvironmentSetupError) as caught:
        build_environment(environment_id, arguments)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("authors_environments:Plan", "did you mean Plain"),
        ("authors_environment:Plain", "no module named authors_environment"),
    ],
)
def test_a_dotted_path_that_leads_nowhere(path, said):
    with pytest.raises(ConfigError, match=said):
        build_environment(path, {})
