"""One rank that trains shards of a policy: `python -m parts.shard_scenes SCENE`, with torchrun's variables set.

Every scene compares with the same steps made by one rank with whole weights, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parts.models import largest_gap, tiny_model
from parts.patience import PATIENCE_S
from parts.samples import loss_options, packed, random_samples, trainer_settings
from parts.shard_cases import CASES, CUT_CASES, KERNEL_CASES, LAYER_CASES, LONGROPE, batches
from polyturn.checkpoint.arena import whole_tensor
from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split
from polyturn.errors import ModelError, RankError
from polyturn.models.adapters import add_adapters
from polyturn.trainer.attention import use_attention
from polyturn.trainer.context_attention import CONTEXT_MASKED, CONTEXT_VARLEN
from polyturn.trainer.cut_copies import CutOptimizer
from polyturn.trainer.masters import MasterOptimizer
from polyturn.trainer.ranks import ProcessRanks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shard_optimizer import ShardOptimizer, local_part
from polyturn.trainer.state_shards import StateShardOptimizer
from polyturn.trainer.trainer import Trainer

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if os.environ.get("POLYTURN_TEST_DEVICE") else torch.device("cpu")
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1}
"""AdamW would make much of a rounding difference in a gradient near zero."""


def model_of(case: Mapping[str, Any]) -> torch.nn.Module:
    model = tiny_model(case.get("architecture", "llama"), **case.get("model", {}))
    model = model.to(case.get("dtype", torch.float32))
    if case.get("kernels"):
        use_attention(model, "auto", on_gpu=True)
    if case.get("lora"):
        add_adapters(model, rank=4, alpha=8, targets=None, base="tiny", seed=3)
    return model


def reference_of(settings: TrainerSettings, model: torch.nn.Module, case: Mapping[str, Any]) -> torch.nn.Module | None:
    if not settings.loss.beta:
        return None
    other = tiny_model(seed=7).to(case.get("dtype", torch.float32))
    return model if case.get("lora") else other.to(next(model.parameters()).device)


def trained(
    case: Mapping[str, Any], ranks: ProcessRanks | None, **given: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Trainer]:
    """Metrics of every step and the whole weights in the end (on rank 0), and the trainer."""
    given["device"] = str(DEVICE)
    settings = trainer_settings(case.get("loss", loss_options()), **{**SGD, **case.get("settings", {}), **given})
    model = model_of(case).to(DEVICE) if settings.parallel in ("replicated", "zero1") else model_of(case)
    # A trainer may take the exact values for its masters, and change them.
    exact = {name: value.detach().clone() for name, value in case["exact"].items()} if "exact" in case else None
    trainer = Trainer(model, settings, reference=reference_of(settings, model, case), ranks=ranks, exact=exact)
    numbers: list[dict[str, float]] = []
    weights: dict[str, torch.Tensor] = {}
    if ranks is None or ranks.rank == 0:
        numbers = [trainer.train(step) for step in case.get("steps", [batches()])]
        names = list(trainer.weights())
        weights = {name: tensor.clone() for name, tensor in trainer.gather(names).items()}
        if isinstance(trainer.optimizer, MasterOptimizer):
            trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            weights = dict(zip(trainable, trainer.optimizer.state_dict()["masters"], strict=True))
        if ranks is not None:
            with ranks.tell("end"):
                pass
    else:
        _serve(trainer)
    kinds = CutOptimizer | ShardOptimizer | StateShardOptimizer
    if isinstance(trainer.optimizer, kinds) and settings.master_weights == "float32":
        kept = trainer.optimizer.state_dict()["parameters"]
        weights = whole({name: values["master"] for name, values in kept.items()})
    return numbers, weights, trainer


def _serve(trainer: Trainer) -> None:
    """Until the end is said; the group stays for the next case."""
    leave, trainer._ranks.leave = trainer._ranks.leave, lambda: None  # type: ignore[method-assign]
    try:
        trainer.serve()
    finally:
        trainer._ranks.leave = leave  # type: ignore[method-assign]


def equal(ranks: ProcessRanks, only: Sequence[str] = ()) -> dict[str, Any]:
    """Gaps of weights and metrics to one rank with whole weights, by case."""
    found = {}
    for name, case in CASES.items():
        if only and name not in only:
            continue
        many, weights, trainer = trained(case, ranks, parallel="fsdp2")
        if ranks.rank == 0:
            one, wanted, alone = trained(case, None)
            found[name] = gaps(one, many, wanted, weights)
            assert ways(trainer) == ways(alone)
    return found


def ways(trainer: Trainer) -> tuple[bool, bool]:
    """What was found out by trying: whether the head runs in chunks, and whether beginnings may be shared."""
    return trainer._score.chunked, trainer.sharing is not None


def copies(ranks: ProcessRanks) -> dict[str, Any]:
    """Several copies of the weights, each cut over two ranks."""
    found = {}
    for name in ("loss grpo", "adamw, three steps", "clipped hard", "one row"):
        many, weights, _ = trained(CASES[name], ranks, parallel="fsdp2", shard_ranks=2)
        if ranks.rank == 0:
            one, wanted, _ = trained(CASES[name], None)
            found[name] = gaps(one, many, wanted, weights)
    return found


def cut(ranks: ProcessRanks, parallel: str, context_ranks: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Gaps to one rank where each row is cut over so many ranks, by case."""
    found = {}
    for name in only or CUT_CASES:
        case = {**CUT_CASES, **KERNEL_CASES}[name]
        many, weights, trainer = trained(case, ranks, parallel=parallel, context_ranks=int(context_ranks))
        kind = CONTEXT_VARLEN if case.get("kernels") else CONTEXT_MASKED
        assert trainer.model.config._attn_implementation == kind
        if ranks.rank == 0:
            one, wanted, alone = trained(case, None)
            found[name] = gaps(one, many, wanted, weights)
            assert ways(trainer) == ways(alone)
    return found


def layers(ranks: ProcessRanks, parallel: str, tensor_ranks: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Gaps to one rank where each layer is cut over so many ranks, by case; and to the copies of what is on all of them."""
    found = {}
    for name in only or LAYER_CASES:
        case = LAYER_CASES[name]
        many, weights, trainer = trained(case, ranks, parallel=parallel, tensor_ranks=int(tensor_ranks))
        own = {key: local_part(parameter).double() for key, parameter in trainer.model.named_parameters()}
        copies = {key: float(own[key].sum()) for key in own if key.endswith("norm.weight") or "embed" in key}
        noted = ranks.gather(copies, "copies")
        size = int(tensor_ranks)
        assert all(noted[rank] == noted[rank // size * size] for rank in range(ranks.size)), "copies are equal to the bit"
        if ranks.rank == 0:
            one, wanted, alone = trained(case, None)
            found[name] = gaps(one, many, wanted, weights)
            assert ways(trainer) == ways(alone)
    return found


class AllAtOnce(torch.nn.Module):
    """Looks at the whole width, which no rank has when it is cut."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(states) - states.mean(-1, keepdim=True)


def refused(ranks: ProcessRanks) -> dict[str, Any]:
    """What is said of models that can't be cut by tokens."""
    found = {}
    cut: dict[str, dict[str, Any]] = {
        "phi3": {"parallel": "fsdp2", "tensor_ranks": 2},
        "qwen3_moe": {"parallel": "fsdp2", "tensor_ranks": 2},
        "one head of keys": {"parallel": "fsdp2", "tensor_ranks": 2},
        "all at once": {"parallel": "fsdp2", "tensor_ranks": 2},
    }
    models = {
        "phi3": tiny_model("phi3"),
        "qwen3_moe": tiny_model("qwen3_moe"),
        "one head of keys": tiny_model(num_key_value_heads=1),
        "all at once": tiny_model(),
        "eager": tiny_model(attention="eager"),
        "longrope": tiny_model(rope_parameters=LONGROPE),
        "looks back": tiny_model(),
    }
    models["all at once"].model.layers[0].mlp.act_fn = AllAtOnce()
    models["looks back"].model.layers[1].register_forward_hook(lambda _, __, out: out + 0.1 * out.roll(1, 1))
    for name, model in models.items():
        try:
            Trainer(model, trainer_settings(**cut.get(name, {"context_ranks": 2})), ranks=ranks)
        except ModelError as error:
            found[name] = str(error)
    return found


def zero1(ranks: ProcessRanks, only: Sequence[str] = ()) -> dict[str, Any]:
    """Cut optimizers beside one rank, and whether they come to what whole copies come to, to the bit."""
    found: dict[str, Any] = {}
    for name in only:
        many, weights, _ = trained(CASES[name], ranks, parallel="zero1")
        _, copied, _ = trained(CASES[name], ranks, parallel="ddp")
        if ranks.rank == 0:
            one, wanted, _ = trained(CASES[name], None)
            found[name] = gaps(one, many, wanted, weights) | {"as copies": same(dict(weights), dict(copied))}
    return found


def compiled(ranks: ProcessRanks) -> dict[str, Any]:
    """Layers that are compiled, of shards."""
    many, weights, _ = trained({}, ranks, parallel="fsdp2", compiled=True)
    if ranks.rank:
        return {}
    one, wanted, _ = trained({}, None)
    return {"compiled": gaps(one, many, wanted, weights)}


def zero3(ranks: ProcessRanks, only: Sequence[str] = ()) -> dict[str, Any]:
    """Shards of DeepSpeed beside those of FSDP2, and beside one rank with whole weights; those of it first."""
    found = {}
    for name in only:
        many, weights, _ = trained(CASES[name], ranks, parallel="deepspeed")
        fsdp2 = trained(CASES[name], ranks, parallel="fsdp2")[:2]
        if ranks.rank == 0:
            one = trained(CASES[name], None)[:2]
            for kind, (metrics, exact) in (("whole", one), ("fsdp2", fsdp2)):
                found[f"{name}, {kind}"] = gaps(metrics, many, exact, weights)
    return found


ZERO3_MODES: dict[str, dict[str, Any]] = {
    "float32": {
        "settings": {"optimizer": "adamw", "weight_decay": 0.1},
        "model": {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8},
    },
    "masters": {"dtype": torch.bfloat16, "settings": {"optimizer": "adamw", "master_weights": "float32"}},
}
"""The first with a tensor that two ranks can't halve."""


def zero3_resumed(ranks: ProcessRanks) -> dict[str, Any]:
    """Two steps, or one, a state that is gathered and read by another trainer, and one more: equal to the bit."""
    found: dict[str, Any] = {}
    for name, mode in ZERO3_MODES.items():
        step = [packed(random_samples(), row_tokens=30)]
        whole = trained({**mode, "steps": [step] * 2}, ranks, parallel="deepspeed")[2]
        half = trained({**mode, "steps": [step]}, ranks, parallel="deepspeed")[2]
        later = trained({**mode, "steps": []}, ranks, parallel="deepspeed")[2]
        shapes = later.state_to_fill()
        state = gathered(half.state())
        later.go_on_from(state)
        if ranks.rank == 0:
            later.train(step)
            with ranks.tell("end"):
                pass
        else:
            _serve(later)
        ends = [gathered(trainer.state()) for trainer in (whole, later)]
        stale = [parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter) for parameter in later.model.parameters()]
        found[name] = {
            "equal": same(ends[0], ends[1]),
            "moved": not same(ends[0]["model"], state["model"]),
            "places": same_shapes(shapes, state),
            "kept": sorted(next(iter(state["optimizer"]["parameters"].values()))),
            "gradients are gone": all(not gradient.any() for gradient in stale),
        }
    return found


def gathered(tree: Any) -> Any:
    """A state with whole tensors of its own; a collective."""
    if isinstance(tree, Mapping):
        return {key: gathered(value) for key, value in tree.items()}
    return whole_tensor(tree).clone() if isinstance(tree, torch.Tensor) else tree


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def same_shapes(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_shapes(one[key], other[key]) for key in one)
    return not isinstance(one, torch.Tensor) or (one.shape, one.dtype) == (other.shape, other.dtype)


def zero3_lose_a_rank(ranks: ProcessRanks) -> dict[str, Any]:
    """Rank 1 is killed in a backward pass."""
    return lose_a_rank(ranks, "deepspeed")


MODES: dict[str, dict[str, Any]] = {
    "adamw": {"settings": {"optimizer": "adamw"}},
    "masters": {"dtype": torch.bfloat16, "settings": {"optimizer": "adamw", "master_weights": "float32"}},
    "stochastic": {"dtype": torch.bfloat16, "settings": {"optimizer": "adamw", "master_weights": "stochastic"}},
}


def resumed(ranks: ProcessRanks, parallel: str, tensor_ranks: str) -> dict[str, Any]:
    """Two steps, or one, a saved state, another trainer and one more: equal to the bit. And what the state looks like."""
    found: dict[str, Any] = {}
    whole_model = tiny_model()
    cut: dict[str, Any] = {"parallel": parallel, "tensor_ranks": int(tensor_ranks)}
    for name, mode in MODES.items():
        whole = trained({**mode, "steps": [batches()] * 2}, ranks, **cut)[2]
        half = trained({**mode, "steps": [batches()]}, ranks, **cut)[2]
        state, weights = half.optimizer.state_dict(), half.model.state_dict()
        later = trained({**mode, "steps": []}, ranks, **cut)[2]
        later.optimizer_step = half.optimizer_step
        later.model.load_state_dict(copied(weights))
        later.optimizer.load_state_dict(copied(state))
        if ranks.rank == 0:
            later.train([*batches()])
            with ranks.tell("end"):
                pass
        else:
            _serve(later)
        shards = [dict(one.model.named_parameters()) for one in (whole, later)]
        shapes = {key: tensor.shape for key, tensor in whole_model.named_parameters()}
        kept = state["parameters"]
        found[name] = {
            "equal": all(torch.equal(local_part(shards[0][key]), local_part(shards[1][key])) for key in shards[0]),
            "kept": sorted(kept[next(iter(kept))]),
            "whole shapes": all(v.shape == shapes[key] for key in shapes for v in kept[key].values() if v.ndim),
            "held": later.optimizer.held().device.total,
        }
    return found


def loaded(ranks: ProcessRanks, parallel: str, tensor_ranks: str) -> dict[str, Any]:
    """A state that ranks of cut layers saved as files, read by such ranks and by ranks of whole layers: equal to the bit."""
    own, whole_layers, copies = (parallel, tensor_ranks), ("fsdp2", "1"), ("ddp", "2")
    found: dict[str, Any] = {}
    # Of bfloat16 weights, FSDP2 saves the masters in their place.
    for name, readers in (
        ("adamw", (own, whole_layers, copies)),
        ("masters", (own, whole_layers if parallel == "fsdp2" else own)),
    ):
        folder = Path(ranks.gather(tempfile.mkdtemp() if ranks.rank == 0 else "", "a folder")[0])
        mode = MODES[name]
        before = trained({**mode, "steps": [batches()] * 2}, ranks, parallel=parallel, tensor_ranks=int(tensor_ranks))[2]
        if ranks.rank == 0:
            write_files(folder, *split(before.save(lambda state, _: whole(state))))
            with ranks.tell("end"):
                pass
        else:
            _serve(before)
        for kind, size in readers:
            settings = trainer_settings(parallel=kind, tensor_ranks=int(size), **mode["settings"])
            model = tiny_model(seed=3).to(mode.get("dtype", torch.float32))
            trainer = Trainer(model, settings, ranks=ranks)
            into, _ = split(trainer.state_to_fill())
            trainer.go_on_from(read_state(folder, read_rest(folder), into))
            states = [dict(split(whole(one.state()))[0]) for one in (before, trainer)]
            found[f"{name}, {kind}, {size}"] = states[0].keys() == states[1].keys() and all(
                torch.equal(states[0][key], states[1][key]) for key in states[0]
            )
            found[f"{name}, tensors"] = len(states[0])
    return found


def whole(tree: Any) -> Any:
    """With whole tensors, which all ranks gather."""
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    return whole_tensor(tree).clone() if isinstance(tree, torch.Tensor) else tree


TOGETHER: dict[str, dict[str, Any]] = {
    "float32": {},
    "one that no two ranks can halve": {
        "model": {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    },
    "tied": {"model": {"tie_word_embeddings": True}},
    "bfloat16, masters": {"dtype": torch.bfloat16, "settings": {"master_weights": "float32"}},
    "adapters": {"lora": True},
}


def together(ranks: ProcessRanks, parallel: str, tensor_ranks: str, shard_ranks: str) -> dict[str, Any]:
    """What is gathered many at a time after a step, beside each tensor made whole by torch: its bits, and its type."""
    found: dict[str, Any] = {}
    cut: dict[str, Any] = {"parallel": parallel, "tensor_ranks": int(tensor_ranks), "shard_ranks": int(shard_ranks) or None}
    for name, case in TOGETHER.items():
        if int(tensor_ranks) > 1 and (case.get("lora") or "halve" in name):
            continue  # refused
        trainer = trained(case, ranks, **cut)[2]
        if ranks.rank == 0:
            ours, exported = trainer.gather(list(trainer.weights())), trainer.state_to_save()
            with ranks.tell("end"):
                pass
        else:
            _serve(trainer)
        torchs = whole(dict(trainer.weights()))
        if ranks.rank == 0:
            kind = case.get("dtype", torch.float32)
            wanted = {key: tensor.to(kind) for key, tensor in torchs.items()}
            found[name] = same(ours, wanted) and same(exported, wanted) and same_shapes(ours, wanted)
            tied = [key for key in ours if "lm_head" in key or "embed_tokens" in key]
            assert name != "tied" or len({ours[key].data_ptr() for key in tied}) == 1
    return found


def copied(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def lose_a_rank(ranks: ProcessRanks, parallel: str = "fsdp2") -> dict[str, Any]:
    """Rank 1 is killed in a backward pass."""
    settings = trainer_settings(parallel=parallel)
    trainer = Trainer(tiny_model(), settings, ranks=ranks)
    if ranks.rank == 1:
        trainer.model.model.layers[0].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        trainer.train(batches()) if ranks.rank == 0 else trainer.serve()
    except RankError as lost:
        return {"lost": str(lost)}
    return {"lost": ""}


def gaps(
    one: list[dict[str, float]], many: list[dict[str, float]], wanted: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> dict[str, float]:
    assert [metrics.keys() for metrics in one] == [metrics.keys() for metrics in many]
    metrics = max(abs(a[key] - b[key]) / max(1e-2, abs(a[key])) for a, b in zip(one, many, strict=True) for key in a)
    found, exact = ({name: tensor.double().cpu() for name, tensor in one.items()} for one in (weights, wanted))
    return {"weights": largest_gap(found, exact), "metrics": metrics}


def arguments(words: list[str]) -> list[Any]:
    """`NAME=VALUE` are arguments, the rest are the names of cases."""
    values = [word.partition("=")[2] for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    return [*values, names] if names else [*values]


ALL = (
    equal,
    cut,
    layers,
    zero1,
    refused,
    copies,
    compiled,
    resumed,
    loaded,
    together,
    lose_a_rank,
    zero3,
    zero3_resumed,
    zero3_lose_a_rank,
)
SCENES = {scene.__name__: scene for scene in ALL}
CUT_IN_TWO = ("cut", "parallel=fsdp2", "context=2")
ON_GPUS = (
    ("compiled",),
    ("together", "parallel=fsdp2", "tensor=1", "shards=0"),
    ("together", "parallel=fsdp2", "tensor=2", "shards=0"),
    ("resumed", "parallel=fsdp2", "tensor=1"),
    CUT_IN_TWO,
    (*CUT_IN_TWO, *KERNEL_CASES),
    ("layers", "parallel=fsdp2", "tensor=2"),
    ("equal",),
)
"""What two GPUs play (`tests/gpu/test_shards_gpu.py`), the longest last."""

if __name__ == "__main__":
    joined = ProcessRanks.join(deadline_s=60, start_deadline_s=PATIENCE_S)
    print(json.dumps(SCENES[sys.argv[1]](joined, *arguments(sys.argv[2:]))), flush=True)
    joined.leave()
    os._exit(0)
