"""The folder of a run.

    runs/lookup-2/
      recipe.yaml          the resolved recipe, with the reason of every derived value
      metrics.jsonl        one line a step and one an evaluation, every metric (see `names`)
      trajectories/        step_000012.jsonl: the trajectories of a step
      heartbeats/          one file a role: what it waits for right now
      roles/               one file a role that serves: its address; how a rank of the trainer ended
      logs/                one file a role, and `all.log`: every line of every role
      checkpoints/         whole states, from which a run goes on; see docs/checkpoints.md
      exports/             step_12: the model of that step, where the recipe asks for it
      export/              the trained model, in the format it was loaded from

A folder belongs to one run: a second run of the same name gets `lookup-2`, and nothing is ever written over. The folder's name
is the run's id, by which its checkpoints are found.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from polyturn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of a run are. `RunFolder(root)` names those of a run that exists, `create` makes a new one."""

    root: Path

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunFolder:
        """Make a folder that no other run has or gets, also when several start at once.

        Raises ConfigError when `name` is no plain folder name, or `output_dir` can't be written to.
        """
        refuse_name(name)
        parent = Path(output_dir)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                root = parent / (name if number == 1 else f"{name}-{number}")
                try:
                    root.mkdir()
                except FileExistsError:
                    continue
                folder = cls(root)
                folder.complete()
                return folder
        except OSError as error:
            raise ConfigError(
                f"run.output_dir={output_dir}: can't be written to ({error.strerror}); give another folder"
            ) from error
        raise AssertionError("itertools.count has no end")

    def complete(self) -> None:
        """Make the folders in it that are not there. Raises OSError."""
        for inner in (self.trajectories, self.heartbeats, self.roles, self.logs, self.export):
            inner.mkdir(exist_ok=True)

    def put_away(self) -> None:
        """Take away what processes of an earlier start have left: heartbeats and addresses; logs go to `logs/before-N`."""
        for left in (*self.heartbeats.iterdir(), *self.roles.iterdir()):
            left.unlink()
        logs = [path for path in self.logs.iterdir() if path.is_file()]
        if logs:
            older = next(path for path in (self.logs / f"before-{n}" for n in itertools.count(1)) if not path.exists())
            older.mkdir()
            for path in logs:
                path.rename(older / path.name)

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        """One line a step, one an evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """Folder of the recorded trajectories."""
        return self.root / "trajectories"

    @property
    def heartbeats(self) -> Path:
        """Folder of the heartbeats, one file a role."""
        return self.root / "heartbeats"

    @property
    def roles(self) -> Path:
        """Folder of the addresses of roles that serve."""
        return self.root / "roles"

    @property
    def logs(self) -> Path:
        """Folder of the logs, one file a role."""
        return self.root / "logs"

    @property
    def export(self) -> Path:
        """Folder of the trained model."""
        return self.root / "export"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints of the disk tier. Made when it is first written to."""
        return self.root / "checkpoints"

    @property
    def exports(self) -> Path:
        """Folder of the models of single steps. Made when it is first written to."""
        return self.root / "exports"

    @property
    def resume(self) -> Path:
        """What the run goes on from, for all of its processes; there only when it goes on from something."""
        return self.root / "resume.json"

    @property
    def lock(self) -> Path:
        """Locked by whoever drives the run, and by whoever still writes a checkpoint of it."""
        return self.root / ".lock"

    def trajectories_of(self, step: int) -> Path:
        """File of one step's trajectories; sorting the names sorts the steps."""
        return self.trajectories / f"step_{step:06d}.jsonl"


def refuse_name(name: str) -> None:
    """Raise ConfigError when `name` is no plain folder name."""
    if not name or name in (".", "..") or any(letter in name for letter in "/\\\0"):
        raise ConfigError(f"run.name={name!r} is no folder name; give one without slashes, such as lookup")
