"""Ranks that each share their weights with a server of their own."""

from __future__ import annotations

import asyncio

import pytest
import torch

from parts.models import same_bits, snapshot, tiny_model
from parts.patience import PATIENCE_S
from parts.samples import on_policy, packed, random_samples, trainer_settings
from parts.thread_ranks import on_ranks
from parts.vllm_stub import SharingStub
from polyturn.errors import WeightMismatchError, WeightSyncError
from polyturn.trainer.beside_engines import BesideEngines
from polyturn.trainer.ranks import Alone
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.shared_tensors import SharedTensors, move_to_shared_memory
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge

ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def engine_with(model):
    """Tensors of an engine, and where they are."""
    own = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    block, memory = move_to_shared_memory(list(own.values()))
    return own, SharedTensors.of(own, {memory.untyped_storage().data_ptr(): block}, None)


def test_every_rank_adopts_the_tensors_of_its_own_engine():
    models = [tiny_model() for _ in range(3)]
    engines = [engine_with(model) for model in models]

    def work(ranks):
        beside = BesideEngines(models[ranks.rank], ranks)
        if ranks.rank == 0:
            beside.adopt([place for _, place in engines])
            beside.check_adopted()
            with ranks.tell("end"):
                return
        while (said := ranks.hear())[0] != "end":
            assert beside.heard(*said)
        assert not beside.heard("end", b"")

    assert on_ranks(3, work) == [None] * 3
    for number, (model, (own, _)) in enumerate(zip(models, engines, strict=True)):
        with torch.no_grad():
            model.model.norm.weight.fill_(float(number))
        assert own["model.norm.weight"].eq(number).all()
        assert all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())


def test_a_parameter_with_another_tensor_is_found_on_every_rank():
    models = [tiny_model() for _ in range(2)]
    engines = [engine_with(model) for model in models]

    def work(ranks):
        beside = BesideEngines(models[ranks.rank], ranks)
        if ranks.rank == 0:
            beside.adopt([place for _, place in engines])
            models[1].model.norm.weight.data = models[1].model.norm.weight.data.clone()
            beside.check_adopted()
            return
        for _ in range(2):
            beside.heard(*ranks.hear())

    found = on_ranks(2, work)
    assert isinstance(found[1], WeightMismatchError)
    assert "model.norm.weight is no view of the engine's tensor any more" in str(found[1])
    assert isinstance(found[0], BaseException)


def test_what_an_engine_has_some_rows_of_is_copied():
    """Embedding and head are whole in the trainer, and cut by the vocabulary in a server of several parts."""
    model = tiny_model()
    part = {name: one[16:40] if name in ENDS else one for name, one in model.state_dict().items()}
    own = {name: torch.zeros(one.shape) for name, one in part.items()}
    block, memory = move_to_shared_memory(list(own.values()))
    place = SharedTensors.of(own, {memory.untyped_storage().data_ptr(): block}, None, dict.fromkeys(ENDS, 16))
    beside = BesideEngines(model, Alone())
    beside.adopt([SharedTensors.from_json(place.to_json())])
    assert all(torch.equal(own[name], part[name]) for name in own)
    assert model.lm_head.weight.shape[0] == 48, "it stays whole"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(own["model.norm.weight"], model.model.norm.weight), "a view"
    assert not torch.equal(own[ENDS[1]], model.lm_head.weight[16:40])
    beside.check_adopted()
    assert all(torch.equal(own[name], model.get_parameter(name)[16:40]) for name in ENDS)


def test_as_many_workers_as_ranks():
    _, place = engine_with(tiny_model())
    with pytest.raises(WeightSyncError, match="the engine servers have 2 workers and the trainer 1 ranks"):
        BesideEngines(tiny_model(), Alone()).adopt([place, place])


def test_an_engine_of_another_shape_is_refused():
    beside = BesideEngines(tiny_model(), Alone())
    _, place = engine_with(tiny_model(hidden_size=64))
    with pytest.raises(WeightSyncError, match=r"is \(.*\) in the trainer and \(.*\) in the engine"):
        beside.adopt([place])


@pytest.mark.parametrize("given", [{}, {"master_weights": "float32"}, {"master_weights": "stochastic"}], ids=str)
def test_two_ranks_train_on_the_memory_of_two_servers(given):
    """The whole bridge, with servers that are stubs; ranks with copies of their own come to the same weights."""
    half = torch.float32 if not given else torch.bfloat16
    shared, apart = [tiny_model().to(half) for _ in range(2)], [tiny_model().to(half) for _ in range(2)]
    settings = trainer_settings(learning_rate=0.01, **given)
    steps = [[packed(on_policy(random_samples(seed), tiny_model(), gap=0.3))] for seed in (0, 1)]

    async def drive(trainer):
        servers = [SharingStub({name: torch.zeros_like(one) for name, one in trainer.weights().items()}) for _ in range(2)]
        for server in servers:
            await server.start()
        bridge = SingleCopyServerBridge(
            [server.url for server in servers], trainer.beside_engines, verify_every=1, deadline_s=PATIENCE_S
        )
        await bridge.push(0)
        for version, batches in enumerate(steps, 1):
            await bridge.hold(version)
            assert all(server.paused for server in servers)
            await asyncio.to_thread(trainer.train, batches)
            await bridge.push(version)
            assert [server.label for server in servers] == [str(version)] * 2
        await bridge.close()
        for server in servers:
            await server.stop()
        return servers

    def work(ranks):
        trainer = Trainer(shared[ranks.rank], settings, ranks=ranks)
        if ranks.rank:
            return trainer.serve()
        servers = asyncio.run(drive(trainer))
        trainer.end()
        return servers

    def alone(ranks):
        trainer = Trainer(apart[ranks.rank], settings, ranks=ranks)
        if ranks.rank:
            return trainer.serve()
        for batches in steps:
            trainer.train(batches)
        return trainer.end()

    servers, other = on_ranks(2, work)
    assert other is None
    assert on_ranks(2, alone) == [None, None]
    wanted = snapshot(apart[0])
    for server, model in zip(servers, shared, strict=True):
        assert same_bits(snapshot(model), wanted)
        assert all(torch.equal(server.tensors[name], tensor) for name, tensor in wanted.items())
    assert servers[0].tensors["model.norm.weight"].data_ptr() != servers[1].tensors["model.norm.weight"].data_ptr()
