"""Every exception Polyturn raises on purpose, and the exit code each one ends a command with.

    PolyturnError                     exit 1
    ├── UserError                     exit 2   something the user wrote: value, rule and fix in one sentence
    │   ├── ConfigError                        a recipe or an override
    │   ├── DataError                          a data file (names file and line)
    │   ├── EnvironmentSetupError              an environment's id, arguments or author code that breaks its contract
    │   ├── CheckpointError                    a checkpoint that does not fit the recipe, the model or the optimizer
    │   ├── ModelError                         a model folder, a tokenizer, a chat template
    │   ├── IsolationError                     model-written code can't be kept apart here, and `unsafe` was not said
    │   └── MissingDependencyError             an optional package; the message has the install line
    ├── ResourceError                 exit 3   something the run needs was lost
    │   ├── DeadlineError                      a wait passed its deadline
    │   ├── DeviceMemoryError                  a GPU ran out of memory; the message has what to change
    │   ├── EngineError                        the engine died or refused
    │   ├── RankError                          a rank of the trainer ended, or the others waited too long for it
    │   ├── StorageError                       a place for checkpoints can't be reached, refuses or is full
    │   ├── SandboxError                       the sandbox itself broke; a limit its program hit is a result instead
    │   └── WeightSyncError                    a push failed
    ├── TrainingError                 exit 4   training must not go on
    │   ├── NonFiniteError                     a loss or a gradient is nan or inf
    │   ├── TooManyDroppedError                more trajectories were lost than the recipe allows
    │   └── WeightMismatchError                the engine's weights are not the trainer's
    └── SampleError                   never leaves a step: the sample is dropped and counted

A message says what was found, which rule it breaks and what to do, in one sentence. A user never sees a traceback for a
`UserError`. A bad rollout is not an exception at all: it is a `Trajectory` with a `fault` (see `polyturn.types`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class PolyturnError(Exception):
    """Root of the tree; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class UserError(PolyturnError):
    """A mistake of the user, shown as one sentence."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, or an override of it, that can't be run."""


class DataError(UserError):
    """A data file that can't be trained on."""


class EnvironmentSetupError(UserError):
    """An unknown environment, wrong arguments, or author code that breaks the environment contract."""


class CheckpointError(UserError):
    """A checkpoint that does not fit what it is to be loaded into."""


class ModelError(UserError):
    """A model, tokenizer or chat template that can't be used."""


class IsolationError(UserError):
    """The machine can't keep model-written code apart, and the recipe does not say `unsafe: true`."""


class MissingDependencyError(UserError):
    """An optional package is needed and not installed."""


class ResourceError(PolyturnError):
    """Something the run needs was lost."""

    exit_code = 3


class DeadlineError(ResourceError):
    """A wait passed its deadline."""


class DeviceMemoryError(ResourceError):
    """A GPU has too little memory for a training step."""


class EngineError(ResourceError):
    """The engine died, or refused a request."""


class StorageError(ResourceError):
    """A place for checkpoints can't be reached, refuses, is full, or holds something damaged."""


class SandboxError(ResourceError):
    """The sandbox broke: its pool died, a fork failed, a remote runner is out of reach. The program is not to blame."""


class RankError(ResourceError):
    """A rank of the trainer ended, or kept the others waiting past their deadline."""


class WeightSyncError(ResourceError):
    """A weight push failed."""


class TrainingError(PolyturnError):
    """Training must not go on."""

    exit_code = 4


class NonFiniteError(TrainingError):
    """A loss, a gradient or a log-probability is nan or inf."""


class TooManyDroppedError(TrainingError):
    """More trajectories or samples were dropped than the recipe allows."""


class WeightMismatchError(TrainingError):
    """The engine's weights are not the trainer's, by their checksums or by the log-probabilities that they give."""


class SampleError(PolyturnError):
    """A training sample breaks an invariant; the step drops it and counts it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """End of a sentence that names the valid value nearest to `name`, or all of them when none is near.

    >>> nearest("tempratur", ["temperature", "top_p"])
    'did you mean temperature?'
    >>> nearest("xyz", ["grpo", "dapo"])
    'valid: dapo, grpo'
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"valid: {', '.join(names)}"
