"""Recomputed and compiled layers give the gradients of plain ones, and hold less."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from parts.models import ARCHITECTURES, gradients, largest_gap, tiny_model
from parts.samples import loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.errors import ModelError
from polyturn.models.adapters import add_adapters
from polyturn.trainer.layers import decoder_layers, plain_layers, prepare_layers
from polyturn.trainer.trainer import Trainer


def batch(model):
    return packed(on_policy(random_samples(), model, gap=0.3), row_tokens=64)


def gradient(model, rows):
    model.zero_grad(set_to_none=True)
    loss = Trainer(model, trainer_settings(loss_options())).forward_backward(rows)["loss"]
    return loss, gradients(model)


def held_bytes(model):
    """Bytes that a forward pass keeps for its backward pass, parameters aside."""
    held: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(40)[None] % 40
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.model(input_ids=ids, use_cache=False).last_hidden_state
    del out
    return sum(held.values())


@pytest.mark.parametrize("activations", ["selective", "full"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_computed_again_is_the_same(architecture, activations):
    model = tiny_model(architecture)
    again = copy.deepcopy(model)
    prepare_layers(again, activations=activations, compiled=False)
    rows = batch(model)
    (loss, wanted), (found_loss, found) = gradient(model, rows), gradient(again, rows)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == wanted.keys(), "parameters keep their names"
    assert largest_gap(found, wanted) < 1e-6


def products_of_backward(model):
    """Matrix products that a backward pass makes."""
    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal count
            count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return function(*args, **(kwargs or {}))

    out = model.model(input_ids=torch.arange(40)[None] % 40, use_cache=False).last_hidden_state.sum()
    with Count():
        out.backward()
    return count


def test_less_is_held_for_more_work():
    kept, selective, full = (tiny_model(num_hidden_layers=6, hidden_size=160, intermediate_size=144) for _ in range(3))
    prepare_layers(selective, activations="selective", compiled=False)
    prepare_layers(full, activations="full", compiled=False)
    assert held_bytes(full) < held_bytes(kept) / 5
    assert products_of_backward(selective) == products_of_backward(kept), "no product is made twice"
    assert products_of_backward(full) == products_of_backward(kept) + 6 * 6, "all of a layer but its last"


@pytest.mark.real  # the quick tests do without peft
def test_thin_products_are_made_again():
    """The second product of an adapter is as large as that of its layer, and costs next to nothing."""
    kept, selective = (tiny_model(num_hidden_layers=6, hidden_size=160, intermediate_size=144) for _ in range(2))
    for model in (kept, selective):
        add_adapters(model, rank=4, alpha=8.0, targets=None, base="tiny", seed=0)
    prepare_layers(selective, activations="selective", compiled=False)
    again = products_of_backward(selective) - products_of_backward(kept)
    assert again == 6 * 6, "of seven adapters a layer, all but the last, whose result nobody needs for a gradient"


def test_a_copy_runs_its_own_layers():
    model = tiny_model()
    prepare_layers(model, activations="full", compiled=False)
    again = copy.deepcopy(model)
    ids = torch.arange(9)[None]
    before = model(input_ids=ids).logits
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.equal(again(input_ids=ids).logits, before)


def test_plain_again():
    model, kinds = tiny_model(), [type(layer) for layer in decoder_layers(tiny_model())]
    prepare_layers(model, activations="full", compiled=False)
    assert [type(layer) for layer in decoder_layers(model)] != kinds
    plain_layers(model)
    assert [type(layer) for layer in decoder_layers(model)] == kinds


def test_layers_are_named_by_transformers():
    assert len(decoder_layers(tiny_model(num_hidden_layers=3))) == 3
    with pytest.raises(ModelError, match=r"Linear names no decoder layers.*trainer\.activations=keep"):
        decoder_layers(torch.nn.Linear(2, 2))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_layers():
    model = tiny_model()
    again = copy.deepcopy(model)
    prepare_layers(again, activations="selective", compiled=True)
    rows = batch(model)
    (loss, wanted), (found_loss, found) = gradient(model, rows), gradient(again, rows)
    assert found_loss == pytest.approx(loss, rel=1e-4)
    assert largest_gap(found, wanted) < 1e-4


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("activations", ["keep", "selective", "full"])
def test_layers_are_compiled_once_for_rows_of_any_length(activations):
    torch._dynamo.reset()
    counters.clear()
    trainer = Trainer(tiny_model(), trainer_settings(compiled=True, activations=activations))
    lengths = set()
    for count in (3, 5, 8, 2):
        rows = packed(random_samples(count=count), row_tokens=400)
        trainer.forward_backward(rows)
        lengths |= {len(row.input_ids) for row in rows.rows}
    assert len(lengths) == 4
    assert counters["stats"]["unique_graphs"] == 1
