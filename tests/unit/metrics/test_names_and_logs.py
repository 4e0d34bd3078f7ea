from __future__ import annotations

import logging

import pytest

from polyturn.errors import ConfigError
from polyturn.metrics.logs import set_up_logging
from polyturn.metrics.names import FAMILIES, METRICS, STABLE_LINE, meaning


@pytest.fixture
def bare_root(monkeypatch):
    """The polyturn logger as a fresh process has it, restored afterwards."""
    own = logging.getLogger("polyturn")
    monkeypatch.setattr(own, "handlers", [])
    monkeypatch.delenv("LOGLEVEL", raising=False)
    level = own.level
    yield own
    own.setLevel(level)


def test_every_name_has_a_meaning_of_one_sentence():
    assert set(STABLE_LINE) <= set(METRICS)
    for words in [*METRICS.values(), *FAMILIES.values()]:
        assert words.endswith(".")
        assert "\n" not in words
    assert meaning("time/rollout_s") == FAMILIES["time/"]
    assert meaning("eval/success") == FAMILIES["eval/"]
    assert meaning("time/") is None
    assert meaning("lss") is None


def test_records_go_to_stderr_in_one_line(bare_root, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own, which it adds right before the test
    set_up_logging("info")
    set_up_logging("info")
    logging.getLogger("polyturn.rollouts").info("12 trajectories")
    logging.getLogger("polyturn.rollouts").debug("hidden")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("INFO    polyturn.rollouts: 12 trajectories\n")


def test_the_environment_wins(bare_root, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    set_up_logging("error")
    assert bare_root.level == logging.DEBUG
    monkeypatch.setenv("LOGLEVEL", "")
    set_up_logging("error")
    assert bare_root.level == logging.ERROR


def test_an_unknown_level_is_named_with_its_source(bare_root, monkeypatch):
    with pytest.raises(ConfigError, match=r"run\.log_level='inf' is no log level; did you mean info\?"):
        set_up_logging("inf")
    monkeypatch.setenv("LOGLEVEL", "loud")
    with pytest.raises(ConfigError, match="LOGLEVEL='loud' is no log level; valid: debug, error, info, warning"):
        set_up_logging("info")


def test_a_program_with_handlers_of_its_own_keeps_them(bare_root, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    set_up_logging("info")
    assert bare_root.handlers == []
