"""`polyturn env new`: what it writes is checked, tested and trained by its own commands, in a folder of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyturn
from polyturn.cli.main import main
from polyturn.environments.contract import check_contract
from polyturn.environments.new import class_name, new_environment, refuse_name
from polyturn.environments.starter import Starter
from polyturn.errors import EnvironmentSetupError

FILES = ["red_boxes.py", "red_boxes.yaml", "test_red_boxes.py"]


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(polyturn.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path} | variables,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("new") / "mine"
    new_environment("red_boxes", made)
    return made


@pytest.mark.parametrize("seed", [0, 3])
async def test_the_starter_keeps_the_contract(seed):
    report = await check_contract(Starter(), seed=seed)
    assert report.failed == []
    assert len(report.shown.turn_rewards) == 2


def test_what_is_written_and_what_to_do_next(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["env", "new", "red_boxes", "--out", "mine"]) == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES
    said = capsys.readouterr().out
    for line in (
        "cd mine",
        "polyturn env check red_boxes:RedBoxes",
        "pytest test_red_boxes.py",
        "polyturn train red_boxes.yaml",
    ):
        assert f"  {line}\n" in said
    written = (tmp_path / "mine" / "red_boxes.py").read_text()
    assert "starter" not in written.lower().replace("start from", "")
    assert main(["env", "new", "blue"]) == 0
    assert "cd " not in capsys.readouterr().out
    assert (tmp_path / "blue.yaml").exists()


def test_its_test_and_its_check_pass(folder):
    tested = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "test_red_boxes.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout
    checked = run(folder, "polyturn", "env", "check", "red_boxes:RedBoxes", "turn_reward=0.2")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "BROKEN" not in checked.stdout


def test_its_recipe_is_valid(folder):
    done = run(folder, "polyturn", "train", "red_boxes.yaml", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.real
def test_its_recipe_learns(folder, tmp_path):
    done = run(
        folder, "polyturn", "train", "red_boxes.yaml", f"run.output_dir={tmp_path}", POLYTURN_CACHE=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("held-out success"))
    before, after = (float(part.split()[1]) for part in line.split("sampled: ")[1].split("], ", 1))
    assert before < 0.4
    assert after > before + 0.3


def test_nothing_is_overwritten_unless_asked(tmp_path):
    new_environment("red_boxes", tmp_path)
    (tmp_path / "red_boxes.py").write_text("mine")
    (tmp_path / "red_boxes.yaml").unlink()
    with pytest.raises(EnvironmentSetupError, match=r"red_boxes\.py, test_red_boxes\.py in .* would be overwritten; .*--force"):
        new_environment("red_boxes", tmp_path)
    assert (tmp_path / "red_boxes.py").read_text() == "mine"
    assert not (tmp_path / "red_boxes.yaml").exists()
    new_environment("red_boxes", tmp_path, force=True)
    assert (tmp_path / "red_boxes.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("red-boxes", "as in red_boxes"),
        ("Red Boxes", "as in red_boxes"),
        ("3d", "as in my_environment"),
        ("class", "as in my_environment"),
        ("", "as in my_environment"),
        ("a.b", "as in a_b"),
        ("../evil", "as in evil"),
        ("_hidden", "as in hidden"),
        ("é", "as in my_environment"),
        ("random", "Python's own library"),
        ("polyturn", "polyturn itself"),
        ("numpy", "numpy is an installed module"),
    ],
)
def test_names_that_are_refused(name, said, tmp_path):
    with pytest.raises(EnvironmentSetupError, match=said):
        new_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentSetupError, match="can't write to"):
        new_environment("red_boxes", tmp_path / "file")


def test_ones_own_module_may_be_written_again(tmp_path, monkeypatch):
    new_environment("red_boxes", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    refuse_name("red_boxes", tmp_path)
    with pytest.raises(EnvironmentSetupError, match="which would be imported instead"):
        refuse_name("red_boxes", tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "cls"), [("boxes", "Boxes"), ("red_boxes", "RedBoxes"), ("redBoxes", "RedBoxes"), ("r2d2", "R2d2")]
)
def test_names_of_classes(name, cls):
    assert class_name(name) == cls
