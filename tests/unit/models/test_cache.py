from __future__ import annotations

import pytest

from polyturn.models.cache import cache_folder, draft_of


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("POLYTURN_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "polyturn"


def test_a_draft_takes_its_place_when_it_is_whole(tmp_path):
    folder = tmp_path / "models" / "x"
    with draft_of(folder) as draft:
        (draft / "config.json").write_text("{}")
        assert not folder.exists()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["x"]
    assert folder.stat().st_mode & 0o055 == 0o055, "others may read a shared cache"


def test_a_draft_that_failed_leaves_nothing(tmp_path):
    folder = tmp_path / "models" / "x"

    def make():
        with draft_of(folder) as draft:
            (draft / "config.json").write_text("{}")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        make()
    assert list(folder.parent.iterdir()) == []


def test_of_two_at_once_the_first_stays(tmp_path):
    folder = tmp_path / "x"
    with draft_of(folder) as slow:
        with draft_of(folder) as fast:
            (fast / "config.json").write_text("first")
        (slow / "config.json").write_text("second")
    assert (folder / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_in_the_way_is_not_taken_for_a_model(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match=r"."), draft_of(folder) as draft:
        (draft / "config.json").write_text("{}")
    assert (folder / "notes.txt").read_text() == "mine"
