"""From a URL to a store, and to a sentence where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.errors import ConfigError
from polyturn.storage.stores import Access, LocalStore, ObjectStore, open_store
from polyturn.storage.stores.urls import redacted


def test_folders():
    assert open_store("a/b").url == "a/b"
    assert open_store("~/x").url == str(Path.home() / "x")
    store = open_store("file:///mnt/a%20b")
    assert isinstance(store, LocalStore)
    assert store.url == "/mnt/a b"


def test_buckets(monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    store = open_store("s3://bucket/a/b")
    assert isinstance(store, ObjectStore)
    assert store.url == "s3://bucket/a/b/"
    assert open_store("s3://bucket").url == "s3://bucket/"
    assert open_store("s3://b/x", Access(endpoint_url="http://me:pw@host:1")).url == "s3://b/x/ at http://***@host:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert open_store("s3://b/x").url == "s3://b/x/ at http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "the place of a store is empty"),
        ("s3://", "names no bucket"),
        ("file://host/x", "three slashes"),
        ("gopher2://user:secret@x/y", "gopher2 is no filesystem that fsspec knows"),
    ],
)
def test_mistakes(url, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_token_is_not_shown():
    assert "secret" not in repr(Access(token="secret"))


def test_redacted():
    text = "GET https://b.s3.aws.com/k?X-Amz-Signature=abc&X-Amz-Credential=AKIA&n=1 failed"
    assert redacted(text) == "GET https://b.s3.aws.com/k?X-Amz-Signature=***&X-Amz-Credential=***&n=1 failed"
    assert redacted("sftp://me:pw@host/x and az://c?sig=1") == "sftp://***@host/x and az://c?sig=***"
