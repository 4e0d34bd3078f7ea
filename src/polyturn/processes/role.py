"""What a process of a run knows of its place: its name, the run folder, its peers, the run's token.

Whoever starts a role says it in the environment (`role_environment`); the role reads it back (`Role.from_environment`), and
announces its address in the run folder once it serves. So a role needs no port before it runs, and a token is on no command
line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyturn.errors import ConfigError
from polyturn.processes.heartbeat import Heartbeat
from polyturn.processes.whole_file import write_whole

AGENT = "trainer-agent"
"""The role that starts and watches the trainer's ranks on a machine."""
DRIVER = "trainer-0"
"""The rank that drives a run: it saves and ends by itself when it is sent a SIGINT."""

_NAME = re.compile(rf"{AGENT}|(trainer|engine|environment)-\d+")
TOKEN = "POLYTURN_RUN_TOKEN"
"""Variable with what every request between roles must bring."""
_FOLDER, _PEERS = "POLYTURN_RUN_FOLDER", "POLYTURN_PEERS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run.

    >>> Role(name="engine-1", folder=Path("runs/lookup")).kind
    'engine'
    """

    name: str
    """Kind and number: `trainer-0`, `engine-1`, `environment-0`."""
    folder: Path
    """The run folder."""
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of the roles that were started before this one, by kind, in order of their numbers."""
    token: str | None = field(default=None, repr=False)
    """What every request between roles must bring."""

    @classmethod
    def from_environment(cls, name: str) -> Role:
        """The role `name` as its starter described it. Raises ConfigError for a name or a description that is none."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no role; roles are called trainer-0, engine-0, environment-0 and so on")
        folder = os.environ.get(_FOLDER)
        if not folder:
            raise ConfigError(f"{_FOLDER} is not set; a role is started by `polyturn train` or `polyturn launch`, which set it")
        try:
            peers = {kind: tuple(map(str, urls)) for kind, urls in json.loads(os.environ.get(_PEERS) or "{}").items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{_PEERS} must be a JSON object of lists of addresses: {error}") from error
        return cls(name=name, folder=Path(folder), peers=peers, token=os.environ.get(TOKEN) or None)

    @property
    def kind(self) -> str:
        """The name without its number."""
        return self.name.rpartition("-")[0]

    @property
    def number(self) -> int:
        """The number in the name; `trainer-agent` has none, and raises ValueError."""
        return int(self.name.rpartition("-")[2])

    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this role, to be used as a context manager for as long as it lives."""
        return Heartbeat(heartbeat_file(self.folder, self.name), self.name)

    def announce(self, address: str, *, control: str | None = None) -> None:
        """Say that this role now serves at `address`, and takes orders at `control`, where that is another one."""
        told: dict[str, Any] = {"address": address, "pid": os.getpid()}
        if control is not None:
            told["control"] = control
        write_whole(address_file(self.folder, self.name), json.dumps(told))


def role_environment(folder: Path, peers: Mapping[str, Sequence[str]], token: str) -> dict[str, str]:
    """The variables that describe a role's place, for the environment of its process."""
    return {_FOLDER: str(folder.resolve()), _PEERS: json.dumps({k: list(v) for k, v in peers.items()}), TOKEN: token}


def heartbeat_file(folder: Path, name: str) -> Path:
    """Where the role `name` says what it waits for."""
    return folder / "heartbeats" / f"{name}.json"


def address_file(folder: Path, name: str) -> Path:
    """Where the role `name` says where it serves."""
    return folder / "roles" / f"{name}.json"


def read_address(folder: Path, name: str) -> str | None:
    """Where the role `name` serves; None while it does not."""
    told = _announced(folder, name)
    return None if told is None else str(told["address"])


def read_control(folder: Path, name: str) -> str | None:
    """Where the role `name` takes orders; None while it doesn't serve, or takes none."""
    told = _announced(folder, name)
    return None if told is None or told.get("control") is None else str(told["control"])


def _announced(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        text = address_file(folder, name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
