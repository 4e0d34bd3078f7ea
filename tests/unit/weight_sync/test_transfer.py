"""Buckets and what describes them: both sides cut alike, every bit arrives, nothing senseless is taken."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parts.patience import PATIENCE_S
from polyturn.errors import WeightSyncError
from polyturn.weight_sync.base import WholeWeights, checksum
from polyturn.weight_sync.transfer import (
    InitInfo,
    TransferError,
    TransferGroup,
    UpdateInfo,
    buckets,
    listen,
    num_bytes,
    pack,
    receive,
    send,
    unpack,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensor_sets(draw, most=8):
    found = {}
    for place in range(draw(st.integers(1, most))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        seed = draw(st.integers(0, 10**6))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
        found[f"layer.{place}"] = values.to(draw(st.sampled_from(DTYPES)))
    return found


@settings(max_examples=150)
@given(tensor_sets(), st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_and_close_when_full(tensors, size):
    cut = list(buckets(tensors, size))
    assert [name for names in cut for name in names] == list(tensors)
    for names in cut[:-1]:
        held = [num_bytes(tensors[name]) for name in names]
        assert sum(held) > size >= sum(held[:-1])
    described = UpdateInfo.from_json(json.loads(json.dumps(UpdateInfo.of(tensors).to_json()))).tensors()
    assert list(buckets(described, size)) == cut, "the other side knows names, types and shapes only"


@settings(max_examples=150)
@given(tensor_sets())
def test_what_is_packed_comes_out_to_the_bit(tensors):
    bucket = pack(list(tensors.values()), torch.device("cpu"))
    assert len(bucket) == sum(map(num_bytes, tensors.values()))
    found = unpack(bucket, UpdateInfo.of(tensors).tensors())
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert checksum(found[name]) == checksum(tensor)


def test_packing_reads_values_and_not_how_they_lie():
    tensor = torch.arange(12.0).reshape(3, 4)
    (found,) = unpack(pack([tensor.t()], torch.device("cpu")), {"t": tensor.t()}).values()
    assert torch.equal(found, tensor.t())


GOOD = {"master_address": "127.0.0.1", "master_port": 8000, "rank_offset": 1, "world_size": 2}


def test_init_info_travels_as_json():
    info = InitInfo(**GOOD, backend="gloo", timeout_s=5.0, packed_buffer_size_bytes=100)
    assert InitInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    assert InitInfo.from_json(GOOD).packed_buffer_size_bytes == 64 << 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"master_port": None}, "positive numbers"),
        ({"master_port": 0}, "positive numbers"),
        ({"master_port": 70_000}, "port 70000"),
        ({"master_port": True}, "positive numbers"),
        ({"master_address": 5}, "needs an address"),
        ({"rank_offset": 2}, "rank 2 of 2"),
        ({"world_size": 1}, "rank 1 of 1"),
        ({"packed": False}, "packed"),
        ({"backend": "mpi"}, "gloo or nccl"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"nccl_unique_id_b64": "x"}, "'nccl_unique_id_b64' is not known"),
    ],
)
def test_init_info_without_sense_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        InitInfo.from_json({**GOOD, **change})


@pytest.mark.parametrize("given_json", [None, [], "text", {}, {"master_address": "127.0.0.1"}])
def test_what_is_no_init_info(given_json):
    with pytest.raises(ValueError, match=r"object is needed|missing"):
        InitInfo.from_json(given_json)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["a"]}, "lists of one length"),
        ({"names": "ab"}, "lists of one length"),
        ({"names": ["a", "a"]}, "each once"),
        ({"names": ["a", 1]}, "each once"),
        ({"dtype_names": ["float32", "load"]}, "b has the type 'load'"),
        ({"dtype_names": ["float32", "no_type"]}, "b has the type 'no_type'"),
        ({"dtype_names": ["float32", 1]}, "b has the type 1"),
        ({"shapes": [[2], [-1]]}, r"b has the shape \[-1\]"),
        ({"shapes": [[2], 3]}, "b has the shape 3"),
        ({"shapes": [[2], [2.0]]}, "b has the shape"),
        ({"bytes": 3}, "'bytes' is not known"),
    ],
)
def test_update_info_without_sense_is_refused(change, said):
    good = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2], [3, 1]]}
    with pytest.raises(ValueError, match=said):
        UpdateInfo.from_json({**good, **change})


# ── over a group ───────────────────────────────────────────────────────────────────────────────────────────────────────


def groups(size: int, timeout_s: float = 30.0) -> list[TransferGroup]:
    """The members of a gloo group, joined in threads of this process."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    joined: dict[int, TransferGroup] = {}

    def join(rank: int) -> None:
        info = InitInfo(
            master_address="127.0.0.1", master_port=port, rank_offset=max(1, rank), world_size=size, timeout_s=timeout_s
        )
        joined[rank] = TransferGroup(info, torch.device("cpu"), listener=listener if rank == 0 else None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [joined[rank] for rank in range(size)]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(50, 8, generator=generator),
        "flags": torch.tensor([1, 0, 1], dtype=torch.uint8),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "nothing": torch.zeros(0, 4),
        "norm": torch.randn(33, generator=generator),
    }


def until() -> float:
    return time.monotonic() + 30.0


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
async def test_every_member_receives_every_bit(bucket_bytes):
    tensors = weights()
    shapes = {**UpdateInfo.of(tensors).tensors(), "norm": torch.empty(33, dtype=torch.float16, device="meta")}
    sender, *receivers = groups(3)
    got: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
    threads = []
    for group, found in zip(receivers, got, strict=True):

        def load(part, found=found):
            found.update({name: tensor.clone() for name, tensor in part.items()})

        arguments = {"bucket_bytes": bucket_bytes, "until": until()}
        threads.append(threading.Thread(target=receive, args=(group, shapes, load), kwargs=arguments))
        threads[-1].start()
    sums: dict[str, int] = {}
    said: list[str] = []
    source = WholeWeights(lambda: tensors)
    send(sender, source, shapes, bucket_bytes=bucket_bytes, until=until(), say=said.append, sums=sums)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert said[0] == "embed"
    for found in got:
        assert list(found) == list(tensors)
        assert {name: checksum(tensor) for name, tensor in found.items()} == sums
        assert torch.equal(found["norm"], tensors["norm"].to(torch.float16))
    for group in (sender, *receivers):
        await group.leave()


async def test_a_member_that_leaves_fails_whoever_waits_for_it():
    sender, receiver = groups(2)
    failures = []

    def receiving():
        try:
            receive(receiver, UpdateInfo.of(weights()).tensors(), lambda part: None, bucket_bytes=9, until=until())
        except TransferError as error:
            failures.append(str(error))

    thread = threading.Thread(target=receiving)
    thread.start()
    await asyncio.sleep(0.05)
    await sender.leave()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    assert len(failures) == 1
    await receiver.leave()


async def test_a_member_that_is_silent_is_not_waited_for_past_the_limit():
    sender, receiver = groups(2)
    started = time.monotonic()
    with pytest.raises(TransferError):
        receive(receiver, UpdateInfo.of(weights()).tensors(), lambda part: None, bucket_bytes=9, until=started + 0.3)
    await receiver.leave()
    await sender.leave()


def test_nobody_comes():
    listener = listen("127.0.0.1")
    info = InitInfo(**{**GOOD, "master_port": listener.getsockname()[1], "timeout_s": 0.3})
    with pytest.raises(TransferError, match=r"the weight transfer group at 127\.0\.0\.1:\d+ was not joined: [^\n]+$"):
        TransferGroup(info, torch.device("cpu"), listener=listener)


def test_an_address_that_is_not_ours():
    with pytest.raises(WeightSyncError, match=r"can't listen on 192\.0\.2\.1"):
        listen("192.0.2.1")
