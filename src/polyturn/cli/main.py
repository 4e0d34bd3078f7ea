"""`polyturn`: finds the verb, runs it, turns errors into sentences and exit codes.

Nothing here or in a verb's module imports torch, pydantic or rich at the top: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from polyturn import __version__
from polyturn.cli import (
    checkpoint,
    convert,
    data,
    env,
    evaluate,
    export,
    launch,
    memory_tier,
    plan,
    replay,
    role,
    rollout,
    train,
    warmstart,
)
from polyturn.errors import MissingDependencyError, PolyturnError
from polyturn.processes.leaving import leave

VERBS = (train, plan, launch, evaluate, export, rollout, replay, warmstart, checkpoint, memory_tier, env, data, convert, role)
_OPTIONAL = {"torch": "train", "transformers": "train", "safetensors": "train"}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="polyturn", description="Train multi-turn language-model agents with GRPO and turn-level credit."
    )
    parser.add_argument("--version", action="version", version=f"polyturn {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.register(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (see `polyturn.errors`); 130 after Ctrl-C."""
    # Before torch is imported: two torch threads beside a busy process ran ten times slower with spinning waits.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = _parse(argv)
    try:
        code: int = args.run(args)
    except PolyturnError as error:
        return _say(error)
    except ModuleNotFoundError as error:
        extra = _OPTIONAL.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _say(MissingDependencyError(f"this command needs {error.name}; pip install 'polyturn[{extra}]'"))
    except KeyboardInterrupt:
        print("polyturn: interrupted", file=sys.stderr)
        return 130
    return code


def entry() -> NoReturn:
    """The installed command: runs `main` and ends the process with its exit code, whatever threads are left."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` has. What is left to write has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with `key=value` allowed after options too, where argparse stops looking for positionals."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    overrides = getattr(args, "overrides", getattr(args, "arguments", None))
    strange = rest if overrides is None else [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if overrides is not None:
        overrides.extend(rest)
    return args


def _say(error: PolyturnError) -> int:
    if os.environ.get("POLYTURN_TRACEBACK"):
        traceback.print_exception(error)
    for line in str(error).splitlines():
        print(f"polyturn: error: {line}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    entry()
