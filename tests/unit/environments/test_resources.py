"""What environments and rewards share: made when asked for, started with the run, stopped however it ends."""

from __future__ import annotations

import pytest

from parts.environments import Colours
from polyturn.config.schema import SandboxSection
from polyturn.environments.mixed import Mixed
from polyturn.environments.resources import Resources
from polyturn.errors import ConfigError, EnvironmentSetupError, SandboxError
from polyturn.loop.parts import build_sandbox, opened
from polyturn.sandbox.base import Limits
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox


class Box:
    """Writes down what happens to it."""

    def __init__(self, said, fails=None):
        self.said, self.fails = said, fails

    async def start(self):
        self.said.append("sandbox starts")
        if self.fails:
            raise self.fails

    async def stop(self):
        self.said.append("sandbox stops")


def environment(said, name="colours", fails=None):
    class Watched(Colours):
        async def start(self):
            said.append(f"{name} starts")
            if fails:
                raise fails

        def stop(self):  # authors may leave out the async
            said.append(f"{name} stops")

    return Watched()


async def test_nothing_is_made_that_nobody_asked_for():
    said = []
    resources = Resources(make_sandbox=lambda: said.append("made"))
    async with opened(environment(said), resources, 5.0):
        said.append("playing")
    assert said == ["colours starts", "playing", "colours stops"]


async def test_everybody_gets_the_same_sandbox_and_it_is_open_while_the_environment_is():
    said = []
    resources = Resources(make_sandbox=lambda: Box(said), make_runner=lambda sandbox: ("runner of", sandbox))
    asked = resources.missing(("sandbox", "runner", "level"), {})
    assert asked["sandbox"] is resources.give("sandbox")
    assert asked["runner"] is resources.give("runner")
    assert asked["runner"] == ("runner of", asked["sandbox"])
    async with opened(environment(said), resources, 5.0):
        said.append("playing")
    assert said == ["sandbox starts", "colours starts", "playing", "colours stops", "sandbox stops"]


@pytest.mark.parametrize("where", ["sandbox", "environment", "block"])
async def test_all_is_stopped_whatever_fails(where):
    said, error = [], SandboxError("gone")
    resources = Resources(make_sandbox=lambda: Box(said, error if where == "sandbox" else None))
    resources.give("sandbox")
    with pytest.raises(SandboxError, match="gone"):
        async with opened(environment(said, fails=error if where == "environment" else None), resources, 5.0):
            raise error
    assert said[-2:] == ["colours stops", "sandbox stops"]


async def test_an_error_of_the_author_becomes_a_sentence():
    with pytest.raises(EnvironmentSetupError, match=r"colours.start raised KeyError: 'port'"):
        async with opened(environment([], fails=KeyError("port")), Resources(), 5.0):
            pass


async def test_a_mix_starts_all_parts_and_stops_them_in_reverse_also_after_a_failure():
    said = []
    good = Mixed({"a": environment(said, "a"), "b": environment(said, "b")})
    async with opened(good, Resources(), 5.0):
        said.append("playing")
    assert said == ["a starts", "b starts", "playing", "b stops", "a stops"]
    said.clear()
    bad = Mixed({name: environment(said, name, ValueError("no") if name == "b" else None) for name in "abc"})
    with pytest.raises(EnvironmentSetupError):
        async with opened(bad, Resources(), 5.0):
            pass
    assert said == ["a starts", "b starts", "b stops", "a stops"]


# ── the section of the recipe ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_local_sandbox_with_the_limits_of_the_recipe():
    sandbox = build_sandbox(SandboxSection(wall_s=3.0, memory_mib=64, output_kib=2, concurrency=3))
    assert isinstance(sandbox, LocalSandbox)
    limits = Limits(wall_s=3.0, cpu_s=10.0, memory_bytes=64 << 20, output_bytes=2048)
    assert sandbox._limits == limits


def test_a_runner_with_its_token(monkeypatch):
    monkeypatch.setenv("RUNNER_TOKEN", "s3cret")
    sandbox = build_sandbox(SandboxSection(kind="http", url="http://127.0.0.1:8808", token_env="RUNNER_TOKEN"))
    assert isinstance(sandbox, HttpSandbox)
    assert sandbox._token == "s3cret"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "http"}, "needs sandbox.url"),
        ({"url": "http://127.0.0.1:1"}, r"set sandbox.kind=http"),
        ({"kind": "http", "url": "http://127.0.0.1:1", "isolation": "filters"}, "the runner's own"),
        ({"kind": "http", "url": "http://127.0.0.1:1", "import_paths": ("/x",)}, "the runner's own"),
        ({"kind": "http", "url": "http://127.0.0.1:1", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE: this variable"),
        ({"kind": "http", "url": "127.0.0.1:1"}, "must start with http"),
    ],
)
def test_sections_that_make_no_sense(section, said):
    with pytest.raises(ConfigError, match=said):
        build_sandbox(SandboxSection(**section))
