"""What a program can see of the disk: a root of its own with Python in it, read-only, and one folder to write to.

The root is built once, in the supervisor's mount namespace; `/box` is mounted anew for every program and gone with it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from polyturn.sandbox import kernel
from polyturn.sandbox.kernel import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT

BOX = "/box"
"""Where a program's folder is, where mounts can be made. Inside: `work`, `tmp` and `shm`."""
SUBFOLDERS = ("work", "tmp", "shm")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_SHARED_PREFIXES = ("/", "/usr", "/usr/local")  # of interpreters that share their prefix with everything else
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin", "/usr/share/zoneinfo")
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr on most systems
_FILES = ("/etc/ld.so.cache",)
_WORKBENCHES = ("/tmp", "/mnt", "/var/tmp", "/run")
_ST_RELATIME, _MS_RELATIME = 4096, 1 << 21
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime have one number in both worlds


def interpreter() -> str:
    """The path of the interpreter itself, behind all links and virtual environments."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def import_path() -> list[str]:
    """The folders of the standard library."""
    library = os.path.dirname(os.path.realpath(os.__file__))  # noqa: PTH120
    version = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    return [str(Path(library).parent / version), library, f"{library}/lib-dynload"]


def readable(extra: tuple[str, ...] = ()) -> list[str]:
    """The folders that Python needs, and `extra`, as far as they exist. None of them lies in another."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [*_SYSTEM, import_path()[1], os.path.dirname(interpreter()), *map(os.path.realpath, extra)]  # noqa: PTH120
    if prefix not in _SHARED_PREFIXES:
        wanted.append(prefix)
    if prefix == "/usr/local":
        wanted += ["/usr/local/lib", "/usr/local/bin"]
    wanted += [path for path in _TOP if Path(path).is_dir() and not Path(path).is_symlink()]
    found = sorted({path for path in wanted if Path(path).is_dir()})
    return [path for path in found if not any(path.startswith(other.rstrip("/") + "/") for other in found)]


def build_root(paths: list[str], *, keep_proc: bool) -> None:
    """Leave this process, whose mount namespace must be its own, a root with `paths`, a few devices and `/box`, read-only.

    `keep_proc` keeps the old /proc mounted, below the one every program gets: in a user namespace the kernel allows a new
    /proc only next to a whole one.

    Raises OSError where mounts can't be made.
    """
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    base = next(path for path in _WORKBENCHES if Path(path).is_dir())
    files = [path for path in (*DEVICES, *_FILES) if Path(path).exists()]
    sources = {path: os.open(path, os.O_PATH) for path in [*paths, *files, *(["/proc"] if keep_proc else [])]}
    kernel.mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in (BOX, "/proc", "/dev", "/etc", "/var"):
        Path(base + path).mkdir()
    for path, source in sources.items():
        target = Path(base + path)
        if path in files:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        else:
            target.mkdir(parents=True, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{source}", str(target), flags=MS_BIND | MS_REC)
        os.close(source)
    _write_small_parts(base)
    for mounted in _mounts_below(base):
        inside = mounted[len(base) :]
        if inside != "/proc" and not inside.startswith("/proc/"):
            _make_read_only(mounted, devices=inside in DEVICES)
    os.chdir(base)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    _make_read_only("/", devices=False)


def mount_box(*, size_bytes: int, num_files: int, uid: int, hide_init: bool) -> bool:
    """Give a program, in its own mount namespace, its folder, and a /proc of its own pid namespace.

    False when /proc can't be mounted: the program then has none. `hide_init` leaves out whatever another user runs, which only
    members of group 0 then see.
    """
    options = f"size={size_bytes},nr_inodes={num_files + len(SUBFOLDERS) + 1},mode=700,uid={uid},gid={uid}"
    kernel.mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV, options)
    flags = MS_NOSUID | MS_NODEV | kernel.MS_NOEXEC
    for kinds in ("hidepid=2,subset=pid" if hide_init else "subset=pid", "hidepid=2" if hide_init else "", ""):
        try:
            kernel.mount("proc", "/proc", "proc", flags, kinds)
            return True
        except OSError:
            continue
    kernel.mount("tmpfs", "/proc", "tmpfs", flags | MS_RDONLY, "size=4k")
    return False


def _write_small_parts(base: str) -> None:
    Path(f"{base}/etc/passwd").write_text("root:x:0:0::/:/bin/sh\nprogram:x:65534:65534::/box/work:/bin/sh\n")
    Path(f"{base}/etc/group").write_text("root:x:0:\nprogram:x:65534:\n")
    links = {"/tmp": f"{BOX}/tmp", "/var/tmp": f"{BOX}/tmp", "/dev/shm": f"{BOX}/shm", "/dev/fd": "/proc/self/fd"}
    links |= {path: str(Path(path).readlink()) for path in _TOP if Path(path).is_symlink()}
    for path, target in links.items():
        place = Path(base + path)
        if not place.exists() and not place.is_symlink():
            place.symlink_to(target)


def _mounts_below(base: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines)
    return [point for point in points if point.startswith(base + "/")]


def _make_read_only(path: str, *, devices: bool) -> None:
    """Remount, keeping the flags the mount has: a user namespace may add some and take none away."""
    found = os.statvfs(path).f_flag
    flags = found & _KEPT_FLAGS | MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)
    flags |= _MS_RELATIME if found & _ST_RELATIME else 0
    kernel.mount("none", path, flags=MS_REMOUNT | MS_BIND | flags)
