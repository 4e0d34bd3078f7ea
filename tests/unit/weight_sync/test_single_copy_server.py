"""One copy of the weights for two processes: what is asked of the server, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from parts.vllm_stub import SharingStub, hang, module_of
from polyturn.errors import DeadlineError, WeightMismatchError, WeightSyncError
from polyturn.weight_sync.single_copy import SharedModel
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge


def tensors(seed=0):
    make = torch.Generator().manual_seed(seed)
    return {"embed": torch.randn(6, 4, generator=make), "layer.q": torch.randn(4, 4, generator=make), "norm": torch.ones(4)}


class Scene:
    def __init__(self, server):
        self.server = server
        self.model = module_of(tensors(1))
        self.made = []

    def bridge(self, model=None, **options):
        usual = {"verify_every": 1, "deadline_s": 30.0}
        self.made.append(SingleCopyServerBridge([self.server.url], SharedModel(model or self.model), **(usual | options)))
        return self.made[-1]


@pytest.fixture
async def scene():
    server = SharingStub(tensors())
    await server.start()
    made = Scene(server)
    yield made
    for bridge in made.made:
        await bridge.close()
    await server.stop()


async def test_the_first_push_makes_the_parameters_the_servers_tensors(scene):
    wanted = {name: tensor.clone() for name, tensor in scene.model.state_dict().items()}
    await scene.bridge().push(0)
    assert scene.server.asked == [
        *("polyturn_describe", "/pause", "polyturn_settle", "polyturn_share", "polyturn_stamp", "/update_weight_version"),
        *("polyturn_state", "polyturn_describe", "polyturn_checksums", "/reset_prefix_cache", "/resume"),
    ]
    for name, parameter in scene.model.named_parameters():
        assert torch.equal(parameter, wanted[name])
        assert torch.equal(scene.server.tensors[name], wanted[name])
        parameter.add_(1)
        assert torch.equal(scene.server.tensors[name], wanted[name] + 1), "they are the same numbers"


async def test_nobody_is_answered_from_a_hold_to_the_push(scene):
    bridge = scene.bridge(verify_every=100)
    await bridge.push(0)
    assert not scene.server.paused
    scene.server.asked.clear()
    await bridge.hold(1)
    assert scene.server.paused
    scene.model.layer.q.add_(1)
    await bridge.push(1)
    assert not scene.server.paused
    assert "polyturn_checksums" not in scene.server.asked
    assert scene.server.label == "1"


async def test_before_the_first_push_there_is_nothing_to_hold(scene):
    await scene.bridge().hold(0)
    assert scene.server.asked == []


async def test_a_run_that_ends_in_a_hold_leaves_a_server_that_answers(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    await bridge.hold(1)
    await bridge.close()
    assert not scene.server.paused


async def test_layers_that_compute_with_older_copies_are_found(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    scene.server.packed = Stale(scene.server.packed)
    await bridge.hold(1)
    scene.model.norm.add_(1)
    with pytest.raises(WeightMismatchError, match=rf"after push 1 .*{scene.server.url} differs .* 1 of 3 tensors, first norm;"):
        await bridge.push(1)
    assert scene.server.paused, "it must not answer"
    await bridge.close()
    assert scene.server.paused


class Stale(dict):
    """Copies of which one is never made anew."""

    def __getitem__(self, name):
        found = super().__getitem__(name)
        return found.clone() if name == "norm" else found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda server: setattr(server, "refused", "vLLM keeps 3 tensors in a form of its own"), "3 tensors in a form of its"),
        (lambda server: setattr(server, "device", "cuda"), "has its weights on the cuda and the trainer on the cpu"),
        (lambda server: setattr(server, "workers", 2), "the engine servers have 2 workers and the trainer 1 ranks"),
        (lambda server: server.tensors.update(extra=torch.ones(1)), r"3 of the engine's 4 tensors; missing: \['extra'\]"),
        (
            lambda server: server.tensors.update(norm=torch.ones(4).bfloat16()),
            "norm is torch.float32 on cpu in the trainer and",
        ),
        (lambda server: server.tensors.update(norm=server.tensors["layer.q"][0]), "norm shares its tensor|layer.q shares its"),
    ],
)
async def test_what_can_not_be_one_copy(scene, change, said):
    change(scene.server)
    before = {name: parameter.data_ptr() for name, parameter in scene.model.named_parameters()}
    with pytest.raises(WeightSyncError, match=said):
        await scene.bridge().push(0)
    assert before == {name: parameter.data_ptr() for name, parameter in scene.model.named_parameters()}
    assert not scene.server.paused
    assert scene.server.label == "default"


async def test_a_parameter_with_a_tensor_of_its_own_again_is_noticed(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    await bridge.hold(1)
    scene.model.norm.data = scene.model.norm.data.clone()
    with pytest.raises(WeightMismatchError, match="norm is no view of the engine's tensor any more"):
        await bridge.push(1)
    assert scene.server.paused


async def test_a_server_that_was_started_anew_ends_the_run(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    scene.server.identity = None
    with pytest.raises(WeightSyncError, match=rf"{scene.server.url} was started anew: the tensors .* start the run again"):
        await bridge.hold(1)


async def test_another_run_on_the_server_is_noticed(scene):
    first, second = scene.bridge(), scene.bridge(module_of(tensors(2)))
    await first.push(0)
    await second.push(0)
    with pytest.raises(WeightSyncError, match="shares its weights with another run by now"):
        await first.hold(1)
    third = scene.bridge(module_of(tensors(3)))
    await third.push(4)
    scene.server.label = "9"
    with pytest.raises(WeightSyncError, match="serves weights '9' before push 5, and it had confirmed version 4"):
        await third.push(5)


async def test_a_prefix_cache_that_stays_is_no_success(scene):
    scene.server.forgets = False
    with pytest.raises(WeightMismatchError, match="did not reset its prefix cache"):
        await scene.bridge().push(0)
    assert scene.server.paused


async def test_a_server_that_hangs_is_named_with_the_phase(scene):
    bridge = scene.bridge(deadline_s=0.2)
    scene.server.before_stamp = hang
    with pytest.raises(DeadlineError, match=rf"0\.2 s for weight push 3 .*in stamp, it waited for {scene.server.url}"):
        await bridge.push(3)


async def test_a_server_that_is_gone_is_named_with_the_phase(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    await scene.server.stop()
    with pytest.raises(WeightSyncError, match=rf"push 1 failed in pause: {scene.server.url}/pause\S* can't be reached"):
        await bridge.hold(1)
