"""Files in a folder: a disk, a network disk, or memory under /dev/shm."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from polyturn.errors import StorageError
from polyturn.storage.progress import CHUNK_BYTES, tick
from polyturn.storage.stores.base import AccessError, BadKeyError, Entry, MissingKeyError, check_key

DRAFT = ".draft-"
"""Part of the names of files that are being written. `list` passes over them."""
_SYNC_BYTES = 64 * 1024 * 1024


class LocalStore:
    """A store in the folder `root`, which is made when it is first written to."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    @property
    def url(self) -> str:
        """The folder's path."""
        return str(self.root)

    def path(self, key: str) -> Path:
        """Where the file of a key is."""
        if DRAFT in key:
            raise BadKeyError(f"the key {key!r} is not allowed: names with {DRAFT!r} are for unfinished files")
        return self.root / check_key(key)

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Copy or link `file`, then give it its name."""
        target = self.path(key)
        with _told(self.root, key):
            if target.exists() and target.samefile(file):
                return
            with draft_of(target) as draft:
                if not (link and _linked(file, draft)):
                    copy_file(file, draft)
                draft.replace(target)
            sync_folder(target.parent)

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Copy or link the stored file."""
        source = self.path(key)
        with _told(self.root, key), draft_of(file) as draft:
            if not (link and _linked(source, draft)):
                copy_file(source, draft, durable=False)
            draft.replace(file)

    def read(self, key: str) -> bytes:
        """Content of a file."""
        with _told(self.root, key):
            return self.path(key).read_bytes()

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces."""
        with _told(self.root, key), self.path(key).open("rb", buffering=0) as file:
            while piece := file.read(CHUNK_BYTES):
                tick(len(piece))
                yield piece

    def list(self, prefix: str) -> list[Entry]:
        """Files under the folder that the prefix names, or whose names start with its last part."""
        with _told(self.root, prefix):
            found = [entry for entry in self._walk(prefix) if DRAFT not in entry.key]
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """Remove a file, and its folders as far as they are empty."""
        path = self.path(key)
        with _told(self.root, key):
            path.unlink(missing_ok=True)
        self._remove_empty(path.parent)

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        path = self.path(key)
        with _told(self.root, key):
            try:
                return stat.S_ISREG(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Write under another name, then link: of several writers exactly one succeeds."""
        target = self.path(key)
        with _told(self.root, key), draft_of(target) as draft:
            _write(draft, content, "wb")
            try:
                os.link(draft, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not _created(target, content):
                    return False
            sync_folder(target.parent)
            return True

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove drafts of writers that died."""
        oldest, count = time.time() - older_than_s, 0
        with _told(self.root, prefix):
            drafts = [entry for entry in self._walk(prefix) if DRAFT in entry.key and entry.modified < oldest]
            for entry in drafts:
                path = self.root / entry.key
                path.unlink(missing_ok=True)
                self._remove_empty(path.parent)
                count += 1
        return count

    def _walk(self, prefix: str) -> Iterator[Entry]:
        folder, _, start = prefix.rpartition("/")
        todo = [self.root / check_key(folder) if folder else self.root]
        first = True
        while todo:
            place = todo.pop()
            try:
                entries = list(os.scandir(place))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                if first and not entry.name.startswith(start) and not entry.name.startswith(f".{start}"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(Path(entry.path))
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found = entry.stat(follow_symlinks=False)
                    key = Path(entry.path).relative_to(self.root).as_posix()
                    if key.startswith(prefix) or DRAFT in entry.name:
                        yield Entry(key, found.st_size, max(found.st_mtime, found.st_ctime))
            first = False

    def _remove_empty(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or somebody else was faster
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """An empty file beside `target` for its content while it is written; removed at the end, whatever happened."""
    draft = target.with_name(f".{target.name[:180]}{DRAFT}{os.getpid()}-{uuid.uuid4().hex[:12]}")
    for left in range(9, -1, -1):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            break
        except FileNotFoundError:  # whoever deleted the last other file in this folder took it away
            if not left:
                raise
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def write_pieces(pieces: Iterable[bytes], file: Path) -> None:
    """Write a file that comes in pieces; it appears whole, or not at all when they break off."""
    with draft_of(file) as draft:
        with draft.open("wb") as out:
            out.writelines(pieces)
        draft.replace(file)


def _linked(source: Path, target: Path) -> bool:
    """Make `target` a second name of the file; False where that can't be done (another disk, no links there)."""
    link = target.with_name(f"{target.name}.link")
    try:
        os.link(source, link)
        link.replace(target)
    except OSError as error:
        if error.errno in (*_NO_LINKS, errno.EXDEV):
            return False
        raise
    return True


def copy_file(source: Path, target: Path, *, durable: bool = True) -> None:
    """Copy in pieces, each a tick; `durable`: on the disk when this returns. Raises OSError."""
    buffer, unsynced = memoryview(bytearray(CHUNK_BYTES)), 0
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while count := reader.readinto(buffer):
            done = 0
            while done < count:
                done += writer.write(buffer[done:count])
            unsynced += count
            if durable and unsynced >= _SYNC_BYTES:  # in steps, so that a slow disk is no disk that hangs
                os.fdatasync(writer.fileno())
                unsynced = 0
            tick(count)
        if durable:
            os.fsync(writer.fileno())
            tick(0)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks can't, and need not
            raise
    finally:
        os.close(handle)


def _write(path: Path, content: bytes, mode: Literal["wb", "xb"]) -> None:
    with path.open(mode, buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _created(target: Path, content: bytes) -> bool:
    """Where there are no links: create the file under its own name. A reader may see part of it, which no manifest survives."""
    try:
        _write(target, content, "xb")
    except FileExistsError:
        return False
    except OSError:
        target.unlink(missing_ok=True)
        raise
    return True


@contextlib.contextmanager
def _told(root: Path, key: str) -> Iterator[None]:
    """Turn what the operating system says into a StorageError with the place and the reason."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingKeyError(f"{root}: there is no file {key}") from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise MissingKeyError(f"{root}: {key} is no file there ({error.strerror})") from error
    except PermissionError as error:
        raise AccessError(f"{root}: no permission for {key}; give this user the right to it, or another folder") from error
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise StorageError(f"{root}: {key} failed: {error.strerror or error}{hint}") from error


_HINTS = {
    errno.ENOSPC: "; free space there, or keep fewer checkpoints",
    errno.EDQUOT: "; the quota is used up: free space there, or keep fewer checkpoints",
    errno.EROFS: "; mount it writable, or give another folder",
}
