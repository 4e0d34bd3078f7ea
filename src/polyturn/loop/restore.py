"""Fills what was built anew from the checkpoint that a run goes on from, on every rank of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyturn.checkpoint.files import read_rest, read_state
from polyturn.checkpoint.state import LoopState
from polyturn.checkpoint.tree import join, paths_in, split
from polyturn.errors import CheckpointError
from polyturn.loop.build import Policy
from polyturn.loop.resume import Resume
from polyturn.models.adapters import pushed_weights
from polyturn.trainer.optimizer_layouts import in_layout_of, masters_of
from polyturn.trainer.random_state import restore_random_state
from polyturn.trainer.trainer import Trainer

POLICY = "policy"
"""Name of the policy among the modules of a state."""


def with_weights(policy: Policy, resume: Resume | None) -> Policy:
    """`policy` with the weights that a new run starts from: to be called before the trainer is built around it.

    A run that goes on is left alone: its reference is the model as it was loaded. Raises CheckpointError, ResourceError.
    """
    if resume is None or resume.load == "all":
        return policy
    fill_model(policy.model, resume)
    saved = _module(resume)
    trained = list(join(saved["trained"], {}))
    masters = masters_of(saved.get("optimizer", {}), trained)
    if masters is None:
        return replace(policy, exact=None)
    return replace(policy, exact=dict(zip(trained, read_state(resume.folder, masters), strict=True)))


@torch.no_grad()
def fill_model(model: torch.nn.Module, resume: Resume) -> None:
    """Give `model` the saved weights. Raises CheckpointError for those of another model, ResourceError."""
    own = pushed_weights(model)
    saved = _module(resume)["model"]
    _refuse_other_weights(own, saved, resume)
    into, _ = split({"modules": {POLICY: {"model": own}}})
    for name, tensor in read_state(resume.folder, saved, into).items():
        own[name].copy_(tensor)


def restore_trainer(trainer: Trainer, resume: Resume | None) -> None:
    """What a new trainer goes on from, once it is built; its tensors are filled in place. Called on every rank.

    Raises CheckpointError for a state of another model or optimizer, ResourceError for files that can't be read.
    """
    if resume is None or resume.load == "model":
        return
    saved = _module(resume)
    if "optimizer_step" not in saved:
        raise CheckpointError(
            f"{resume.folder} holds weights only (checkpoint.contents=model), and a run can't go on from those; start a new "
            "one from them with --resume PATH --load model"
        )
    live = trainer.state_to_fill()
    _refuse_other_weights(live["model"], saved["model"], resume)
    optimizer, into = _optimizer_into(trainer, live["optimizer"], saved, resume)
    rest = {**saved, "optimizer": {path: {"tensor": path} for path in into}}
    own, _ = split({"modules": {POLICY: {"model": live["model"]}}})
    state = read_state(resume.folder, rest, {**own, **into})
    state["optimizer"] = _filled(optimizer, state["optimizer"])
    trainer.go_on_from(state, counters=resume.load == "all")


def _optimizer_into(
    trainer: Trainer, live: Mapping[str, Any], saved: Mapping[str, Any], resume: Resume
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The saved state of the optimizer, laid out as this trainer's, with paths for tensors; and what each path is read into."""
    dimensions = {
        name: len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves no shape of the whole but this one
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    paths: dict[str, Any] = {path: _Path(path) for path in paths_in(saved["optimizer"])}
    found = in_layout_of(live, join(saved["optimizer"], paths), dimensions, steps=saved["optimizer_step"])
    into: dict[str, torch.Tensor] = {}
    if found is None or found.keys() != live.keys() or not _pair(found, live, into):
        raise CheckpointError(
            f"{resume.folder} holds the state of another kind of optimizer (trainer.master_weights, "
            "trainer.offload_optimizer); set these as they were, or start from the weights with --resume PATH --load model"
        )
    return found, into


@dataclass(frozen=True, slots=True)
class _Path:
    """Stands for the tensor of this path."""

    path: str


def _pair(saved: Any, live: Any, into: dict[str, torch.Tensor]) -> bool:
    """Note the live tensor for each path that stands in its place. False where the two are of different kinds.

    What never was stepped has kept nothing, and what is live has been.
    """
    if isinstance(saved, _Path):
        into[saved.path] = live
        return isinstance(live, torch.Tensor)
    if isinstance(saved, Mapping):
        same = isinstance(live, Mapping) and saved.keys() <= live.keys()
        return same and all(_pair(value, live[key], into) for key, value in saved.items())
    if isinstance(saved, list | tuple):
        same = isinstance(live, list | tuple) and len(saved) == len(live)
        return same and all(_pair(one, other, into) for one, other in zip(saved, live, strict=True))
    return not isinstance(live, torch.Tensor)


def _filled(value: Any, tensors: Mapping[str, Any]) -> Any:
    """`value` with tensors for paths."""
    if isinstance(value, _Path):
        return tensors[value.path]
    if isinstance(value, Mapping):
        return {key: _filled(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(inner, tensors) for inner in value)
    return value


def restore_randomness(resume: Resume | None, rank: int) -> None:
    """Put the generators of this rank where they stood, as far as there was such a rank."""
    if resume is not None and resume.load == "all":
        saved = join(read_rest(resume.folder)["random"], {})
        if rank < len(saved):
            restore_random_state(saved[rank])


def loop_state(resume: Resume | None) -> LoopState:
    """Where the loop goes on."""
    if resume is None or resume.load != "all":
        return LoopState()
    return LoopState.from_json(join(read_rest(resume.folder)["loop"], {}))


def _module(resume: Resume) -> dict[str, Any]:
    modules: dict[str, dict[str, Any]] = read_rest(resume.folder)["modules"]
    if POLICY not in modules:
        raise CheckpointError(
            f"{resume.folder} holds {', '.join(modules) or 'no modules'} and no {POLICY}; choose another checkpoint"
        )
    return modules[POLICY]


def _refuse_other_weights(own: Mapping[str, Any], saved: Mapping[str, Any], resume: Resume) -> None:
    strange = sorted(own.keys() ^ saved.keys())
    if strange:
        raise CheckpointError(
            f"{resume.folder} holds the weights of another model, or adapters in place of a model: {len(strange)} of "
            f"{len(own)} differ, first {strange[0]}; resume with the recipe that it was saved with"
        )
