"""Which bridge a run with vLLM servers gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parts.models import tiny_model
from parts.samples import trainer_settings
from polyturn.loop.vllm_parts import vllm_servers
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.nccl import NcclBridge
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge
from unit.loop.makers import make_recipe


@pytest.mark.parametrize(("mode", "kind"), [("nccl", NcclBridge), ("single_copy", SingleCopyServerBridge)])
async def test_the_bridge_is_the_one_of_the_mode(tmp_path, mode, kind):
    recipe = make_recipe(engine={"kind": "vllm_server"}, weight_sync={"mode": mode})
    role: Any = SimpleNamespace(peers={"engine": ("http://127.0.0.1:9",)}, token="t", folder=tmp_path)
    engine, bridge = vllm_servers(recipe, Trainer(tiny_model(), trainer_settings()), SimpleNamespace(role=role))
    assert type(bridge) is kind
    await bridge.hold(1)  # nothing is shared yet, so nobody is asked
    await bridge.close()
    await engine.stop()
