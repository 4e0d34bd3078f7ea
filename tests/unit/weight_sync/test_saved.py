"""Folders of weights: whole or not there, and only the newest stay."""

from __future__ import annotations

import pytest

from polyturn.errors import WeightSyncError
from polyturn.weight_sync.saved import SavedFolders


def save(folder):
    (folder / "a").write_text("1")
    (folder / "b").write_text("2")


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_stay(tmp_path):
    folders = SavedFolders(tmp_path / "weights", save, keep=2)
    for version in range(4):
        made = folders.write(f"v{version}")
        assert sorted(path.name for path in made.iterdir()) == ["a", "b"]
        folders.forget_old()
    assert names(tmp_path / "weights") == ["v2", "v3"]
    folders.remove_all()
    assert not (tmp_path / "weights").exists()


def test_what_was_not_written_whole_has_no_name(tmp_path):
    def half(folder):
        (folder / "a").write_text("1")
        raise OSError(28, "No space left on device")

    folders = SavedFolders(tmp_path / "weights", half, keep=1)
    with pytest.raises(WeightSyncError, match=r"can't be written to .*weights/v0: No space left on device"):
        folders.write("v0")
    assert not (tmp_path / "weights" / "v0").exists()
    folders = SavedFolders(tmp_path / "weights", save, keep=1)
    assert sorted(path.name for path in folders.write("v0").iterdir()) == ["a", "b"], "a draft is in nobody's way"


def test_others_files_in_the_folder_stay(tmp_path):
    (tmp_path / "theirs").write_text("x")
    folders = SavedFolders(tmp_path, save, keep=1)
    folders.write("v0")
    folders.remove_all()
    assert names(tmp_path) == ["theirs"]
