"""Files in whatever fsspec reads: Google and Azure storage, HDFS, SFTP and others. fsspec is loaded with the first request."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from polyturn.errors import ConfigError, MissingDependencyError, StorageError
from polyturn.storage.progress import CHUNK_BYTES, tick
from polyturn.storage.stores.base import AccessError, BadKeyError, Entry, MissingKeyError, check_key
from polyturn.storage.stores.local import DRAFT, write_pieces
from polyturn.storage.stores.urls import redacted

_ONE_CREATES = threading.Lock()


class FsspecStore:
    """A store under a URL of fsspec's. `options` go to its filesystem, such as a project or a user.

    Files are written under another name and then moved. Whether `put_if_absent` tells two writers of one moment apart depends
    on the filesystem: those that can't create exclusively are looked at first, and then written.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._options = dict(options or {})
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """As it was given, without a password."""
        return redacted(self._url)

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Write under another name, then move."""
        target = self._path(key)
        with self._told(key), self._draft(target) as draft:
            with file.open("rb") as source, self._fs.open(draft, "wb") as out:
                while piece := source.read(CHUNK_BYTES):
                    out.write(piece)
                    tick(len(piece))
            self._move(draft, target)

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Download."""
        with self._told(key):
            write_pieces(self.chunks(key), file)

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces."""
        path = self._path(key)
        with self._told(key), self._fs.open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                tick(len(piece))
                yield bytes(piece)

    def list(self, prefix: str) -> list[Entry]:
        """Files by prefix."""
        return sorted((entry for entry in self._walk(prefix) if DRAFT not in entry.key), key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """Remove a file."""
        path = self._path(key)
        with self._told(key), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        path = self._path(key)
        with self._told(key):
            self._fs.invalidate_cache()
            return bool(self._fs.isfile(path))

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Create exclusively where the filesystem can."""
        target = self._path(key)
        with self._told(key), _ONE_CREATES:
            self._fs.invalidate_cache()
            if self._fs.exists(target):
                return False
            self._make_folder(target)
            try:
                self._fs.pipe_file(target, content, mode="create")
                return True
            except FileExistsError:
                return False
            except (NotImplementedError, ValueError, TypeError):  # no such mode there
                with self._draft(target) as draft:
                    self._fs.pipe_file(draft, content)
                    self._move(draft, target)
                return True

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove drafts of writers that died."""
        oldest = time.time() - older_than_s
        drafts = [entry for entry in self._walk(prefix) if DRAFT in entry.key and entry.modified < oldest]
        for entry in drafts:
            with self._told(entry.key), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{entry.key}")
        return len(drafts)

    def _walk(self, prefix: str) -> Sequence[Entry]:
        folder = prefix.rpartition("/")[0]
        top = f"{self._root}/{check_key(folder)}" if folder else self._root
        with self._told(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(top, detail=True)
            except FileNotFoundError:
                return []
            tick(0)
            entries = []
            for path, detail in found.items():
                key = self._fs._strip_protocol(path)[len(self._root) :].lstrip("/")
                if key and key.startswith(prefix):
                    entries.append(Entry(key, int(detail["size"] or 0), _modified(detail)))
        return entries

    def _path(self, key: str) -> str:
        check_key(key)
        if DRAFT in key:
            raise BadKeyError(f"the key {key!r} is not allowed: names with {DRAFT!r} are for unfinished files")
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _draft(self, target: str) -> Iterator[str]:
        self._make_folder(target)
        draft = f"{target}{DRAFT}{uuid.uuid4().hex[:12]}"
        try:
            yield draft
        except BaseException:
            with contextlib.suppress(Exception):  # `sweep` collects what this leaves
                self._fs.rm_file(draft)
            raise

    def _make_folder(self, target: str) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)

    def _move(self, draft: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # some don't move onto a file that is there
            if self._fs.exists(target):
                self._fs.rm_file(target)
        self._fs.mv(draft, target)
        tick(0)

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    @property
    def _root(self) -> str:
        return self._open()[1]

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                import fsspec

                try:
                    filesystem, root = fsspec.core.url_to_fs(self._url, **self._options)
                except ImportError as error:
                    raise MissingDependencyError(f"{self.url}: {redacted(str(error))}") from error
                except (OSError, ValueError, TypeError) as error:
                    raise StorageError(f"{self.url} can't be opened: {redacted(str(error))}") from error
                self._opened = filesystem, str(root).rstrip("/")
            return self._opened

    @contextlib.contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Turn what a filesystem says into a StorageError."""
        try:
            yield
        except (StorageError, MissingDependencyError):
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise MissingKeyError(f"{self.url}: there is no file {key}") from error
        except PermissionError as error:
            raise AccessError(f"{self.url}: no permission for {key}: {redacted(str(error))}") from error
        except Exception as error:  # every filesystem brings its own
            raise StorageError(f"{self.url}: {key} failed: {type(error).__name__}: {redacted(str(error))}") from error


def refuse_unknown(scheme: str, url: str) -> None:
    """Raise ConfigError for a scheme that fsspec does not know, MissingDependencyError without fsspec."""
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{redacted(url)} needs fsspec; pip install 'polyturn[fsspec]'") from error
    for part in scheme.split("::"):
        if part not in fsspec.available_protocols():
            raise ConfigError(
                f"{redacted(url)}: {part} is no filesystem that fsspec knows; give a folder, s3:// or one that is"
            )


def _modified(detail: Mapping[str, Any]) -> float:
    """Each filesystem names it in its own way; now for one that does not say, so that nothing there counts as old."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created", "timeModified"):
        found = detail.get(name)
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    return time.time()
