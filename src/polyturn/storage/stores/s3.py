"""Files in a bucket of S3, or of anything that speaks its protocol. boto3 is loaded with the first request.

Credentials come from where boto3 finds them (environment, profile, role), never from a recipe, and never reach a message.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyturn.errors import ConfigError, MissingDependencyError, StorageError
from polyturn.storage.parallel import each
from polyturn.storage.progress import CHUNK_BYTES, tick
from polyturn.storage.stores.base import AccessError, Entry, MissingKeyError, check_key
from polyturn.storage.stores.local import draft_of
from polyturn.storage.stores.section import Section
from polyturn.storage.stores.urls import redacted

PART_BYTES = 16 * 1024 * 1024
"""Larger files go up and come down in parts of this size, several at once."""
_THREADS = 8
_MOST_PARTS = 9000  # S3 takes 10,000
_CONNECT_S, _READ_S = 5.0, 10.0
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Encryption:
    """How S3 encrypts what is written: with its own keys (`AES256`), or one of KMS (`aws:kms`, `kms_key_id` or the default)."""

    kind: Literal["AES256", "aws:kms"] | None = None
    kms_key_id: str | None = None

    def __post_init__(self) -> None:
        if self.kms_key_id is not None and self.kind != "aws:kms":
            raise ConfigError(f"the KMS key {self.kms_key_id} is for the encryption aws:kms, and it is {self.kind}")

    def arguments(self) -> dict[str, str]:
        """For every request that writes an object."""
        found: dict[str, str] = {} if self.kind is None else {"ServerSideEncryption": self.kind}
        return found if self.kms_key_id is None else {**found, "SSEKMSKeyId": self.kms_key_id}


class ObjectStore:
    """A store under `prefix` in a bucket. The prefix ends in a slash, so that no sibling's files are ever taken for ours."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        encryption: Encryption = Encryption(),
        part_bytes: int = PART_BYTES,
        read_s: float = _READ_S,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint_url = endpoint_url
        self._region = region
        self._encryption = encryption
        self._part_bytes = part_bytes
        self._read_s = read_s
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}

    @property
    def url(self) -> str:
        """Bucket and prefix, and the endpoint when it is not AWS's."""
        place = f"s3://{self._bucket}/{self._prefix}"
        return place if self._endpoint_url is None else f"{place} at {redacted(self._endpoint_url)}"

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Upload a file, in parts when it is large."""
        name = self._name(key)
        with self._told(key):
            num_bytes = file.stat().st_size
            if num_bytes <= self._part_bytes:
                with Section(file, 0, num_bytes) as body:
                    self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **self._encryption.arguments())
            else:
                self._put_parts(file, name, num_bytes)
            tick(0)

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Download a file, in ranges when it is large."""
        name = self._name(key)
        with self._told(key), draft_of(file) as draft, draft.open("r+b", buffering=0) as out:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            num_bytes, etag = answer["ContentLength"], answer["ETag"]
            answer["Body"].close()

            def fetch(start: int) -> None:
                end = min(start + self._part_bytes, num_bytes) - 1
                self._range(name, start, end, etag, out.fileno())

            each(fetch, range(0, num_bytes, self._part_bytes), threads=_THREADS)
            draft.replace(file)

    def read(self, key: str) -> bytes:
        """Content of a small object."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces."""
        name = self._name(key)
        with self._told(key):
            body = self._client.get_object(Bucket=self._bucket, Key=name)["Body"]
            with contextlib.closing(body):
                for piece in body.iter_chunks(CHUNK_BYTES):
                    tick(len(piece))
                    yield piece

    def list(self, prefix: str) -> list[Entry]:
        """Objects by prefix."""
        found = []
        with self._told(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            for page in pages:
                tick(0)
                for item in page.get("Contents", ()):
                    key = item["Key"][len(self._prefix) :]
                    found.append(Entry(key, item["Size"], item["LastModified"].timestamp()))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """Remove an object."""
        name = self._name(key)
        with self._told(key):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def exists(self, key: str) -> bool:
        """Whether it is there. Asked by listing: a HEAD request does not tell a missing object from a missing bucket."""
        name = self._name(key)
        with self._told(key):
            page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=1)
            return any(item["Key"] == name for item in page.get("Contents", ()))

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Conditional put. An object with the same bytes counts as ours: the answer to a first attempt may have been lost."""
        name = self._name(key)
        with self._told(key):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=name, Body=content, IfNoneMatch="*", **self._encryption.arguments()
                )
                return True
            except self._client.exceptions.ClientError as error:
                if _code(error) not in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                    raise
        try:
            return self.read(key) == content
        except MissingKeyError:
            return False

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Abort uploads in parts that were never completed: they are not listed, and are paid for."""
        oldest, count = time.time() - older_than_s, 0
        with self._told(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"].timestamp() < oldest:
                        self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                        count += 1
                    tick(0)
        return count

    def _put_parts(self, file: Path, name: str, num_bytes: int) -> None:
        where = {"Bucket": self._bucket, "Key": name}
        upload = {
            **where,
            "UploadId": self._client.create_multipart_upload(**where, **self._encryption.arguments())["UploadId"],
        }
        part_bytes = max(self._part_bytes, -(-num_bytes // _MOST_PARTS))

        def send(number: int) -> dict[str, Any]:
            start = (number - 1) * part_bytes
            with Section(file, start, min(part_bytes, num_bytes - start)) as body:
                answer = self._client.upload_part(**upload, PartNumber=number, Body=body)
            tick(0)
            return {"ETag": answer["ETag"], "PartNumber": number}

        try:
            parts = each(send, range(1, -(-num_bytes // part_bytes) + 1), threads=_THREADS)
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(Exception):  # `sweep` collects what this leaves
                self._client.abort_multipart_upload(**upload)
            raise

    def _range(self, name: str, start: int, end: int, etag: str, handle: int) -> None:
        """Fetch a range into its place in a file. A connection that breaks is no reason to give up a large file."""
        for left in range(_ATTEMPTS - 1, -1, -1):
            try:
                part = self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end}", IfMatch=etag)
                if _pour(part["Body"], handle, start) == end + 1:
                    return
                raise StorageError(f"{self.url}: bytes {start:,} to {end:,} came short")
            except StorageError:
                if not left:
                    raise
            except Exception as error:
                if not left or not _is_broken_connection(error):
                    raise

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    @property
    def _client(self) -> Any:
        """One a process: connections don't survive a fork."""
        with self._lock:
            if os.getpid() not in self._clients:
                self._clients = {os.getpid(): self._connect()}
            return self._clients[os.getpid()]

    def _connect(self) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"s3:// needs {error.name}; pip install 'polyturn[s3]'") from error
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=self._read_s,
            retries={"max_attempts": 3, "mode": "standard"},
            max_pool_connections=2 * _THREADS,
            # Other servers than AWS's don't all know the newer checksums; the manifest has its own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={} if self._endpoint_url is None else {"addressing_style": "path"},
        )
        session = boto3.session.Session()
        return session.client("s3", endpoint_url=self._endpoint_url, region_name=self._region, config=config)

    @contextlib.contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Turn what boto3 says into a StorageError."""
        try:
            yield
        except (StorageError, MissingDependencyError):
            raise
        except OSError as error:
            raise StorageError(f"{self.url}: {key} failed: {error.strerror or error}") from error
        except Exception as error:
            raise self._told_error(error, key) from error

    def _told_error(self, error: Exception, key: str) -> Exception:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, ClientError):
            code = _code(error)
            if code in ("NoSuchKey", "404", "NotFound"):
                return MissingKeyError(f"{self.url}: there is no file {key}")
            if code == "NoSuchBucket":
                return StorageError(f"{self.url}: there is no bucket {self._bucket}; make it, or give another one")
            said = error.response.get("Error", {}).get("Message", "no reason given")
            if code in _REFUSED:
                return AccessError(f"{self.url}: {key} was refused ({code}); {_REFUSED[code]}")
            return StorageError(f"{self.url}: {key} failed: {code}: {said}")
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return AccessError(f"{self.url}: there are no credentials; set AWS_PROFILE, or give this machine a role")
        if isinstance(error, BotoCoreError):
            return StorageError(f"{self.url}: {key} failed: {type(error).__name__}: {redacted(str(error))}")
        return error


_RENEW = "renew the credentials (or the role that gives them)"
_RIGHTS = "give the role s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket and s3:AbortMultipartUpload there"
_REFUSED: Mapping[str, str] = {
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "RequestExpired": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "InvalidToken": _RENEW,
    "InvalidAccessKeyId": _RENEW,
    "SignatureDoesNotMatch": _RENEW,
    "AccessDenied": _RIGHTS,
    "AccessDeniedException": _RIGHTS,
    "KMS.AccessDeniedException": "give the role kms:GenerateDataKey and kms:Decrypt for the key",
    "403": _RIGHTS,
}


def _is_broken_connection(error: Exception) -> bool:
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    return isinstance(error, HTTPClientError | IncompleteReadError | ResponseStreamingError)


def _pour(body: Any, handle: int, start: int) -> int:
    """Write an answer's body into a file from `start` on; where it ends."""
    with contextlib.closing(body):
        for piece in body.iter_chunks(CHUNK_BYTES):
            view = memoryview(piece)
            while view:
                count = os.pwrite(handle, view, start)
                start, view = start + count, view[count:]
            tick(len(piece))
    return start


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
