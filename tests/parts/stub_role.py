"""A role for tests of whoever starts and ends roles: it does what its arguments say, in order, and starts in no time.

python stub_role.py engine-0 serve beat forever
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ.get("POLYTURN_RUN_FOLDER", "."))


class Stub:
    """The role, and what its actions share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.member: str | None = None
        self.waits: list[dict[str, object]] = []
        self.kept: list[object] = []

    def write(self, path: Path, value: object) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.replace(path)

    def do_say(self, text: str) -> None:
        print(text, flush=True)

    def do_error(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def do_sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def do_forever(self) -> None:
        while True:
            time.sleep(60)

    def do_exit(self, code: str) -> None:
        self.end(int(code))

    def end(self, code: int) -> None:
        """End as `code`; a member says how, as whoever watches it would."""
        if self.member is not None:
            self.write(FOLDER / "roles" / f"{self.member}.ended", {"exit_code": code})
        os._exit(code)

    def do_member_ended(self, name: str, code: str) -> None:
        self.write(FOLDER / "roles" / f"{name}.ended", {"exit_code": int(code)})

    def do_die(self, number: str) -> None:
        os.kill(os.getpid(), int(number))

    def do_serve(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.kept.append(listener)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.write(FOLDER / "roles" / f"{self.name}.json", {"address": address, "pid": os.getpid()})

    def do_beat(self) -> None:
        self.beat()
        threading.Thread(target=self.beat_on, daemon=True).start()

    def beat_on(self) -> None:
        while True:
            time.sleep(0.1)
            self.beat()

    def beat(self) -> None:
        name = self.member or self.name
        beat = {"role": name, "pid": os.getpid(), "host": socket.gethostname(), "written": time.time()}
        waits = {"num_waits": len(self.waits), "waits": self.waits}
        self.write(FOLDER / "heartbeats" / f"{name}.json", beat | waits)

    def do_wait(self, what: str, deadline_s: str) -> None:
        now = time.time()
        self.waits = [{"what": what, "since": now, "deadline": now + float(deadline_s)}]

    def do_become(self, member: str) -> None:
        """Play a member of this role, too: its log and its heartbeat."""
        self.member = member
        log = os.open(FOLDER / "logs" / f"{member}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)

    def do_peers(self) -> None:
        print(os.environ["POLYTURN_PEERS"], flush=True)

    def do_variable(self, name: str) -> None:
        print(f"{name}={os.environ.get(name)}", flush=True)

    def do_ignore(self, name: str) -> None:
        signal.signal(getattr(signal, name), signal.SIG_IGN)

    def do_on(self, name: str, text: str, code: str) -> None:
        """On a signal, say `text` and end with `code`."""

        def handle(number: int, frame: object) -> None:
            os.write(1, f"{text}\n".encode())  # the signal may have come in the middle of a print
            self.end(int(code))

        signal.signal(getattr(signal, name), handle)

    def do_linger(self, seconds: str) -> None:
        """On a request to end, take `seconds` for it, and say when it came and when it was done."""

        def handle(number: int, frame: object) -> None:
            os.write(1, f"{time.monotonic()}\n".encode())
            time.sleep(float(seconds))
            os.write(1, f"{time.monotonic()}\n".encode())
            self.end(0)

        signal.signal(signal.SIGTERM, handle)

    def do_child(self) -> None:
        """A child in a session of its own that no polite request ends."""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
        argv = [sys.executable, "-I", "-S", "-c", code]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        child.stdout.readline()
        self.kept.append(child)

    def do_daemon(self) -> None:
        """A grandchild that has left its parent, its session and its group."""
        ready, done = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(done, b"x")
                time.sleep(600)
            os._exit(0)
        os.wait()
        os.read(ready, 1)

    def do_leave_files(self) -> None:
        """Things on disk that nobody removes."""
        tempfile.mkdtemp(prefix="left-behind-")
        Path(tempfile.gettempdir(), "left-behind.txt").write_text("x")

    def do_segment(self) -> None:
        """A segment of shared memory that nobody removes."""
        with Path("/dev/shm", f"stub-{os.environ['POLYTURN_TEST_MARK']}-{self.name}").open("wb+") as file:
            file.truncate(4096)
            self.kept.append(mmap.mmap(file.fileno(), 4096))

    def do_until_gone(self, kind: str, code: str) -> None:
        """Ask a peer all the time, and complain when it does not answer."""
        address = json.loads(os.environ["POLYTURN_PEERS"])[kind][0]
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
            except OSError:
                print(f"polyturn: error: {address} does not answer", file=sys.stderr, flush=True)
                self.end(int(code))
            time.sleep(0.01)


def main() -> None:
    stub = Stub(sys.argv[1])
    for action in sys.argv[2:]:
        name, *arguments = action.split("|")
        getattr(stub, f"do_{name}")(*arguments)


if __name__ == "__main__":
    main()
