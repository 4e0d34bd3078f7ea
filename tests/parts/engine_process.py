"""An engine server in a process of its own: `python engine_process.py '{"seed": 2, ...}'` prints its URL and serves.

`fault` is what it does to itself at part `at` of a weight update: `kill`, `stop` (SIGSTOP: it hangs), `slow` (it sleeps).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

TOKEN = "a-token-for-tests"
SIZES = {"vocab_size": 24, "eos_id": 4, "pad_id": 0}


class EngineProcess:
    """Such a process, seen from a test. Ends with the block."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.process: subprocess.Popen[str]
        self.url = ""

    def __enter__(self) -> EngineProcess:
        self.begin(self.options)
        return self

    def begin(self, options: dict[str, Any]) -> None:
        words = [sys.executable, __file__, json.dumps(options)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the server did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def again(self, **options: Any) -> None:
        """Start anew on the same port, with the weights it began with."""
        self.kill()
        self.begin({"seed": self.options["seed"], "port": int(self.url.rpartition(":")[2]), **options})

    def __exit__(self, *error: object) -> None:
        self.kill()


async def serve(options: dict[str, Any]) -> None:
    from polyturn.engine.hf import HfEngine
    from polyturn.engine.server import EngineServer, serve_engine
    from polyturn.models.tiny import build_tiny

    class Faulty(HfEngine):
        parts = 0

        def load(self, update: Any, weights: Any) -> None:
            self.parts += 1
            if self.parts == options.get("at"):
                {
                    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                    "slow": lambda: time.sleep(3600),
                }[options["fault"]]()
            super().load(update, weights)

    engine = Faulty(build_tiny(seed=options["seed"], **SIZES))
    await serve_engine(EngineServer(engine, token=TOKEN, port=options.get("port", 0)), lambda url: print(url, flush=True))


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
