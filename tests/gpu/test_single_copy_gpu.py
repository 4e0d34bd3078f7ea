"""Weights of one GPU in two processes, by CUDA IPC: plain tensors, and a vLLM server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from parts.models import tiny_model
from parts.runs import child_environment
from parts.vllm_served import TOKEN, VllmServed, logprobs_of, needs_vllm
from polyturn.types import SamplingParams
from polyturn.weight_sync.base import checksum
from polyturn.weight_sync.shared_tensors import SharedTensors
from polyturn.weight_sync.single_copy import SharedModel
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
GPU = torch.device("cuda", 0)

OWNER = """
import json, sys, torch
from polyturn.weight_sync.base import checksum
from polyturn.weight_sync.shared_tensors import CudaBlock, SharedTensors, uuid_of
gpu = torch.device("cuda", 0)
fused, norm = torch.randn(96, 64, device=gpu), torch.randn(64, device=gpu).bfloat16()
tensors = {"q": fused[:64], "k": fused[64:], "norm": norm, "tied": norm}
storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
blocks = {begin: CudaBlock.of(storage) for begin, storage in storages.items()}
print(json.dumps(SharedTensors.of(tensors, blocks, uuid_of(gpu)).to_json()), flush=True)
for line in sys.stdin:
    torch.cuda.synchronize()
    print(json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}), flush=True)
"""


def test_another_process_trains_on_the_same_memory():
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert owner.stdin is not None
    assert owner.stdout is not None

    def theirs() -> dict[str, int]:
        owner.stdin.write("sums\n")
        owner.stdin.flush()
        return json.loads(owner.stdout.readline())

    try:
        opened = SharedTensors.from_json(json.loads(owner.stdout.readline())).open()
        assert {name: checksum(tensor) for name, tensor in opened.items()} == theirs()
        assert opened["tied"].data_ptr() == opened["norm"].data_ptr()
        before = theirs()
        parameter = torch.nn.Parameter(opened["q"])
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        (parameter @ torch.ones(64, device=GPU)).square().sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        after = theirs()
        assert {name for name in after if after[name] != before[name]} == {"q"}
        assert {name: checksum(tensor) for name, tensor in opened.items()} == after
        os.kill(owner.pid, signal.SIGKILL)
    finally:
        owner.kill()
        owner.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tiny_model(hidden_size=128).to(torch.bfloat16)
    made = VllmServed(
        tmp_path_factory.mktemp("single-copy-gpu"),
        weights=model,
        on_gpu=True,
        model={"dtype": "bfloat16"},
        engine={"kind": "vllm_server", "max_model_len": 256, "max_batch_size": 32, "devices": [0]},
        trainer={"devices": [0]},
        weight_sync={"mode": "single_copy"},
    )
    made.start()
    yield made
    made.stop()


@pytest.mark.skipif(any(mark.name == "skipif" and mark.args[0] for mark in needs_vllm), reason="vLLM is not installed here")
async def test_the_optimizers_step_is_the_push_on_a_gpu(server):
    model = tiny_model(hidden_size=128, seed=5).to(GPU, torch.bfloat16)
    engine = server.client()
    await engine.start()
    held = torch.cuda.memory_allocated()
    bridge = SingleCopyServerBridge(
        [server.url], SharedModel(model), verify_every=1, deadline_s=120, token=TOKEN, on_confirmed=engine.confirmed
    )
    for version in range(3):
        await bridge.hold(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        await bridge.push(version)  # its checksums are those of what vLLM's layers compute with
        completion = await engine.generate((1, 2, 3), SamplingParams(max_tokens=16, seed=version))
        gap = (logprobs_of(model, (1, 2, 3), completion.ids).cpu() - torch.tensor(completion.engine_logprobs)).abs().mean()
        assert float(gap) < 0.1
    assert torch.cuda.memory_allocated() < held, "the trainer's own copy is gone"
    await bridge.close()
    await engine.stop()
