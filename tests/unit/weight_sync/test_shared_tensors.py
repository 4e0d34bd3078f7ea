"""Tensors of two processes: what travels, what is refused, and that nothing is left of a process that was killed."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import WeightSyncError
from polyturn.weight_sync import shared_tensors
from polyturn.weight_sync.shared_tensors import CudaBlock, SharedTensors, TensorPlace, move_to_shared_memory

needs_linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's")
pytestmark = needs_linux


def shared_model():
    """A model with tied weights, a fused one and two types, moved; its tensors by name; and where they are."""
    fused, embed, half = torch.randn(6, 3), torch.randn(5, 3), torch.randn(7).bfloat16()
    parameters = [fused, embed, half]
    wanted = [tensor.clone() for tensor in parameters]
    block, memory = move_to_shared_memory(parameters)
    assert all(torch.equal(*pair) for pair in zip(parameters, wanted, strict=True))
    tensors = {"q": fused[:4], "k": fused[4:], "embed": embed[:4], "head": embed[:4], "norm": half, "turned": embed.t()}
    told = SharedTensors.of(tensors, {memory.untyped_storage().data_ptr(): block}, None)
    return tensors, SharedTensors.from_json(json.loads(json.dumps(told.to_json())))


def test_what_is_opened_is_the_same_memory():
    tensors, told = shared_model()
    opened = told.open()
    for name, tensor in tensors.items():
        assert (opened[name].dtype, opened[name].stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(opened[name], tensor)
    opened["q"].fill_(3.0)
    assert tensors["q"].eq(3).all()
    assert not tensors["k"].eq(3).any()
    assert opened["head"].data_ptr() == opened["embed"].data_ptr()


def test_parameters_that_shared_a_storage_share_it_after():
    whole = torch.arange(12.0)
    first, second = whole[:6].view(2, 3), whole[6:]
    move_to_shared_memory([first, second])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([first.flatten(), second]), whole)


def in_a_child(work) -> int:
    """Run `work` in a fork. Returns its process id; it has ended with code 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_another_process_writes_into_it():
    tensors, told = shared_model()
    pid = in_a_child(lambda: told.open()["norm"].fill_(2.0))
    os.waitpid(pid, 0)
    assert tensors["norm"].eq(2).all()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("killed", ["who shares", "who opened"])
def test_nothing_is_left_of_who_was_killed(killed):
    reading, writing = os.pipe()

    def share() -> None:
        told = shared_model()[1] if killed == "who shares" else given_told
        if killed == "who opened":
            held = told.open()
            assert held
        os.write(writing, json.dumps(told.to_json()).encode())
        signal.pause()

    if killed == "who opened":
        tensors, given_told = shared_model()
    child = in_a_child(share)
    told = SharedTensors.from_json(json.loads(os.read(reading, 1 << 16)))
    if killed == "who shares":
        tensors = told.open()
    kept = tensors["q"].clone()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert torch.equal(tensors["q"], kept), "who is left goes on"
    (block,) = told.blocks
    assert not [path for path in Path("/dev/shm").iterdir() if block.name in path.name]
    if killed == "who shares":
        with pytest.raises(WeightSyncError, match=r"can't be opened at /proc/\d+/fd/\d+ \(No such file or directory\)"):
            told.open()
    os.close(reading)
    os.close(writing)


def test_another_descriptor_by_that_number_is_not_taken(tmp_path):
    _, told = shared_model()
    (block,) = told.blocks
    with (tmp_path / "other").open("w+") as file:
        for wrong, said in (
            (replace(block, descriptor=file.fileno()), "is not the engine's weights"),
            (replace(block, name="polyturn-of-another"), "is not the engine's weights"),
            (replace(block, num_bytes=block.num_bytes - 64), "does not have the"),
        ):
            with pytest.raises(WeightSyncError, match=said):
                wrong.open()


def test_memory_that_can_not_be_had_is_said(monkeypatch):
    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.ones(4)
    with pytest.raises(WeightSyncError, match=r"64 bytes of shared memory can't be had \(No space left on device\)"):
        move_to_shared_memory([tensor])
    assert tensor.eq(1).all()


# ── what travels ───────────────────────────────────────────────────────────────────────────────────────────────────────

words = st.text(max_size=8)
numbers = st.integers(-2, 1 << 63)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(words, some, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["identity", "gpu", "blocks", "places"]), anything) | anything)
def test_what_is_no_such_thing_is_refused_in_a_sentence(told):
    with pytest.raises(WeightSyncError, match="in a way that can't be read"):
        SharedTensors.from_json({"gpu": None} | told | {"identity": 3} if isinstance(told, dict) else told)


@settings(max_examples=40)
@given(st.sampled_from(["block", "shape", "stride", "offset", "dtype"]), anything)
def test_a_place_that_is_wrong_is_refused_or_within_its_block(key, value):
    good = {"block": 0, "dtype": "float32", "shape": [2, 3], "stride": [3, 1], "offset": 4} | {key: value}
    block = {"pid": 1, "descriptor": 3, "name": "polyturn-x", "num_bytes": 64}
    try:
        told = SharedTensors.from_json({"identity": "i", "gpu": None, "blocks": [block], "places": {"w": good}})
    except WeightSyncError:
        return
    assert told.places["w"].end <= 64


def test_how_far_a_tensor_reaches():
    place = TensorPlace(block=0, dtype="bfloat16", shape=(2, 3), stride=(10, 2), offset=5)
    assert place.end == 2 * (5 + 10 + 4 + 1)
    assert replace(place, shape=(2, 0)).end == 0
    assert replace(place, shape=(), stride=()).end == 12


# ── handles of GPUs, without one ───────────────────────────────────────────────────────────────────────────────────────


def test_a_cuda_handle_travels_as_text_and_comes_out_as_it_was(monkeypatch):
    raw = {7: b"\x00handle\xff", 8: 4096, 9: 512, 11: b"counter\x80", 12: 3, 13: b"event", 14: True}
    arguments = [raw.get(place) for place in range(15)]
    given_back = []
    monkeypatch.setattr(shared_tensors.reductions, "reduce_tensor", lambda tensor: (None, tuple(arguments)))
    monkeypatch.setattr(
        shared_tensors.reductions,
        "rebuild_cuda_tensor",
        lambda *args: given_back.append(args) or torch.zeros(4096, dtype=torch.uint8),
    )
    monkeypatch.setattr(shared_tensors, "uuid_of", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    block = CudaBlock.of(torch.zeros(1024).untyped_storage())
    place = TensorPlace(block=0, dtype="float32", shape=(8, 4), stride=(4, 1), offset=2)
    told = SharedTensors(identity="i", gpu="GPU-2", blocks=(block,), places={"w": place})
    (opened,) = SharedTensors.from_json(json.loads(json.dumps(told.to_json()))).open().values()
    assert opened.shape == (8, 4)
    (args,) = given_back
    assert args[6] == 2, "the GPU's number in this process"
    assert {number: args[number] for number in raw} == raw
    with pytest.raises(WeightSyncError, match="on the GPU GPU-7, which the trainer does not see"):
        replace(told, gpu="GPU-7").open()


def test_a_handle_that_cuda_refuses_is_a_sentence(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("CUDA error: invalid device context\nand a stack")

    monkeypatch.setattr(shared_tensors.reductions, "rebuild_cuda_tensor", refuse)
    block = CudaBlock(handle="", num_bytes=4, offset=0, counter="", counter_offset=0, event="", waits=False)
    with pytest.raises(WeightSyncError, match=r"can't be opened on cuda:0 \(CUDA error: invalid device context\)"):
        block.open(torch.device("cuda", 0))


def test_what_this_page_says_of_torch_is_so():
    """Handles are read by their places among the arguments of a function of torch."""
    import inspect

    names = list(inspect.signature(shared_tensors.reductions.rebuild_cuda_tensor).parameters)
    here = {7: "storage_handle", 8: "storage_size_bytes", 9: "storage_offset_bytes", 11: "ref_counter_handle"}
    here |= {6: "storage_device", 12: "ref_counter_offset", 13: "event_handle", 14: "event_sync_required"}
    assert {number: names[number] for number in here} == here
    assert Path("/proc/self/fd").is_dir()
