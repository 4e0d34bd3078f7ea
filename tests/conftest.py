"""Settings of all tests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from polyturn.processes.garbage import put_aside

if TYPE_CHECKING:
    from parts.stores import Servers
    from parts.vllm_served import VllmServed
    from polyturn.engine.vllm import VllmEngine

# A machine that others keep busy is no failure of the code.
settings.register_profile("polyturn", deadline=None, max_examples=20)
# `make test-real` tries more, and the same ones every time: new ones are for the quick tests, which everybody runs.
settings.register_profile("thorough", deadline=None, max_examples=300, derandomize=True)
settings.load_profile("polyturn")


def pytest_collection_finish() -> None:
    """Thousands of tests and all of torch stay until the end: looking through them again and again takes time."""
    put_aside()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServed]:
    """A vLLM server with a tiny random model, shared by all tests: whoever needs certain weights pushes them first."""
    from parts.vllm_served import VllmServed

    server = VllmServed(tmp_path_factory.mktemp("vllm"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """VLLM in this process with a tiny random model, for all tests of a page: whoever needs certain weights pushes them first.

    There can be one at a time, so a page that starts engines of its own must not ask for it.
    """
    from parts.vllm_here import started, vllm_here
    from parts.vllm_served import tiny

    engine = started(vllm_here(tmp_path_factory.mktemp("vllm-here"), tiny(2)))
    try:
        yield engine
    finally:
        asyncio.run(engine.stop())


@pytest.fixture(scope="session")
def s3_servers() -> Iterator[Servers]:
    """S3 servers, started when a test asks for the URL of one."""
    from parts.stores import Servers

    servers = Servers()
    yield servers
    servers.close()
