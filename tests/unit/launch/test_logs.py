"""The view of all logs: whatever bytes a role writes, however fast, and whoever reads."""

from __future__ import annotations

import os
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from polyturn.launch import logs as module
from polyturn.launch.logs import Follower, LogView


def texts(lines):
    return [line.text for line in lines]


def test_lines_come_when_they_are_complete(tmp_path):
    path = tmp_path / "x.log"
    follower = Follower("x", path)
    assert follower.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert texts(follower.read()) == ["one"]
        assert follower.read() == []
        file.write(b"o\r\n10%\r20%\r30%\n\nrest")
        assert texts(follower.read()) == ["two", "30%", ""]
    assert texts(follower.read(last=True)) == ["rest"]
    assert follower.read(last=True) == []


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_no_byte_is_lost_or_invented_however_it_is_cut(tmp_path_factory, data, cuts):
    path = tmp_path_factory.mktemp("logs") / "x.log"
    follower, found, start = Follower("x", path), [], 0
    for end in [*sorted(cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[start:end])
        found += texts(follower.read(last=end == len(data) and start != end))
        start = max(start, end)
    found += texts(follower.read(last=True))
    expected = [line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2] for line in data.split(b"\n")]
    assert found == (expected if data and not data.endswith(b"\n") else expected[:-1])


def test_a_line_without_end_is_shown_in_pieces(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * 200_000)
    follower = Follower("x", path)
    pieces = texts(follower.read())
    assert pieces, "it does not wait for the end of such a line"
    assert max(map(len, pieces)) <= 1 << 16
    assert "".join([*pieces, *texts(follower.read(last=True))]) == "x" * 200_000


def test_of_a_file_that_grows_too_fast_the_end_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BEHIND_BYTES", 1 << 16)
    monkeypatch.setattr(module, "_READ_BYTES", 1 << 12)
    path = tmp_path / "x.log"
    follower = Follower("x", path)
    path.write_bytes(b"begun")
    follower.read()
    with path.open("ab") as file:
        file.writelines(b"%07d\n" % number for number in range(10_000))
    lines = texts(follower.read(last=True))
    assert lines[0] == "begun"
    assert lines[1] == f"({80_000 - (1 << 12)} bytes came too fast for this view; they are in {path})"
    assert lines[-1] == "0009999"
    assert len(lines) == 2 + (1 << 12) // 8


class Pipes:
    """Where a view prints to."""

    def __init__(self):
        self.out_read, self.out = os.pipe()
        self.err_read, self.err = os.pipe()

    def shown(self):
        os.close(self.out)
        os.close(self.err)
        with os.fdopen(self.out_read) as out, os.fdopen(self.err_read) as err:
            return out.read(), err.read()


def test_who_is_shown_where(tmp_path):
    pipes = Pipes()
    view = LogView(tmp_path, ["trainer-0", "engine-0"], main="trainer-0", out=pipes.out, err=pipes.err)
    view.start()
    (tmp_path / "trainer-0.log").write_bytes("step=1 \xe9 €\npolyturn: error: x\n".encode())
    (tmp_path / "engine-0.log").write_bytes(b"caf\xe9\n")
    view.note("polyturn: it serves")
    view.stop(10.0)
    out, err = pipes.shown()
    assert out == "step=1 é €\n"
    assert sorted(err.splitlines()) == ["engine-0 | caf\ufffd", "polyturn: it serves", "trainer-0 | polyturn: error: x"]
    kept = (tmp_path / "all.log").read_text().splitlines()
    assert sorted(line[20:] for line in kept) == [
        "engine-0 | caf\ufffd",
        "launch | polyturn: it serves",
        "trainer-0 | polyturn: error: x",
        "trainer-0 | step=1 é €",
    ]
    assert all(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S") for line in kept)


def test_a_reader_that_left_stops_nothing(tmp_path):
    pipes = Pipes()
    os.close(pipes.out_read)
    view = LogView(tmp_path, ["trainer-0", "engine-0"], main="trainer-0", out=pipes.out, err=pipes.err)
    view.start()
    (tmp_path / "trainer-0.log").write_text("one\ntwo\n")
    (tmp_path / "engine-0.log").write_text("three\n")
    view.stop(10.0)
    os.close(pipes.err)
    assert os.read(pipes.err_read, 100) == b"engine-0 | three\n"
    assert len((tmp_path / "all.log").read_text().splitlines()) == 3


def test_a_reader_that_takes_nothing_keeps_nobody_waiting(tmp_path, monkeypatch):
    """What doesn't fit is counted, `all.log` has everything, and the end is not kept waiting."""
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    pipes = Pipes()
    view = LogView(tmp_path, ["trainer-0"], main="trainer-0", out=pipes.out, err=pipes.err)
    view.start()
    (tmp_path / "trainer-0.log").write_text("x" * 60_000 + "\n" + "y" * 60_000 + "\n" + "short\n" * 100)
    view.stop(0.5)
    assert len((tmp_path / "all.log").read_text().splitlines()) == 102
    read = []
    reader = threading.Thread(target=lambda: read.append(os.read(pipes.out_read, 1 << 20)))
    reader.start()
    reader.join(10.0)
    assert read[0].startswith(b"xxx")
    os.close(pipes.out_read)  # which ends the thread that still writes


def test_a_file_that_can_not_be_written_is_no_reason_to_show_nothing(tmp_path):
    (tmp_path / "trainer-0.log").write_text("one\n")
    (tmp_path / "all.log").mkdir()
    pipes = Pipes()
    view = LogView(tmp_path, ["trainer-0"], main="trainer-0", out=pipes.out, err=pipes.err)
    view.start()
    view.stop(10.0)
    assert pipes.shown()[0] == "one\n"
