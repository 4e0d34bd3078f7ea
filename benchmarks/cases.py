"""Cases of a benchmark, each in a process of its own with a deadline of its own.

A GPU machine is lent by the minute, and a call to it may be cut off at any moment. So a case says what it knows as soon as it
knows it (`Told`), and whoever runs the cases copies that into the result file at once: what was measured is never lost. A case
that hangs is ended at its deadline and the next one begins; its last words are in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from polyturn.processes.whole_file import write_whole

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""For every case, where it is not set already: no network, and no sampler that is compiled for a minute first."""
END_S = 15.0
"""How long a case may take to end what it started, once it was told to."""
LEAST_S = 20.0
"""With less than this left of the limit nothing is begun."""
LOOK_S = 0.5
TAIL_LINES = 40


class Told:
    """What a case found so far, written whole whenever something is added."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Any] = {}

    def __call__(self, **found: Any) -> None:
        """Add numbers, and write all of them."""
        self._found |= found
        write_whole(self._file, json.dumps(self._found))


class Record:
    """A result file with an entry for each case; those of earlier calls stay in it."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self.out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(out.read_text(encoding="utf-8")).get("cases", {}) if out.exists() else {}
        self._whole: dict[str, Any] = {**about, "cases": kept}

    def of(self, case: str) -> dict[str, Any]:
        """What is known of a case."""
        return dict(self._whole["cases"].get(case, {}))

    def put(self, case: str, found: dict[str, Any]) -> None:
        """Replace what is known of a case, and write."""
        self._whole["cases"][case] = found
        write_whole(self.out, json.dumps(self._whole, indent=1) + "\n")

    def add(self, **found: Any) -> None:
        """Numbers about all cases together."""
        self._whole |= found
        write_whole(self.out, json.dumps(self._whole, indent=1) + "\n")


def run_cases(
    names: Sequence[str],
    command: Callable[[str, Path], Sequence[str]],
    record: Record,
    *,
    limit_s: float,
    case_limit_s: float,
    environment: dict[str, str] | None = None,
) -> None:
    """Run `command(name, file)` for every case, one after the other; each writes what it finds to its `file`."""
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    for name in names:
        left = limit_s - (time.monotonic() - began)
        if left < LEAST_S:
            record.put(name, {"not_run": f"{left:.0f} s were left of {limit_s:g}"})
            continue
        file = record.out.parent / f".{record.out.stem}-{name.replace('/', '-')}.json"
        file.unlink(missing_ok=True)
        _run(name, command(name, file), file, record, limit_s=min(left, case_limit_s), environment=environment)
        file.unlink(missing_ok=True)
        print(name, json.dumps(record.of(name)), flush=True)


def run_chosen(
    options: Any,
    command: Callable[[str, Path], Sequence[str]],
    about: dict[str, Any],
    environment: dict[str, str] = ENVIRONMENT,
) -> Record:
    """`run_cases` of those that `options_of` parsed; the result says of the machine what `about` says."""
    record = Record(options.out, about)
    limits = {"limit_s": options.limit_s, "case_limit_s": options.case_limit_s}
    run_cases(options.cases, command, record, **limits, environment=environment)
    return record


def _run(
    name: str, argv: Sequence[str], file: Path, record: Record, *, limit_s: float, environment: dict[str, str] | None
) -> None:
    log = record.out.parent / f"{record.out.stem}-{name.replace('/', '-')}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            list(argv),
            env={**(environment or {}), **os.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(LOOK_S)
                record.put(name, {**_read(file), "under_way": True})
        finally:
            late = child.poll() is None
            end(child)
    found = {**_read(file), "whole_s": round(time.monotonic() - began, 1)}
    if late:
        found["cut_off"] = f"after {limit_s:.0f} s"
    elif child.returncode:
        found["failed"] = child.returncode
    if late or child.returncode:
        found["last_words"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    record.put(name, found)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that stayed in its group: by asking first."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_on_signal() -> None:
    """In a case: a SIGTERM runs what is in `finally` before the process ends."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def options_of(doc: str | None, names: Iterable[str], *, case_limit_s: float, wanted: Sequence[str] | None = None) -> Any:
    """A parser of what all such benchmarks take: a result file, which cases, limits; and which case to be, from `run_cases`."""
    names = list(names)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=names, default=list(wanted or names))
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole call")
    parser.add_argument("--case-limit-s", type=float, default=case_limit_s)
    parser.add_argument("--inside", choices=names, help=argparse.SUPPRESS)
    return parser


def python(script: str, *arguments: str) -> list[str]:
    """A script in this interpreter."""
    return [sys.executable, script, *arguments]
