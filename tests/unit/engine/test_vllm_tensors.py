"""Checkpoint names of what a vLLM worker holds, on layers that look like vLLM's: fused, padded, packed, tied."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from polyturn.engine import vllm_tensors
from polyturn.engine.vllm_shared import WorkerShare
from polyturn.engine.vllm_tensors import (
    UnknownLayerError,
    adapter_tensors,
    aliases,
    described_tensors,
    held_tensors,
    not_covered,
)
from polyturn.errors import WeightSyncError


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(vllm_tensors, "_gathered", lambda local, dim, *, one=False: local)


class Columns(torch.nn.Module):
    """A column-parallel layer, fused or not."""

    def __init__(self, sizes, width):
        super().__init__()
        self.output_partition_sizes, self.input_size, self.input_size_per_partition = sizes, width, width
        self.weight = torch.nn.Parameter(torch.randn(sum(sizes), width))
        self.bias = torch.nn.Parameter(torch.randn(sum(sizes)))


class Row(torch.nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.output_size, self.input_size, self.input_size_per_partition = rows, width, width
        self.output_partition_sizes, self.input_is_parallel = [rows], True
        self.weight = torch.nn.Parameter(torch.randn(rows, width))


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, rows, padded, width):
        super().__init__()
        self.org_vocab_size, self.embedding_dim = rows, width
        self.weight = torch.nn.Parameter(torch.randn(padded, width))


class ParallelLMHead(VocabParallelEmbedding):
    pass


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj, self.gate_up_proj = Columns([6, 4, 4], 6), Row(6, 6), Columns([5, 5], 6)
        self.norm = torch.nn.LayerNorm(6, bias=False)


class Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.layer, self.lm_head = VocabParallelEmbedding(9, 64, 6), Decoder(), ParallelLMHead(9, 64, 6)
        self.lm_head.weight = self.embed_tokens.weight


def test_every_tensor_has_its_name_its_shape_and_its_values():
    model = Model()
    held = dict(held_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in described_tensors(model).items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in held.items()}
    assert set(held) == {
        *("embed_tokens.weight", "lm_head.weight", "layer.o_proj.weight", "layer.norm.weight"),
        *(f"layer.{part}_proj.{kind}" for part in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias")),
    }
    qkv = model.layer.qkv_proj
    assert torch.equal(torch.cat([held[f"layer.{part}_proj.weight"] for part in "qkv"]), qkv.weight)
    assert torch.equal(torch.cat([held[f"layer.{part}_proj.bias"] for part in "qkv"]), qkv.bias)
    assert torch.equal(held["embed_tokens.weight"], model.embed_tokens.weight[:9])
    assert aliases(model) == {"lm_head.weight": "embed_tokens.weight"}


def test_a_packed_copy_is_read_by_what_it_does():
    model = Model()
    packed = {layer: layer.weight.detach().clone() for layer in (model.layer.qkv_proj, model.layer.o_proj, model.lm_head)}
    for layer, copy in packed.items():
        layer.cpu_linear = lambda x, weight, bias, copy=copy: x @ copy.T
    whole = {name: tensor.clone() for name, tensor in held_tensors(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    now = dict(held_tensors(model))
    stale = {name for name in whole if name.endswith("weight") and torch.equal(now[name], whole[name])}
    assert stale == {"lm_head.weight", "layer.o_proj.weight", *(f"layer.{part}_proj.weight" for part in "qkv")}
    assert torch.equal(now["embed_tokens.weight"], model.embed_tokens.weight[:9]), "an embedding looks rows up"


def test_layers_with_adapters_are_called_what_they_are_without():
    model = Model()
    inner = model.layer.o_proj
    model.layer.o_proj = torch.nn.Module()
    model.layer.o_proj.base_layer = inner
    assert set(dict(held_tensors(model))) == set(dict(held_tensors(Model())))


def test_what_is_not_known_is_named():
    model = Model()
    model.layer.experts = torch.nn.Module()
    model.layer.experts.w13 = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(UnknownLayerError, match=r"layer\.experts\.w13: a Module has a parameter of shape \(2, 3, 4\)"):
        described_tensors(model)


def test_adapters_of_fused_layers_have_their_own_names():
    class Layer:
        def __init__(self, a, b):
            self.lora_a, self.lora_b = a, b

    class Adapters:
        loras: ClassVar = {
            "layer.qkv_proj": Layer([torch.zeros(1), None, torch.ones(1)], [torch.zeros(2), None, torch.ones(2)]),
            "layer.o_proj": Layer(torch.zeros(3), torch.zeros(4)),
        }

    found = dict(adapter_tensors(Adapters(), Model.packed_modules_mapping))
    assert set(found) == {f"layer.{part}_proj.lora_{letter}.weight" for part in "qvo" for letter in "AB"}
    assert torch.equal(found["layer.v_proj.lora_B.weight"], torch.ones(2))


# ── shared with a trainer ──────────────────────────────────────────────────────────────────────────────────────────────


def test_every_number_has_a_name_but_those_that_pad():
    assert not_covered(Model()) == []


def test_parameters_without_a_name_are_listed():
    model = Model()
    model.layer.experts = torch.nn.Conv1d(3, 4, 2)
    model.layer.qkv_proj.output_partition_sizes = [6, 4, 2]
    assert not_covered(model) == ["layer.experts.weight", "layer.qkv_proj.weight", "layer.qkv_proj.bias"]


def test_a_worker_shares_the_tensors_that_its_layers_compute_with():
    model = Model()
    wanted = {name: tensor.clone() for name, tensor in held_tensors(model)}
    worker = WorkerShare(model, torch.device("cpu"))
    assert worker.identity is None
    told = worker.share()
    opened = told.open()
    assert {name: tensor.shape for name, tensor in opened.items()} == {name: tensor.shape for name, tensor in wanted.items()}
    assert all(torch.equal(opened[name], tensor) for name, tensor in wanted.items())
    opened["layer.k_proj.weight"].fill_(3.0)
    assert model.layer.qkv_proj.weight[6:10].eq(3).all()
    assert torch.equal(model.layer.qkv_proj.weight[:6], wanted["layer.q_proj.weight"])
    opened["embed_tokens.weight"].fill_(2.0)
    assert model.lm_head.weight[:9].eq(2).all()
    assert not model.lm_head.weight[9:].eq(2).any(), "rows that pad are nobody's"
    again = worker.share()
    assert again.identity == worker.identity != told.identity
    assert torch.equal(again.open()["layer.k_proj.weight"], opened["layer.k_proj.weight"])


class Latent(torch.nn.Module):
    """A layer, or the method of one, that keeps another form of its weights."""

    def process_weights_after_loading(self, layer):
        """Derives it."""


def test_a_worker_refuses_what_can_not_be_one_copy():
    model = Model()
    model.layer.experts = torch.nn.Conv1d(3, 4, 2)
    place = model.layer.norm.weight.data_ptr()
    with pytest.raises(
        WeightSyncError, match=r"1 of the engine's parameters are not.* one copy of them: layer\.experts\.weight;"
    ):
        WorkerShare(model, torch.device("cpu")).share()
    assert model.layer.norm.weight.data_ptr() == place, "nothing was moved"
    quantized = Model()
    quantized.layer.qkv_proj.quant_method = object()
    quantized.layer.attention = Latent()
    with pytest.raises(WeightSyncError, match=r"2 layers of vLLM .* derived.*: layer\.qkv_proj, layer\.attention;"):
        WorkerShare(quantized, torch.device("cpu")).share()
    packed = Model()
    weight = packed.layer.o_proj.weight.detach().clone()
    packed.layer.o_proj.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)
    with pytest.raises(WeightSyncError, match=r"vLLM keeps 1 tensors in a form of its own.*: layer\.o_proj\.weight;"):
        WorkerShare(packed, torch.device("cpu")).share()
