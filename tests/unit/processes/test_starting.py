from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from polyturn.processes.endings import ending_words, read_ending, write_ending
from polyturn.processes.shared_memory import SharedMemory
from polyturn.processes.starting import free_port, start_process


def test_a_session_of_its_own_and_all_output_in_one_file(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("before\n")
    code = (
        "import os, sys; print(os.getsid(0) == os.getpid(), dict(os.environ).get('ONLY'), sys.stdin.read() == '', flush=True)"
    )
    code += "; print('error', file=sys.stderr)"
    child = start_process([sys.executable, "-I", "-S", "-c", code], {"ONLY": "this"}, log)
    assert child.wait(PATIENCE_S) == 0
    assert log.read_text() == "before\nTrue this True\nerror\n"


def test_what_can_not_be_started_leaves_no_descriptor_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            start_process(["/nowhere/python"], {}, tmp_path / "x.log")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_output_can_be_redirected_later(tmp_path):
    code = "import sys, subprocess; from pathlib import Path; from polyturn.processes.starting import redirect_output\n"
    code += "print('here', flush=True); redirect_output(Path(sys.argv[1])); print('there', flush=True)\n"
    code += "subprocess.run([sys.executable, '-I', '-S', '-c', 'import sys; print(\"child\", file=sys.stderr)'])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.log")], capture_output=True, text=True, env=environment
    )
    assert (done.stdout, done.stderr) == ("here\n", "")
    assert (tmp_path / "x.log").read_text() == "there\nchild\n"


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (143, "ended with exit code 143"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-9, "was killed by signal 9 (SIGKILL; the kernel does that too, when memory runs out)"),
        (-63, "was killed by signal 63 (a signal without a name)"),
    ],
)
def test_endings_in_words(code, words):
    assert ending_words(code) == words


def test_endings_in_files(tmp_path):
    (tmp_path / "roles").mkdir()
    assert read_ending(tmp_path, "trainer-1") is None
    write_ending(tmp_path, "trainer-1", -9)
    assert read_ending(tmp_path, "trainer-1") == -9
    assert [path.name for path in (tmp_path / "roles").iterdir()] == ["trainer-1.ended"]


def test_segments_that_the_dead_left_are_removed_and_no_others():
    code = "import mmap, sys; f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close()"
    code += "; print(flush=True); sys.stdin.read()"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        (folder / "before").write_text("x")
        segments = SharedMemory(folder)
        (folder / "nobodys").write_text("x")
        children = {}
        for name in ("before", "dies", "lives"):
            argv = [sys.executable, "-I", "-S", "-c", code, str(folder / name)]
            children[name] = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children[name].stdout.readline()
        segments.look(lambda: [child.pid for child in children.values()])
        for name in ("before", "dies"):
            children[name].communicate()
        assert segments.sweep() == [folder / "dies"]
        assert sorted(path.name for path in folder.iterdir()) == ["before", "lives", "nobodys"]
        children["lives"].communicate()
        (folder / "lives").unlink()
        (folder / "lives").write_text("of somebody else by now")
        assert segments.sweep() == []


def test_looking_costs_nothing_where_there_is_nothing_new(tmp_path):
    segments = SharedMemory(tmp_path)
    segments.look(lambda: pytest.fail("nobody need be asked"))
    (tmp_path / "strange").write_text("x")
    asked = []
    segments.look(lambda: asked.append(1) or [])
    segments.look(lambda: asked.append(2) or [])
    segments.look(lambda: asked.append(3) or [], again=True)
    assert asked == [1, 3]
    assert SharedMemory(tmp_path / "nowhere").sweep() == []
