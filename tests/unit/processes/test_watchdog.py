from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time

from parts.patience import PATIENCE_S
from polyturn.processes.watchdog import LoopWatchdog


async def test_a_loop_that_runs_is_left_alone():
    sentences: list[str] = []
    with LoopWatchdog(0.08, end=sentences.append):
        for _ in range(20):
            await asyncio.sleep(0.01)
    assert sentences == []


async def test_a_loop_that_stands_still_is_named_with_its_place():
    sentences: list[str] = []

    def blocking_tool() -> None:
        limit = time.monotonic() + 10
        while not sentences and time.monotonic() < limit:
            time.sleep(0.005)

    with LoopWatchdog(0.05, end=sentences.append):
        blocking_tool()
    assert len(sentences) == 1
    assert "stood still for 0.05 s" in sentences[0]
    assert "blocking_tool" in sentences[0]
    assert "test_watchdog.py" in sentences[0]


def test_by_default_it_ends_the_process_with_exit_code_3():
    program = textwrap.dedent("""
        import asyncio, time
        from polyturn.processes.watchdog import LoopWatchdog
        async def main():
            with LoopWatchdog(0.1):
                time.sleep(60)
        asyncio.run(main())
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 3
    assert run.stderr.startswith("polyturn: error: the event loop has stood still")
    assert "Traceback" not in run.stderr
