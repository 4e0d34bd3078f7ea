"""The weight-transfer backend inside a vLLM whose layers compute with their parameters as they are, as on a GPU: in place.

On a CPU stock layers pack their weights, so servers there reload layer by layer; the engine in this process has plain layers.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from parts.vllm_here import EXACT, change, gap
from parts.vllm_served import needs_vllm, tiny
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.labels import BROKEN_LABEL
from polyturn.weight_sync.transfer import InitInfo, TransferError, TransferGroup, UpdateInfo, listen, send

pytestmark = needs_vllm
LIMIT_S = 30.0


class Pushed:
    """The backend around the model of an engine in this process, and a trainer's end of its group."""

    def __init__(self, engine) -> None:
        from polyturn.engine.vllm_tensors import aliases
        from polyturn.engine.vllm_worker import PolyturnTransfer, _Init

        core = engine._thread._core
        self.engine, self.model = engine, core.model
        self.backend = PolyturnTransfer(None, core._engine.vllm_config, torch.device("cpu"), core.model)
        self.aliases = aliases(core.model)
        listener = listen("127.0.0.1")
        info = InitInfo(
            master_address="127.0.0.1",
            master_port=listener.getsockname()[1],
            rank_offset=1,
            world_size=2,
            packed_buffer_size_bytes=50_000,
            timeout_s=LIMIT_S,
        )
        joining = threading.Thread(target=self.backend.init_transfer_engine, args=(_Init(**info.to_json()),))
        joining.start()
        self.group = TransferGroup(info, torch.device("cpu"), listener=listener)
        joining.join(LIMIT_S)

    def coming(self, model, *, without: int = 0) -> dict[str, torch.Tensor]:
        names = [name for name in model.state_dict() if name not in self.aliases]
        return {name: model.state_dict()[name].to("meta") for name in names[: len(names) - without]}

    def update(self, model, version: int, *, send_without: int = 0, tell_without: int = 0) -> Exception | None:
        """Start, and receive while a thread sends. What the backend raised."""
        from polyturn.engine.vllm_worker import _Update

        self.backend.start_weight_update()
        assert self.backend._own is not None, "these layers are plain"
        told = self.coming(model, without=tell_without)
        sent = self.coming(model, without=send_without)

        def sending() -> None:
            try:
                send(
                    self.group,
                    WholeWeights(model.state_dict),
                    sent,
                    bucket_bytes=50_000,
                    until=time.monotonic() + LIMIT_S,
                    say=lambda name: None,
                )
            except TransferError:
                return
            finally:
                if send_without:
                    self.group.cut()

        sender = threading.Thread(target=sending)
        sender.start()
        try:
            self.backend.receive_weights(_Update(**UpdateInfo.of(told).to_json(), version=str(version)))
        except Exception as error:
            return error
        finally:
            if not tell_without:
                sender.join(LIMIT_S)
        return None


async def none_of_them(engine, version: int) -> None:
    """Have the engine forget what it kept of older weights."""
    await engine.change_weights(lambda own: None, version)


async def test_an_update_fills_the_models_own_tensors(vllm_engine):
    pushed, model = Pushed(vllm_engine), tiny(51)
    places = [parameter.data_ptr() for parameter in pushed.model.parameters()]
    for version in (1, 2, 3):
        change(model, version)
        assert pushed.update(model, version) is None
        pushed.backend.finish_weight_update()
        assert pushed.backend.label == str(version)
        await none_of_them(vllm_engine, version)
        assert await gap(vllm_engine, model) < EXACT
    assert [parameter.data_ptr() for parameter in pushed.model.parameters()] == places, "graphs were recorded with these"
    pushed.backend.shutdown()


async def test_an_update_that_breaks_is_called_broken_and_the_next_one_mends_it(vllm_engine):
    pushed, model = Pushed(vllm_engine), tiny(52)
    assert isinstance(pushed.update(model, 4, send_without=6), TransferError)
    assert pushed.backend.label == BROKEN_LABEL
    again = Pushed(vllm_engine)
    again.backend.label = BROKEN_LABEL
    assert again.update(model, 5) is None
    again.backend.finish_weight_update()
    assert again.backend.label == "5"
    await none_of_them(vllm_engine, 5)
    assert await gap(vllm_engine, model) < EXACT
    again.backend.shutdown()


async def test_what_does_not_fill_all_tensors_changes_none(vllm_engine):
    pushed, before = Pushed(vllm_engine), tiny(53)
    assert pushed.update(before, 6) is None
    pushed.backend.finish_weight_update()
    error = pushed.update(tiny(54), 7, tell_without=1)
    assert isinstance(error, ValueError)
    assert "does not fill this model's tensors" in str(error)
    pushed.backend.put_back()
    assert pushed.backend.label == "6"
    await none_of_them(vllm_engine, 7)
    assert await gap(vllm_engine, before) < EXACT
    pushed.group.cut()
    pushed.backend.shutdown()


def test_layers_with_a_form_of_their_own_are_reloaded(vllm_engine):
    from polyturn.engine.vllm_tensors import plain_tensors

    model = vllm_engine._thread._core.model
    assert plain_tensors(model) is not None
    attention = next(module for module in model.modules() if type(module).__name__ == "Attention")
    assert hasattr(attention, "process_weights_after_loading")

    class Derives(torch.nn.Module):
        def process_weights_after_loading(self, dtype) -> None:
            """As latent attention, which keeps products of its weights."""

    for name, odd in (("derives", Derives()), ("packed", torch.nn.Identity())):
        if name == "packed":
            odd.cpu_linear = lambda *_: None
        model.add_module(name, odd)
        try:
            assert plain_tensors(model) is None
        finally:
            del model._modules[name]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
