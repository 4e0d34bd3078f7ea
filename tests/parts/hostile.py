"""Programs that mean harm, as named cases: what each tries, and how it must end.

`{folder}` is a folder of the test with a file `secret` in it, `{port}` a TCP port and `{socket}` a unix socket that something
listens on. A program that gets through prints ESCAPED.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECRET = "the-secret-of-the-machine"

ATTEMPT = """
def attempt(do):
    try:
        result = do()
    except BaseException as error:
        return
    if result is not False and result != -1:
        print("ESCAPED", result)
"""


@dataclass(frozen=True)
class Hostile:
    """`reasons` are the exit reasons that are right; `says` must be in its output; `loops` asks for a short clock."""

    name: str
    source: str
    reasons: tuple[str, ...] = ("ok",)
    says: str = ""
    loops: bool = False
    attempts: bool = False
    filters: tuple[str, ...] | None = field(default=None)
    """The reasons where programs can't start processes, if they differ."""


def loops(name: str, source: str, filters: tuple[str, ...] | None = None) -> Hostile:
    """One that only a clock ends."""
    return Hostile(name, source, ("timeout",), loops=True, filters=filters)


def attempts(name: str, source: str, says: str = "done") -> Hostile:
    """One that tries what it must not reach, and ends by itself."""
    return Hostile(name, ATTEMPT + source + "\nprint('done')\n", says=says, attempts=True)


USING_UP = [
    loops(
        "fork bomb",
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    ),
    Hostile(
        "thread bomb",
        """
import threading
stop = threading.Event()
try:
    while True:
        threading.Thread(target=stop.wait).start()
except RuntimeError:
    print("no more")
finally:
    stop.set()
""",
        says="no more",
    ),
    Hostile("memory bomb", "held = []\nwhile True:\n    held.append(bytearray(1 << 20))", ("memory",)),
    Hostile("memory bomb in one piece", "held = bytearray(1 << 40)", ("memory",)),
    Hostile(
        "memory bomb in parts, one a process",
        """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(60 << 20)
        time.sleep(60)
time.sleep(60)
""",
        ("memory",),
        filters=("error",),
    ),
    Hostile(
        "memory that processes share",
        """
import mmap, os, time
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, 60 << 20)
        for place in range(0, 60 << 20, 4096):
            held[place] = 1
        time.sleep(60)
time.sleep(60)
""",
        ("memory",),
        filters=("error",),
    ),
    Hostile(
        "memory without an address",
        """
import os
try:
    os.memfd_create("bomb")
except OSError as error:
    print("refused")
""",
        says="refused",
    ),
    loops("endless loop", "while True:\n    pass"),
    loops(
        "swallowed interrupts",
        """
while True:
    try:
        while True:
            pass
    except (KeyboardInterrupt, SystemExit):
        continue
""",
    ),
    loops(
        "swallowed everything",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        raise BaseException
    except BaseException:
        pass
""",
    ),
    loops("a loop in C", "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')"),
    loops("sleep", "import time\ntime.sleep(1000)"),
    loops("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True:\n    pass"),
    Hostile("endless output", "while True:\n    print('x' * 1000)", ("output",)),
    Hostile("endless output on one line", "import sys\nwhile True:\n    sys.stdout.write('x' * 1000)", ("output",)),
    Hostile("endless error output", "import os\nwhile True:\n    os.write(2, b'x' * 1000)", ("output",)),
    Hostile(
        "huge file",
        """
try:
    with open("big", "wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
except OSError as error:
    print("stopped")
""",
        says="stopped",
        filters=("ok", "files"),
    ),
    Hostile(
        "huge file with a hole",
        """
try:
    with open("big", "wb") as file:
        file.truncate(1 << 40)
except OSError as error:
    print("stopped")
""",
        says="stopped",
    ),
    Hostile(
        "many files",
        """
import itertools, time
try:
    for number in itertools.count():
        open(f"file{number}", "w").close()
        if number > 3000:
            time.sleep(1)
except OSError as error:
    print("stopped")
""",
        says="stopped",
        filters=("files",),
    ),
    Hostile(
        "a folder without a bottom",
        """
import os, time
try:
    while True:
        os.mkdir("down")
        os.chdir("down")
except OSError:
    print("stopped")
time.sleep(1 if os.getpid() != 2 else 0)
""",
        says="stopped",
        filters=("files",),
    ),
    Hostile(
        "folders that nobody may read",
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.mkdir('locked', 0)\nos.mkfifo('pipe')\nprint('made')",
        says="made",
    ),
    Hostile("writes to its input", "import os\nos.write(0, b'x')", ("error",), says="not permitted"),
    Hostile(
        "all file descriptors",
        """
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError as error:
    print(len(held) < 64)
""",
        says="True",
    ),
    Hostile("deep recursion", "def f():\n    return f()\nf()", ("error",), says="RecursionError"),
    Hostile(
        "deep recursion without a limit",
        """
import sys
sys.setrecursionlimit(1 << 30)
class A:
    def __getattr__(self, name):
        return getattr(self, name)
A().x
""",
        ("killed", "memory", "error"),
    ),
    Hostile("crash in C", "import ctypes\nctypes.string_at(0)", ("killed",)),
    Hostile("abort", "import os\nos.abort()", ("killed",)),
    Hostile("a huge number", "x = 7 ** (7 ** 9)", ("timeout", "memory"), loops=True),
    Hostile("reads input that is not there", "input()", ("error",), says="EOFError"),
    Hostile("nul bytes and broken text in the source", "x = '\ud800\0'\nprint('\udfff')", ("error",)),
    Hostile("unreadable output", "import os\nos.write(1, b'\\xff\\xfe\\x00\\x1b[2J')\nos.write(2, b'\\xff')"),
    Hostile("closes everything", "import os\nos.closerange(0, 64)"),
    Hostile("quiet exit", "import os\nos._exit(0)"),
    Hostile("exit code of its own", "import sys\nsys.exit(7)", ("error",)),
]

LEFT_BEHIND = [
    Hostile(
        "leaves a thread", "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    ),
    loops(
        "leaves a thread that it waits for", "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"
    ),
    Hostile(
        "leaves a child",
        "import os, time\nif os.fork() == 0:\n    time.sleep(1000)",
        filters=("error",),
    ),
    Hostile(
        "leaves a daemon in a session of its own",
        """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1000)
    os._exit(0)
os.wait()
""",
        filters=("error",),
    ),
    Hostile(
        "leaves a daemon that keeps the output open",
        """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
os.wait()
print("gone")
""",
        says="gone",
        filters=("error",),
    ),
    Hostile(
        "leaves zombies",
        "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        os._exit(0)",
        filters=("error",),
    ),
    Hostile("exit handlers", "import atexit\natexit.register(lambda: print('late'))", says="late"),
    loops("an exit handler without end", "import atexit, time\natexit.register(lambda: time.sleep(1000))"),
]

REACHING_OUT = [
    attempts(
        "socket by number",
        """
import socket
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2))
attempt(lambda: socket.create_connection(("::1", {port}), timeout=2))
""",
    ),
    attempts(
        "socket by name",
        """
import socket
attempt(lambda: socket.create_connection(("localhost", {port}), timeout=2))
attempt(lambda: socket.getaddrinfo("example.com", 80))
""",
    ),
    attempts(
        "unix socket",
        """
import socket
def connect(address):
    one = socket.socket(socket.AF_UNIX)
    one.connect(address)
attempt(lambda: connect("{socket}"))
attempt(lambda: connect("\\0{socket}"))
""",
    ),
    attempts(
        "socket behind Python's back",
        """
import ctypes, os
libc = ctypes.CDLL(None)
numbers = {{"x86_64": (41, 425, 321), "aarch64": (198, 425, 280)}}.get(os.uname().machine, ())
for number in numbers:
    attempt(lambda: libc.syscall(number, 2, 2, 0))
for family in (1, 2, 10, 16, 17):
    attempt(lambda: libc.socket(family, 1, 0))
""",
    ),
    attempts(
        "reads the machine",
        """
import os
for path in ("/etc/shadow", "/etc/hostname", "/etc/sudoers", "/proc/1/environ", "/proc/kcore", "/dev/mem", "/dev/vda"):
    attempt(lambda: open(path, "rb").read(1))
for folder in ("/root", "/home", "/sys", "/boot", "/mnt", "/opt", "/srv"):
    attempt(lambda: set(os.listdir(folder)) - set(os.__file__.split("/")) or False)
""",
    ),
    attempts(
        "reads and writes the test's folder",
        """
import os, shutil
attempt(lambda: open("{folder}/secret").read())
attempt(lambda: os.listdir("{folder}"))
attempt(lambda: open("{folder}/secret", "w"))
attempt(lambda: open("{folder}/new", "w"))
attempt(lambda: os.unlink("{folder}/secret"))
attempt(lambda: os.rename("{folder}/secret", "mine"))
attempt(lambda: os.chmod("{folder}/secret", 0o777))
attempt(lambda: shutil.rmtree("{folder}"))
""",
    ),
    attempts(
        "writes elsewhere",
        """
import os
for folder in ("/", "/etc", "/usr/lib", "/usr/bin", "/var", "/dev", "/proc", "/box/..", os.path.dirname(os.__file__), "/root"):
    attempt(lambda: open(folder + "/planted", "w"))
    attempt(lambda: os.mkdir(folder + "/planted"))
attempt(lambda: open(os.__file__, "a"))
""",
    ),
    attempts(
        "links",
        """
import os
os.symlink("{folder}/secret", "link")
os.symlink("{folder}", "folder")
attempt(lambda: open("link").read())
attempt(lambda: open("link", "w"))
attempt(lambda: open("folder/new", "w"))
attempt(lambda: os.link("{folder}/secret", "hard"))
attempt(lambda: open("/proc/self/cwd/../../../{folder}/secret").read())
attempt(lambda: open("/proc/self/root/{folder}/secret").read())
attempt(lambda: os.chown("link", 0, 0))
""",
    ),
    attempts(
        "devices and mounts",
        """
import ctypes, os, stat
libc = ctypes.CDLL(None)
attempt(lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0)))
attempt(lambda: os.chroot("/"))
attempt(lambda: libc.mount(b"none", b"/box", b"tmpfs", 0, None))
attempt(lambda: libc.umount2(b"/proc", 2))
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    attempt(lambda: libc.unshare(flag))
""",
    ),
    attempts(
        "memory of others",
        """
import os
for pid in {{1, os.getppid(), *range(1, 40)}} - {{os.getpid()}}:
    attempt(lambda: open(f"/proc/{{pid}}/mem", "rb").read(1))
    attempt(lambda: open(f"/proc/{{pid}}/mem", "wb"))
    attempt(lambda: open(f"/proc/{{pid}}/environ", "rb").read(1))
    attempt(lambda: os.listdir(f"/proc/{{pid}}/fd"))
    attempt(lambda: os.listdir(f"/proc/{{pid}}/root/"))
""",
    ),
    attempts(
        "ptrace",
        """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in (1, os.getppid()):
    attempt(lambda: libc.ptrace(16, pid, 0, 0))
    attempt(lambda: libc.ptrace(0x4206, pid, 0, 0))
    attempt(lambda: libc.process_vm_readv(pid, 0, 0, 0, 0, 0))
""",
    ),
    attempts(
        "kills its parents",
        """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
    for pid in {{1, os.getppid()}}:
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("survived")
""",
        says="survived",
    ),
    attempts(
        "kills everybody",
        """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(-1, number)
    except OSError:
        pass
print("survived")
""",
        says="survived",
    ),
    attempts(
        "slows others down",
        """
import os
for pid in {{1, os.getppid()}}:
    attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) or True)
    attempt(lambda: os.sched_setaffinity(pid, {{0}}) or True)
    attempt(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)) or True)
""",
    ),
    attempts(
        "raises its limits",
        """
import os, resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        attempt(lambda: resource.setrlimit(which, (hard + 1, hard + 1)) or True)
        attempt(lambda: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2) or True)
attempt(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)))
attempt(lambda: os.nice(-5))
attempt(lambda: os.setuid(0) if os.getuid() else False)
attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) or True)
""",
    ),
    attempts(
        "a program with the set-user-id bit",
        """
import os, shutil, subprocess
shutil.copyfile("/bin/cat" if os.path.exists("/bin/cat") else "/usr/bin/cat", "cat")
attempt(lambda: [os.chmod("cat", 0o6755)] == 0)
attempt(lambda: subprocess.run(["./cat", "/etc/shadow", "{folder}/secret"], capture_output=True, check=True).stdout)
""",
    ),
    attempts(
        "shared memory and message queues",
        """
import ctypes
libc = ctypes.CDLL(None)
attempt(lambda: libc.shmget(0, 4096, 0o1600))
attempt(lambda: libc.msgget(0, 0o1600))
attempt(lambda: libc.semget(0, 1, 0o1600))
""",
    ),
    attempts(
        "the environment", "import os\nattempt(lambda: '{secret}' in repr(os.environ) or '{secret}' in repr(os.environb))"
    ),
    attempts(
        "inherited descriptors",
        """
import os
for number in range(3, 64):
    attempt(lambda: os.fstat(number))
    attempt(lambda: os.write(number, b"hello"))
""",
    ),
]

PROGRAMS = [*USING_UP, *LEFT_BEHIND, *REACHING_OUT]
