"""What `environment.args.mcp` may say; no server is needed to refuse the rest."""

from __future__ import annotations

import sys
import types

import pytest

from polyturn.environments.builtin.tools import Tools
from polyturn.environments.tools.mcp_settings import Settings, read_settings
from polyturn.errors import EnvironmentSetupError, MissingDependencyError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs command"),
        ([], "not a mapping"),
        ({"command": ["python"], "url": "http://127.0.0.1:1"}, "takes one of the two"),
        ({"comand": ["python"]}, r"mcp\.comand is no key; did you mean command"),
        ({"command": "python server.py"}, "must be a list of texts"),
        ({"command": ["python", 3]}, "must be a list of texts"),
        ({"url": "ftp://example.org"}, "is no http URL"),
        ({"url": 3}, "must be a text"),
        ({"command": ["python"], "session": "share"}, "did you mean shared"),
        ({"command": ["python"], "start_deadline_s": 0}, "must be above 0"),
        ({"command": ["python"], "start_deadline_s": "5"}, "must be above 0"),
        ({"command": ["python"], "env": ["POLYTURN_NOT_SET"]}, "the variable POLYTURN_NOT_SET is not set"),
        ({"url": "http://127.0.0.1:1", "api_key_env": "POLYTURN_NOT_SET"}, "the variable POLYTURN_NOT_SET is not set"),
    ],
)
def test_settings_that_are_refused(given, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        read_settings(given)


def test_settings_that_are_taken():
    found = read_settings({"command": ["python", "server.py"], "env": ["PATH"], "allow": ["add"], "session": "per_trajectory"})
    assert found == Settings(command=("python", "server.py"), env=("PATH",), allow=("add",), session="per_trajectory")


@pytest.mark.parametrize("module", [None, types.SimpleNamespace()], ids=["missing", "too old"])
def test_without_the_package_the_extra_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.10.0")
    with pytest.raises(MissingDependencyError, match=r"pip install 'polyturn\[mcp\]'"):
        Tools(mcp={"command": ["python", "server.py"]})


def test_a_state_is_for_functions(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", types.SimpleNamespace(Client=object))
    with pytest.raises(EnvironmentSetupError, match="state is for functions"):
        Tools(mcp={"command": ["python", "server.py"]}, state="parts.author_tools:make_basket")
