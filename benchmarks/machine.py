"""What a result file says about where it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def describe_machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Device, versions of `packages`, date and commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("POLYTURN_COMMIT") or _commit(),
        "device": _device(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _commit() -> str:
    """Short hash of the checkout; a copy without its history names its commit in POLYTURN_COMMIT."""
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "src") else "")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=folder, timeout=30).stdout.strip()


def _device() -> str:
    """The GPUs where there are any, and the CPU."""
    import torch

    cpu = f"CPU, {len(os.sched_getaffinity(0))} cores, {_cpu_name()}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "; ".join([*gpus, cpu])


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
