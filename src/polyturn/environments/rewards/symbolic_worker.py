"""The child process of `symbolic`: two expressions a line in, a verdict a line out, and an alarm against endless ones."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys

MEMORY_BYTES = 2 * 2**30


def equal(given: str, expected: str) -> bool:
    """Whether `math_verify` calls two expressions equal."""
    from math_verify import parse, verify

    # Its own time limits are off: ours ends the process, which also stops what no exception can.
    sides = [parse(f"${text.strip('$')}$", parsing_timeout=None, fallback_mode="no_fallback") for text in (expected, given)]
    return all(sides) and bool(verify(*sides, timeout_seconds=None))


def main() -> None:
    """Answer until the input ends; the first line written says that the library is loaded."""
    deadline_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    equal("1", "1")
    print("ready", flush=True)
    for line in sys.stdin:
        verdict = False
        signal.setitimer(signal.ITIMER_REAL, deadline_s)  # unhandled, the alarm kills
        with contextlib.suppress(Exception):
            verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
