"""`python -m parts.environment_process environment-0 module:Class LOOP_LIMIT_S`: the role that plays an environment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from polyturn.environments.registry import build_environment
from polyturn.environments.remote.role import serve_environment
from polyturn.processes.role import Role


async def main(name: str, environment_id: str, loop_limit_s: str) -> None:
    environment = build_environment(environment_id, {"instructions": False} if environment_id == "lookup" else {})
    role = Role.from_environment(name)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with role.heartbeat() as heartbeat:
        await environment.start()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serve_environment(role, environment, heartbeat, loop_limit_s=float(loop_limit_s))
        finally:
            await environment.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")], "this role needs no torch"
