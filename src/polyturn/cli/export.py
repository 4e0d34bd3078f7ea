"""`polyturn export RUN [--step N] --out DIR`."""

from __future__ import annotations

import argparse
from typing import Any


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "export",
        help="write the model of a checkpoint as transformers loads it",
        description="Write the model of a run's checkpoint as an ordinary transformers folder, or its adapters as PEFT's.",
    )
    parser.add_argument("folder", metavar="RUN", help="the run folder, such as runs/quickstart")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint; the newest when left out")
    parser.add_argument("--out", metavar="DIR", required=True, help="the new folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export."""
    import asyncio
    from functools import partial
    from pathlib import Path

    from polyturn.cli.out import new_path, refuse_unwritable
    from polyturn.loop.build import quiet_libraries
    from polyturn.loop.export import export_checkpoint
    from polyturn.metrics.run_folder import RunFolder

    out = new_path(args.out, "folder")
    refuse_unwritable(out, "folder")
    quiet_libraries()
    folder = RunFolder(Path(args.folder).resolve())
    step = asyncio.run(export_checkpoint(folder, args.step, out, partial(print, flush=True)))
    print(f"exported model of step {step}: {out}")
    return 0
