"""The GPUs of this machine, as their driver reports them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.errors import ModelError
from polyturn.plan.hardware import Gpu, Machine, load_hardware
from polyturn.plan.models import ModelFacts, model_facts
from polyturn.processes.gpus import visible_gpus

_SMI_S = 20.0
_QUERY = ("--query-gpu=index,uuid,name,memory.total,memory.reserved", "--format=csv,noheader,nounits")
_NEAR = 0.12
"""How far a card's memory may be from its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The GPUs that this process may use, or why nothing is known of them."""

    machine: Machine | None = None
    reason: str = ""


def gpus_here(visible: Sequence[str], *, smi: str = "nvidia-smi") -> Here:
    """What the driver says about the GPUs of `visible_gpus`; the one with the least memory stands for all."""
    try:
        done = subprocess.run([smi, *_QUERY], capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Here(reason=f"the driver's tool nvidia-smi does not answer ({type(error).__name__})")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    found = []
    for index, uuid, name, total, reserved in (row for row in rows if len(row) == 5):
        named = any(word == index or (word.startswith("GPU-") and uuid.startswith(word)) for word in visible)
        if named and re.fullmatch(r"\d+", total):
            held_back = int(reserved) if re.fullmatch(r"\d+", reserved) else 0
            found.append((int(total) - held_back, name, int(total)))
    if len(found) != len(visible):
        return Here(reason=f"nvidia-smi tells the memory of {len(found)} of the {len(visible)} GPUs that may be used")
    usable_mib, kind, total_mib = min(found)
    return Here(machine=_machine(kind, total_mib, usable_mib, len(visible)))


def known_here(recipe: Recipe, *, smi: str = "nvidia-smi") -> tuple[Machine, ModelFacts] | None:
    """The GPUs that this process may use, and the recipe's model; None where there are none, or either is not known."""
    visible = visible_gpus(smi=smi) if recipe.trainer.device != "cpu" else []
    machine = gpus_here(visible, smi=smi).machine if visible else None
    if machine is None:
        return None
    try:
        return machine, model_facts(recipe.model.path)
    except ModelError:
        return None


def _machine(name: str, total_mib: int, usable_mib: int, count: int) -> Machine:
    """As many GPUs of the kind that goes by the driver's name, with the memory that it reports."""
    gpu = Gpu(label_gib=total_mib / 1024, usable_mib=usable_mib, bf16_tflops=1, bandwidth_gb_s=1)  # whose speeds nobody reads
    kind = known_kind(name, total_mib)
    if kind is not None:
        gpu = load_hardware().gpu(kind).model_copy(update={"usable_mib": float(usable_mib), "usable_from": "measured"})
    return Machine(name="this machine", gpu_name=kind or name, gpu=gpu, count=count, ram_bytes=_ram())


def _ram() -> float | None:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError):
        return None


def known_kind(name: str, total_mib: float) -> str | None:
    """The name in `hardware.yaml` of a GPU that its driver calls `name`; None when there is none.

    >>> known_kind("NVIDIA A100-SXM4-40GB", 40960)
    'a100-40gb'
    >>> known_kind("NVIDIA H100 80GB HBM3", 81559)
    'h100-80gb'
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    for kind, gpu in load_hardware().gpus.items():
        own = {word for word in kind.split("-") if not word.endswith("gb")}
        if own <= words and abs(total_mib / 1024 - gpu.label_gib) <= _NEAR * gpu.label_gib:
            return kind
    return None
