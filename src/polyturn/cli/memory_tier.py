"""`polyturn memory-tier serve`: keep checkpoints of other machines in this one's memory."""

from __future__ import annotations

import argparse
from typing import Any

TOKEN = "POLYTURN_MEMORY_TIER_TOKEN"


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "memory-tier", help="keep checkpoints of other machines in memory", description="Serve this machine's memory as a tier."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve",
        help="serve until it is stopped",
        description=f"Serve this machine's memory as a tier of checkpoints. Requests must bring the token in {TOKEN}.",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to serve on (default 127.0.0.1: this machine only)")
    serve.add_argument("--port", type=int, default=9300, help="port (default 9300; 0 takes a free one)")
    serve.add_argument("--root", metavar="DIR", help="folder of the files (default /dev/shm/polyturn-memory-tier-PORT)")
    serve.add_argument("--capacity-gib", metavar="X", type=float, required=True, help="most memory that files may take")
    serve.add_argument(
        "--hyperpod", action="store_true", help="speak HyperPod's protocol too, which knows no token: for closed networks"
    )
    serve.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; exit 0."""
    import asyncio
    import os
    from pathlib import Path

    from polyturn.errors import ConfigError
    from polyturn.storage.memory_tier.server import MemoryTierServer

    if not 0 <= args.port < 65536 or not 0 < args.capacity_gib < 1e6:
        raise ConfigError(f"--port={args.port} --capacity-gib={args.capacity_gib:g}; give a port and a size above 0")
    server = MemoryTierServer(
        Path(args.root or f"/dev/shm/polyturn-memory-tier-{args.port}"),
        token=os.environ.get(TOKEN, ""),
        capacity_bytes=int(args.capacity_gib * 2**30),
        host=args.host,
        port=args.port,
        hyperpod=args.hyperpod,
    )
    asyncio.run(_serve(server))
    return 0


async def _serve(server: Any) -> None:
    import asyncio
    import signal

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    try:
        where = "reachable from other machines" if server.is_open else "this machine only"
        print(f"memory tier: memory-tier://{server.url} ({where}), files in {server.store.root}", flush=True)
        await stop.wait()
    finally:
        await server.stop()
