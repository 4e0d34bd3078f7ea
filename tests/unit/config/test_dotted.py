"""`load_dotted`: from the working folder or what is installed, and a sentence for each way to fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polyturn.config.dotted import load_dotted
from polyturn.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def failure(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dotted(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_installed_and_nested_objects():
    assert load_dotted("pathlib:Path") is Path
    assert load_dotted("os.path:join").__name__ == "join"
    assert load_dotted("polyturn.types:Trajectory.id") is not None


def test_a_module_of_the_working_folder(folder):
    (folder / "my_environment.py").write_text("class Maze:\n    size = 3\n")
    assert load_dotted("my_environment:Maze").size == 3
    assert load_dotted("my_environment:Maze.size") == 3
    assert sys.path[-1] == str(folder)


def test_a_file_of_the_user_does_not_hide_an_installed_module(folder):
    (folder / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    assert callable(load_dotted("colorsys:rgb_to_hsv"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("my.module.Maze", "'my.module.Maze' is no dotted path; did you mean my.module:Maze?"),
        ("Maze", "'Maze' is no dotted path; write package.module:Name"),
        ("", "'' is no dotted path; write package.module:Name"),
        ("my-module:Maze", "'my-module:Maze' is no dotted path; write package.module:Name"),
        (":Maze", "':Maze' is no dotted path; write package.module:Name"),
        ("a:", "'a:' is no dotted path; write package.module:Name"),
        ("pathlib:Pth", "pathlib:Pth: pathlib has no Pth; did you mean Path?"),
        ("polyturn.errrors:X", "polyturn.errrors:X: no module named polyturn.errrors; did you mean errors?"),
        ("polyturn.qqqq:X", "polyturn.qqqq:X: no module named polyturn.qqqq; polyturn is there, but has no such part"),
        ("math:pi.zz", "math:pi.zz: math.pi has no zz; it has no public names"),
    ],
)
def test_wrong_paths(path, expected):
    assert failure(path) == expected


def test_a_missing_module_says_where_it_was_looked_for(folder):
    assert failure("no_such_thing:X").endswith(
        f"it is neither installed nor in {folder}; install it, or run from the folder that holds it"
    )
    (folder / "environments_of_mine.py").touch()
    assert failure("enviroments_of_mine:X").endswith("did you mean environments_of_mine?")


def test_a_module_that_raises_is_blamed_at_its_line(folder):
    (folder / "broken_one.py").write_text("import json\n\njson.loads('{')\n")
    message = failure("broken_one:X")
    assert message.startswith("broken_one:X: importing broken_one raised JSONDecodeError at ")
    assert f"{folder / 'broken_one.py'}:3: " in message


def test_a_module_that_needs_another_names_it(folder):
    (folder / "needy.py").write_text("\nimport not_installed_here\n")
    assert failure("needy:X") == (
        f"needy:X: importing needy failed at {folder / 'needy.py'}:2: it needs not_installed_here; install it"
    )


def test_a_module_that_is_not_python_or_exits(folder):
    (folder / "typo.py").write_text("x = 1\ndef f(:\n")
    assert f"{folder / 'typo.py'}:2 is not valid Python" in failure("typo:X")
    (folder / "leaver.py").write_text("import sys\nsys.exit(3)\n")
    assert f"raised SystemExit at {folder / 'leaver.py'}:2: 3" in failure("leaver:X")
