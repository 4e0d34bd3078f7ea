"""Bytes of a tensor, by hand; and the tables of docs/memory.md, which say the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from polyturn.config.memory import Held, adapter_parameters, frozen_tensor, per_parameter, trained_tensor

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
ROW = re.compile(r"^\| `(float32|bfloat16)` \| `(\w+)` \| `(\w+)` \| (yes|no) \|(.+)\|$", re.MULTILINE)


def test_a_float32_matrix_by_hand():
    placed = trained_tensor(1000, dtype="float32", optimizer="adamw", master_weights="none")
    assert placed.device == Held(weights=4000, gradients=4000, optimizer_state=8004)
    assert placed.cpu == Held()
    assert placed.device.total == 16004


@pytest.mark.parametrize(
    ("given", "device", "cpu"),
    [
        ({"master_weights": "float32"}, (2, 4, 4, 8), (0, 0, 0, 0)),
        ({"master_weights": "stochastic"}, (2, 2, 0, 8), (0, 0, 0, 0)),
        ({"master_weights": "none"}, (2, 2, 0, 4), (0, 0, 0, 0)),
        ({"master_weights": "none", "optimizer": "sgd"}, (2, 2, 0, 0), (0, 0, 0, 0)),
        ({"master_weights": "stochastic", "optimizer": "adamw_8bit"}, (2, 2, 0, 2.03125), (0, 0, 0, 0)),
        ({"master_weights": "float32", "offload": True}, (2, 0, 0, 0), (0, 6, 4, 8)),
        ({"master_weights": "none", "dtype": "float32", "offload": True}, (4, 0, 0, 0), (0, 8, 4, 8)),
    ],
)
def test_bytes_for_each_parameter(given, device, cpu):
    placed = per_parameter(**({"dtype": "bfloat16", "optimizer": "adamw"} | given))
    for held, (weights, gradients, master, state) in ((placed.device, device), (placed.cpu, cpu)):
        assert held == Held(weights=weights, gradients=gradients, master=master, optimizer_state=state)


def test_small_tensors_keep_whole_averages():
    def state(numel: int) -> float:
        return trained_tensor(numel, dtype="float32", optimizer="adamw_8bit", master_weights="none").device.optimizer_state

    assert state(4095) == 8 * 4095
    assert state(4096) == 2 * (4096 + 4 * 16)
    assert state(4097) == 2 * (4097 + 4 * 17), "a block that is begun has its scale"


def test_frozen_weights_by_hand():
    assert frozen_tensor(1000, dtype="bfloat16").device == Held(weights=2000)
    assert frozen_tensor(576 * 576, dtype="bfloat16", quantize="8bit", rows=576).device == Held(weights=576 * 576 + 4 * 576)
    four = frozen_tensor(576 * 576, dtype="bfloat16", quantize="4bit").device.weights
    assert four == 576 * 576 / 2 + 5184 + 4 * 21 + 4 * (16 + 256 + 1)
    assert frozen_tensor(1 << 30, dtype="bfloat16", quantize="4bit").device.weights / (1 << 30) == pytest.approx(
        0.51587, abs=1e-5
    )


def test_adapters_by_hand():
    assert adapter_parameters(576, 1536, 16) == 16 * 576 + 1536 * 16


def test_parts_add_up():
    one = trained_tensor(10, dtype="bfloat16", optimizer="sgd", master_weights="float32", offload=True)
    assert (one + one).device == Held(weights=40)
    assert (one + one).cpu == Held(gradients=120, master=80)


def test_the_page_says_the_same():
    """Every combination that a recipe may hold has its row, and no other."""
    rows = {match[:4]: match[4] for match in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    wanted = {}
    for dtype, masters, optimizer, offload in itertools.product(
        ("float32", "bfloat16"), ("none", "stochastic", "float32"), ("adamw", "adamw_8bit", "sgd"), ("no", "yes")
    ):
        half, away = dtype == "bfloat16", offload == "yes"
        if (not half and masters != "none") or (away and (optimizer == "adamw_8bit" or (half and masters != "float32"))):
            continue
        placed = per_parameter(dtype=dtype, optimizer=optimizer, master_weights=masters, offload=away)
        held = placed.device + placed.cpu
        cells = (held.weights, held.gradients, held.master, held.optimizer_state, placed.device.total, placed.cpu.total)
        wanted[dtype, masters, optimizer, offload] = " " + " | ".join(f"{round(cell, 2):g}" for cell in cells) + " "
    assert rows == wanted
