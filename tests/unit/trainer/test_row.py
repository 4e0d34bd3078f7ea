"""Rows come to the device one by one."""

from __future__ import annotations

import numpy as np
import torch

from parts.samples import packed, random_samples
from polyturn.trainer.device import to_device
from polyturn.trainer.row import RowsOnDemand, RowTensors, to_tensors

CPU = torch.device("cpu")


def test_a_row_is_brought_once_and_when_it_is_asked_for():
    packed_rows = packed(random_samples(count=9), row_tokens=30).rows
    brought: list[int] = []

    def bring(row) -> RowTensors:
        brought.append(len(row.input_ids))
        return to_tensors(row, CPU)

    rows = RowsOnDemand(packed_rows, bring)
    lengths = [len(row.input_ids) for row in packed_rows]
    assert len(rows) == len(packed_rows) > 2
    assert brought == []
    for number, row in enumerate(rows):
        assert brought == lengths[: number + 1]
        assert row is rows[number]
        assert row.input_ids_T.tolist() == packed_rows[number].input_ids.tolist()
    assert rows[-1] is rows[len(rows) - 1]
    assert rows[:2] == [rows[0], rows[1]]
    assert brought == lengths


def test_values_that_lie_backwards_come_in_order():
    values = np.arange(10)[::-2]
    assert to_device(values, CPU).tolist() == [9, 7, 5, 3, 1]
