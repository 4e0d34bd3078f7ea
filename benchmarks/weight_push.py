"""Seconds of a weight push to engine servers in processes of their own, by the nccl bridge over gloo on CPUs.

    python benchmarks/weight_push.py [--servers 1 2] [--pushes 10]

Two models with random weights: `builtin:tiny`, and one of the shape of SmolLM2-135M (float32). A push counts from the call to
the confirmed version: pause, update, finish, confirm, resume. Verified pushes compare the checksums of all tensors, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from machine import describe_machine
from transformers import LlamaConfig, LlamaForCausalLM

from polyturn.engine.hf import HfEngine
from polyturn.engine.server import EngineServer, serve_engine
from polyturn.models.tiny import build_tiny
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.nccl import NcclBridge

TOKEN = "a-token-for-a-benchmark"


def model_of(name: str, seed: int) -> Any:
    if name == "tiny":
        return build_tiny(vocab_size=64, eos_id=4, pad_id=0, seed=seed)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def measure(name: str, num_servers: int, pushes: int) -> dict[str, Any]:
    """A row of the result: median seconds of the first push to a server, of later ones, and of later ones with checksums."""
    words = [sys.executable, __file__, "--serve", name]
    servers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(num_servers)]
    try:
        urls = [server.stdout.readline().strip() for server in servers if server.stdout is not None]
        model = model_of(name, 1)
        seconds = asyncio.run(push_all(model, urls, pushes))
    finally:
        for server in servers:
            server.kill()
            server.wait()
    tensors = model.state_dict().values()
    return {
        "model": name,
        "servers": num_servers,
        "megabytes": round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6, 1),
        **{f"{kind}_push_s": round(statistics.median(values), 4) for kind, values in seconds.items()},
    }


async def push_all(model: Any, urls: Sequence[str], pushes: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"first": [], "plain": [], "verified": []}
    for verify_every, kind in ((10**9, "plain"), (1, "verified")):
        bridge = NcclBridge(urls, WholeWeights(model.state_dict), verify_every=verify_every, deadline_s=300, token=TOKEN)
        for push in range(pushes):
            start = time.perf_counter()
            await bridge.push(push)
            seconds["first" if push == 0 else kind].append(time.perf_counter() - start)
        await bridge.close()
    return seconds


async def serve(name: str) -> None:
    await serve_engine(EngineServer(HfEngine(model_of(name, 2)), token=TOKEN), lambda url: print(url, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pushes", type=int, default=10)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    rows = [measure(name, count, options.pushes) for name in ("tiny", "smollm2-shaped") for count in options.servers]
    print(json.dumps({**describe_machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
