from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from polyturn.errors import ConfigError
from polyturn.metrics.run_folder import RunFolder


def test_a_second_run_gets_a_folder_of_its_own(tmp_path):
    folders = [RunFolder.create(tmp_path / "runs", "lookup") for _ in range(3)]
    assert [folder.root.name for folder in folders] == ["lookup", "lookup-2", "lookup-3"]


def test_what_is_there_is_never_touched(tmp_path):
    (tmp_path / "lookup").write_text("a file of the user's")
    (tmp_path / "lookup-2").symlink_to(tmp_path / "nowhere")
    assert RunFolder.create(tmp_path, "lookup").root.name == "lookup-3"
    assert (tmp_path / "lookup").read_text() == "a file of the user's"


def test_runs_that_start_at_once_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        roots = list(pool.map(lambda _: RunFolder.create(tmp_path, "run").root, range(24)))
    assert len(set(roots)) == 24


def test_layout(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    assert sorted(inner.name for inner in folder.root.iterdir()) == ["export", "heartbeats", "logs", "roles", "trajectories"]
    assert folder.recipe == folder.root / "recipe.yaml"
    assert folder.metrics == folder.root / "metrics.jsonl"
    assert folder.trajectories_of(12).name == "step_000012.jsonl"
    assert folder == RunFolder(folder.root)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "a\\b", "a\0b"])
def test_names_that_are_no_folder_names(tmp_path, name):
    with pytest.raises(ConfigError, match=r"run\.name="):
        RunFolder.create(tmp_path, name)


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ConfigError, match=r"run\.output_dir=.*can't be written to"):
            RunFolder.create(place, "run")
    with pytest.raises(ConfigError, match=r"File name too long"):
        RunFolder.create(tmp_path, "x" * 300)
