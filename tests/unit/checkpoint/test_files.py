"""Files of a checkpoint: what comes back, what is refused, and that nothing else is ever unpickled."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from parts.models import tiny_model
from polyturn.checkpoint import files
from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split
from polyturn.errors import CheckpointError, ResourceError


def module(seed: int) -> dict[str, object]:
    model = tiny_model(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "optimizer_step": 1}


@pytest.fixture
def saved(tmp_path):
    """A folder with a policy and a critic."""
    state = {"modules": {"policy": module(0), "critic": module(1)}, "loop": {"step": 3}}
    tensors, rest = split(state)
    write_files(tmp_path, tensors, rest)
    return tmp_path, state


def test_two_modules_come_back_one_by_one_or_together(saved):
    folder, state = saved
    rest = read_rest(folder)
    for name in ("policy", "critic"):
        back = read_state(folder, rest["modules"][name])
        assert torch.equal(back["model"]["lm_head.weight"], state["modules"][name]["model"]["lm_head.weight"])
        model = tiny_model(seed=5)
        model.load_state_dict(back["model"])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(back["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.1
    whole = read_state(folder, rest)
    assert whole["loop"] == {"step": 3}
    assert whole["modules"].keys() == {"policy", "critic"}


@pytest.fixture
def many(monkeypatch):
    """Tensors that are worth four files."""
    monkeypatch.setattr(files, "_LEAST_BYTES", 1000)
    make = torch.Generator().manual_seed(0)
    sizes = (3, 500, 64, 900, 700, 1, 256, 800, 0)
    return {f"w.{place}": torch.randn(size, generator=make) for place, size in enumerate(sizes)} | {"n": torch.tensor(7)}


@pytest.mark.parametrize(("threads", "names"), [(1, ["__0_0.distcp"]), (4, [f"__0_{number}_0.distcp" for number in range(4)])])
def test_many_bytes_go_to_several_files(tmp_path, many, threads, names):
    write_files(tmp_path, many, {}, threads=threads)
    assert sorted(path.name for path in tmp_path.glob("*.distcp")) == names
    described = pickle.loads((tmp_path / ".metadata").read_bytes())
    held = Counter()
    for index, place in described.storage_data.items():
        held[place.relative_path] += many[index.fqn].nbytes
    assert max(held.values()) - min(held.values()) <= 3600, "as equal as the largest tensor allows"
    back = files.read_tensors(tmp_path)
    assert back.keys() == many.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in many.items())


def test_few_bytes_go_to_one_file_whoever_may_write(tmp_path, many, monkeypatch):
    monkeypatch.setattr(files, "_LEAST_BYTES", 1 << 20)
    write_files(tmp_path, many, {}, threads=4)
    assert [path.name for path in tmp_path.glob("*.distcp")] == ["__0_0.distcp"]


def test_a_file_that_can_t_be_written_is_an_error_whichever_it_is(tmp_path, many, monkeypatch):
    """Torch's own threads lose it, and the tensors of that file are missing without a word."""
    create = FileSystem.create_stream

    def full(self, path, mode):
        if str(path).endswith("__0_2_0.distcp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_files(tmp_path, many, {}, threads=4)
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (192, 4)])
def test_a_quarter_of_the_cores_writes(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert files.spare_threads() == threads


def test_tensors_are_filled_in_place(saved):
    folder, state = saved
    model = tiny_model(seed=7)
    into, _ = split({"modules": {"critic": {"model": model.state_dict()}}})
    read_state(folder, read_rest(folder)["modules"]["critic"]["model"], into)
    wanted = state["modules"]["critic"]["model"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("other", [torch.zeros(3, 5), torch.zeros(48, 32, dtype=torch.bfloat16)])
def test_another_shape_or_type_is_refused(saved, other):
    folder, _ = saved
    into = {"modules.policy.model.lm_head.weight": other}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is .* here and \(48, 32\) of torch\.float32 in"):
        read_state(folder, read_rest(folder)["modules"]["policy"]["model"], into)


def test_a_tensor_that_is_not_there_is_named(saved):
    with pytest.raises(CheckpointError, match=r"does not hold the tensor modules\.value\.model\.w"):
        read_state(saved[0], {"w": {"tensor": "modules.value.model.w"}})


def test_another_format_is_refused(saved):
    folder, _ = saved
    (folder / "state.json").write_text(json.dumps({"format": 99, "state": {}}))
    with pytest.raises(CheckpointError, match="has format 99"):
        read_rest(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kept", [0, 0.25, 0.5, 0.9])
def test_a_torn_file_is_an_error_and_never_loads_nothing(saved, name, kept):
    """The checksums find it first; this is what is left when somebody reads past them."""
    folder, _ = saved
    file = folder / name
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ResourceError, match="can't be read"):
        read_state(folder, read_rest(folder))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


def test_a_description_can_name_nothing_but_descriptions(saved, monkeypatch):
    folder, _ = saved
    monkeypatch.chdir(folder)
    for content in (pickle.dumps(Bomb()), pickle.dumps({"a": 1}), b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n(S'x'\ntR."):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(ResourceError, match=r"\.metadata can't be read"):
            read_state(folder, read_rest(folder))
    assert not (folder / "bomb").exists()


SIDE_BY_SIDE = """
import pathlib, sys, threading
import torch
from polyturn.checkpoint import files

torchs = files.save
first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

def save(state, **options):
    if "first" in state:
        first_is_in.set()
        assert second_is_in.wait(60.0)
    else:
        second_is_in.set()
        assert first_is_out.wait(60.0)
    return torchs(state, **options)

def write(name):
    folder = pathlib.Path(sys.argv[1], name)
    folder.mkdir()
    files.write_files(folder, {name: torch.ones(4)}, {})

files.save = save
first, second = (threading.Thread(target=write, args=(name,)) for name in ("first", "second"))
first.start()
assert first_is_in.wait(60.0)
second.start()
first.join()
first_is_out.set()
second.join()
"""


def test_saves_side_by_side_say_nothing(tmp_path):
    """Python's filters of warnings belong to the process: the first, which ends while the second is about to save, undid it."""
    ended = subprocess.run([sys.executable, "-c", SIDE_BY_SIDE, tmp_path], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(list(tmp_path.glob("*/state.json"))) == 2
