"""Which GPUs this machine has, without asking torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"

_SMI_S = 20.0
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")


def visible_gpus(environ: Mapping[str, str] = os.environ, *, root: Path = Path("/"), smi: str = "nvidia-smi") -> list[str]:
    """The GPUs that this process may use, named as in `CUDA_VISIBLE_DEVICES`, without asking torch."""
    if VISIBLE in environ:
        found: list[str] = []
        for name in environ[VISIBLE].split(","):
            if not _DEVICE.fullmatch(name.strip()):  # CUDA itself stops at the first name that is none, such as -1
                break
            found.append(name.strip())
        return found
    return [str(number) for number in range(_installed(root, smi))]


def _installed(root: Path, smi: str) -> int:
    """How many GPUs the driver has: by its own tool, else by what it shows in /proc or /dev."""
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        in_proc = root / "proc/driver/nvidia/gpus"
        if in_proc.is_dir():
            return len(list(in_proc.iterdir()))
        return len([path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    return len(re.findall(r"^GPU \d+:", listed, flags=re.MULTILINE))
