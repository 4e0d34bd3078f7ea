"""`polyturn env new`: an environment of the user's own in one file, with its test and a recipe that trains it.

The file is `environments/starter.py` under the user's name, so that what is written is what is checked and trained here.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from collections.abc import Mapping
from pathlib import Path

from polyturn.errors import EnvironmentSetupError

_STARTER = Path(__file__).with_name("starter.py")
_TEST = '''\
"""Holds {cls} to the contract of environments, and plays one episode. Run it with `pytest test_{name}.py`."""

import asyncio

from polyturn.environments.contract import check_contract, play_by_hand

from {name} import {cls}


def test_the_contract():
    report = asyncio.run(check_contract({cls}()))
    assert report.failed == []


def test_one_episode():
    environment = {cls}()
    task = environment.task("test/1", "amber", "seven")
    episode = asyncio.run(play_by_hand(environment, task, ["open(birch)", "oops", "open(amber)", "answer(seven)"]))
    assert [message.content for message in episode.transcript if message.role == "tool"] == ["empty", "error", "holds(seven)"]
    assert episode.turn_rewards == (0.0, 0.0, 0.1, 0.0)
    assert episode.outcome == {{"answer": 1.0}}
'''
_RECIPE = """\
# Trains {cls} of {name}.py on a CPU in about half a minute: `polyturn train {name}.yaml`.
run:
  name: {name}
  steps: 40

model:
  path: builtin:tiny          # a small model that speaks the environment's own words; for natural language name a model folder

environment:
  id: {name}:{cls}
  args:
    turn_reward: 0.1

rollout:
  group_size: 8
  groups_per_step: 8
  max_turns: 4
  max_turn_tokens: 6
  max_trajectory_tokens: 96

trainer:
  learning_rate: 1.0e-3
  schedule: linear
  threads: 2

evaluation:
  episodes: 128
"""


def class_name(name: str) -> str:
    """The name of the class in a module.

    >>> class_name("red_boxes")
    'RedBoxes'
    """
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name


def new_environment(name: str, folder: Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write `NAME.py`, `test_NAME.py` and `NAME.yaml` into `folder`, which is made where it is missing.

    Raises:
        EnvironmentSetupError: a name that is none for a module or belongs to another one, a folder that can't be written to,
            or a file that is there already, unless `force`.
    """
    refuse_name(name, folder)
    texts = starter_files(name)
    taken = [file for file in texts if (folder / file).exists()]
    if taken and not force:
        raise EnvironmentSetupError(f"{', '.join(taken)} in {folder} would be overwritten; choose another name, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentSetupError(f"can't write to {folder}: {error.strerror}; choose another --out") from error
    return tuple(folder / file for file in texts)


def starter_files(name: str) -> Mapping[str, str]:
    """What `new_environment` writes, by file name."""
    cls = class_name(name)
    source = _STARTER.read_text(encoding="utf-8")
    for old, new in (
        ('"""`starter`:', f'"""`{name}`:'),
        ("class Starter(", f"class {cls}("),
        ('name: ClassVar[str] = "starter"', f'name: ClassVar[str] = "{name}"'),
    ):
        assert source.count(old) == 1, f"the starter has changed: {old!r} stands there {source.count(old)} times"
        source = source.replace(old, new)
    return {
        f"{name}.py": source,
        f"test_{name}.py": _TEST.format(name=name, cls=cls),
        f"{name}.yaml": _RECIPE.format(name=name, cls=cls),
    }


def refuse_name(name: str, folder: Path) -> None:
    """Raise EnvironmentSetupError for a name that no module can have, or that another module has."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith("_") or name.endswith("_"):
        proposal = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name.lower()).strip("_")
        usable = proposal.isidentifier() and not keyword.iskeyword(proposal)
        raise EnvironmentSetupError(
            f"{name!r} is no name of a module; use letters, digits and _, as in {proposal if usable else 'my_environment'}"
        )
    if name in sys.stdlib_module_names or name == "polyturn":
        owner = "polyturn itself" if name == "polyturn" else "Python's own library"
        raise EnvironmentSetupError(f"{name} is a module of {owner} and would hide it, or be hidden; try {name}_env")
    try:
        found = importlib.util.find_spec(name)
    except (ValueError, ImportError):
        found = None
    origin = found.origin if found else None
    if origin and Path(origin).resolve() != (folder / f"{name}.py").resolve():
        raise EnvironmentSetupError(f"{name} is an installed module, {origin}, which would be imported instead; try {name}_env")
