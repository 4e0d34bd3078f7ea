"""Shards, cut rows and shared beginnings on GPUs: two ranks over NCCL, and kernels against plain masks."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys

import pytest
import torch

from numerics.test_shared_prefixes import ALWAYS, everything
from parts.models import gradients, tiny_model
from parts.runs import child_environment
from parts.samples import on_policy, packed, random_samples, trainer_settings
from parts.shard_scenes import ON_GPUS
from polyturn.trainer.attention import VARLEN, use_attention
from polyturn.trainer.context import Context, own_part
from polyturn.trainer.context_attention import by_samples, masked
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.pack import pack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_beginnings_in_the_kernel(compiled: bool):
    # Heads of 32: the kernels take no smaller ones.
    plain = tiny_model(hidden_size=128)
    samples = on_policy(everything(), plain, gap=0.3)
    separate, shared = (pack(samples, row_tokens=400, planned_trajectories=12, sharing=how) for how in (None, ALWAYS))
    assert shared.num_shared_tokens > 60

    def gradient(model: torch.nn.Module, batch) -> torch.Tensor:
        Trainer(model, trainer_settings(compiled=compiled)).forward_backward(batch)
        return torch.cat([found.float().flatten() for found in gradients(model).values()])

    exact = gradient(copy.deepcopy(plain).to(GPU), separate)
    found = []
    for batch in (separate, shared):
        half = copy.deepcopy(plain).to(GPU).bfloat16()
        use_attention(half, "auto")
        assert half.config._attn_implementation == VARLEN
        found.append(gradient(half, batch))
    far = [float((one - exact).norm() / exact.norm()) for one in found]
    assert far[1] < max(1.5 * far[0], 0.02), "no farther from float32 than separate samples"


@pytest.mark.parametrize(("tree", "window"), [(False, None), (False, 6), (True, None)])
def test_a_rank_s_chunks_in_the_kernel_and_with_a_mask(tree: bool, window: int | None):
    """The kernel must align the ends of fewer queries and more keys."""
    row = packed(random_samples(count=8), row_tokens=200).rows[0]
    if tree:
        row = pack(everything(), row_tokens=400, planned_trajectories=12, sharing=ALWAYS).rows[0]
    for size in (1, 2, 4):
        for number in range(size):
            part = own_part(row, GPU, Context(None, size, number)).part
            torch.manual_seed(number)
            query = torch.randn(1, 4, len(part.own_t), 32, device=GPU, requires_grad=True)
            key, value = (torch.randn(1, 2, len(part.segment_T), 32, device=GPU, requires_grad=True) for _ in range(2))
            module = torch.nn.Module()
            module.num_key_value_groups = 2
            found = []
            for attend, dtype in ((masked, torch.float32), (by_samples, torch.bfloat16)):
                states = [tensor.to(dtype) for tensor in (query, key, value)]
                out = attend(module, *states, part, 0.2, window).float()
                found.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
            for exact, ours in zip(*found, strict=True):
                assert float((exact - ours).norm() / exact.norm()) < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", ON_GPUS, ids=" ".join)
def test_two_ranks_over_nccl(words: tuple[str, ...]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "POLYTURN_TEST_DEVICE": "cuda"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "parts.shard_scenes", *words],
            env=child_environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    found = json.loads(said[0].strip().splitlines()[-1])
    if words[0] == "resumed":
        assert all(mode["equal"] for mode in found.values()), found
    elif words[0] == "together":
        assert len(found) >= 3
        assert all(found.values()), found
    else:
        wrong = {name: gaps for name, gaps in found.items() if max(gaps.values()) > (5e-2 if "bfloat16" in name else 1e-4)}
        assert not wrong
