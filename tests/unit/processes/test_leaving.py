"""The end of a process that has daemon threads in native code."""

from __future__ import annotations

import pytest

from parts.runs import run_python

NATIVE = """
import atexit, datetime, sys, threading, time
import torch

store = torch.distributed.TCPStore("127.0.0.1", 0, None, True)
started = threading.Event()

def count():
    while True:
        store.add("rank", 1)
        started.set()

for _ in range(4):
    threading.Thread(target=count, daemon=True).start()
started.wait(60)
slow = threading.Thread(target=lambda: (time.sleep(0.2), print("slow is done")))
slow.start()
atexit.register(print, "registered")
print("worked")
from polyturn.processes.leaving import leave
leave(3)
"""


@pytest.mark.real
def test_threads_in_native_code_do_not_abort_a_process_that_is_done():
    for _ in range(3):
        ended = run_python(NATIVE, timeout_s=120)
        assert (ended.code, ended.err) == (3, "")
        assert ended.out.split("\n") == ["worked", "slow is done", "registered", ""]


GIVEN_UP = """
import asyncio, atexit, time
from polyturn.processes.threads import in_thread_within
from polyturn.processes.leaving import leave

async def main():
    try:
        await in_thread_within(0.05, "a call", time.sleep, 3600)
    except Exception as error:
        print(error)

asyncio.run(main())
atexit.register(time.sleep, 3600)
leave(4)
"""


def test_what_was_given_up_on_holds_up_nobody():
    ended = run_python(GIVEN_UP, timeout_s=60)
    assert (ended.code, ended.err) == (4, "")
    assert ended.out.startswith("waited 0.05 s for a call")
