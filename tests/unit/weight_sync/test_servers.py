"""What a server says of itself before anything is sent to it."""

from __future__ import annotations

import pytest
import torch

from parts.vllm_stub import SharingStub
from polyturn.errors import WeightSyncError
from polyturn.processes.json_http import JsonClient
from polyturn.weight_sync.servers import WeightServer, refuse_shared_gpus


@pytest.mark.parametrize(("gpu", "workers", "found"), [(None, 1, ()), ("GPU-1", 1, ("GPU-1",)), ("GPU-2", 2, ("GPU-2",) * 2)])
async def test_where_a_server_s_workers_are(gpu, workers, found):
    server = SharingStub({"w": torch.ones(2)})
    server.gpu, server.workers = gpu, workers
    await server.start()
    client = JsonClient()
    try:
        assert (await WeightServer(server.url, client, limit_s=10.0).describe()).gpus == found
    finally:
        await client.close()
        await server.stop()


def test_nobody_meets_over_nccl_on_one_gpu():
    refuse_shared_gpus([("the trainer", ["a"]), ("http://h:1", ["b", "c"]), ("http://h:2", ()), ("http://h:3", ())])
    with pytest.raises(WeightSyncError, match=r"the trainer and http://h:1 are on one GPU \(a\), and NCCL takes a GPU"):
        refuse_shared_gpus([("the trainer", ["a"]), ("http://h:1", ["b", "a"])])
    with pytest.raises(WeightSyncError, match="http://h:1 and http://h:2 are on one GPU"):
        refuse_shared_gpus([("the trainer", ["a"]), ("http://h:1", ["b"]), ("http://h:2", ["b"])])
