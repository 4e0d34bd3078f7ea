"""Shards as DeepSpeed keeps them (ZeRO-3): its engine runs the forward pass, sums gradients and holds the optimizer's state.

Each parameter is cut flat over all ranks. A module's parameters are gathered before it runs and given back after it. DeepSpeed
sums and divides after every row; what it divides by is multiplied in again, since a loss is a sum over all ranks' tokens.
Torch's own optimizers step its float32 partitions, so that nothing has to be compiled.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyturn.config.memory import Held, Placed
from polyturn.errors import ConfigError, MissingDependencyError, ModelError
from polyturn.models.adapters import pushed_weights
from polyturn.trainer.optimizer import PolicyOptimizer, clip_by
from polyturn.trainer.parallel import met
from polyturn.trainer.ranks import ProcessRanks, Ranks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.sharding import run_by, same_parameters
from polyturn.trainer.update_rules import build_rule

_MASTER, _STEP, _STEPS = "master", "step", "steps"


class Gathered(torch.Tensor):
    """A tensor of which this rank holds a part, with its whole shape: `full_tensor` gathers it, a collective of all ranks."""

    _gather: Callable[[], Tensor]

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, device: torch.device, gather: Callable[[], Tensor]) -> Gathered:
        """One that `gather` makes whole."""
        tensor: Gathered = torch.Tensor._make_wrapper_subclass(Gathered, torch.Size(shape), dtype=dtype, device=device)
        tensor._gather = gather
        return tensor

    def full_tensor(self) -> Tensor:
        """The whole tensor."""
        return self._gather()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        """Nothing can be computed with it."""
        raise NotImplementedError(f"{function} of a tensor whose parts lie on several ranks; gather it first")


class _Policy(torch.nn.Module):
    """What DeepSpeed's engine runs: any work that uses `model`, whose parameters it gathers meanwhile."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Zero3:
    """See `Layout`. Raises MissingDependencyError without DeepSpeed."""

    lockstep = True

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None
    ) -> None:
        assert isinstance(ranks, ProcessRanks), "shards need processes"
        self._deepspeed = load_deepspeed(settings.device)
        self.utils: Any = self._deepspeed.utils
        """DeepSpeed's own way to a parameter's parts."""
        refuse_apart_experts(model)
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # where DeepSpeed brings weights to
        os.environ.setdefault("LOCAL_RANK", str(ranks.rank))
        self._model, self._settings, self._ranks = model, settings, ranks
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._computes_in = next(model.parameters()).dtype
        self._deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
        # Cut parameters have no dimensions that a rule could tell matrices by.
        self.engine = self._cut(model, build_rule([(one, one.ndim) for one in self._trained.values()], settings))
        self._optimizer = Zero3Optimizer(self, self._trained, masters=self._computes_in != torch.float32)
        for name, value in (exact or {}).items():
            if name in self._trained:
                self.set_master(self._trained[name], value)

    def cut_reference(self, model: torch.nn.Module) -> None:
        """See `Layout.cut_reference`."""
        self._cut(model.requires_grad_(False), None)

    def optimizer(self) -> Zero3Optimizer:
        """See `Layout.optimizer`."""
        return self._optimizer

    @contextmanager
    def row(self, *, last: bool) -> Iterator[None]:
        """See `Layout.row`: gradients are summed after each."""
        with self.meeting("a forward and backward pass"):
            yield

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """See `Layout.meeting`."""
        return met(self._ranks, what)

    def sum_and_clip(self, gradients: list[Tensor], longest: float, what: str) -> Tensor:
        """See `Layout.sum_and_clip`: DeepSpeed has averaged them."""
        torch._foreach_mul_(gradients, float(self._ranks.size))
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).double().sum()
        self._ranks.sum_in_place([squares], what)
        norm = squares.sqrt().float()
        clip_by(gradients, norm, longest)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """See `Layout.weights`."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return {
            name: self._gathered(parameters[name]) if name in parameters else tensor
            for name, tensor in pushed_weights(self._model).items()
        }

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See `Layout.whole`."""
        one, parameters = same_parameters(self._model), dict(self._model.named_parameters())
        with self.meeting(f"the shards of {names[0] if names else 'nothing'}"):
            owners = list(dict.fromkeys(one.get(name, name) for name in names))
            held = [parameters[owner] for owner in owners if owner in parameters]
            with self._deepspeed.zero.GatheredParameters(held):
                whole = {owner: parameters[owner].detach().clone() for owner in owners if owner in parameters}
        state = self._model.state_dict()
        return {name: whole[owner] if (owner := one.get(name, name)) in whole else state[name].detach() for name in names}

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """See `Layout.overwrite`: rank 0's are taken, and float32 partitions start from them."""
        one, parameters = same_parameters(self._model), dict(self._model.named_parameters())
        state = self._model.state_dict()
        for name, value in weights.items():
            if name not in parameters:
                if name not in one:
                    state[name].copy_(value)
                continue
            with self._deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                parameters[name].data.copy_(value)
            if name in self._trained:
                self.set_master(self._trained[name], value)

    def to_fill(self, optimizer: PolicyOptimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Layout.to_fill`: whole tensors in CPU memory."""
        self._optimizer.make_state()
        found: dict[str, Any] = _empty(state())
        return found

    def set_master(self, parameter: Any, whole: Tensor, kind: str | None = None) -> None:
        """Take this rank's part of `whole` for the float32 partition, or for the optimizer's average `kind`."""
        size = parameter.ds_tensor.numel()
        flat = torch.zeros(size * self._ranks.size, dtype=torch.float32, device=parameter.device)
        flat[: whole.numel()] = whole.detach().reshape(-1)
        own = flat[self._ranks.rank * size :][:size]
        if kind is None:
            self.utils.safe_set_local_fp32_param(parameter, own)
        else:
            self.utils.safe_set_local_optimizer_state(parameter, own, kind)

    def _cut(self, model: torch.nn.Module, rule: torch.optim.Optimizer | None) -> Any:
        """Cut `model` over the ranks, a parameter at a time, and have an engine run what uses it."""
        config = _config(self._computes_in)
        self._deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=self._computes_in)
        policy = _Policy(model)
        engine = self._deepspeed.initialize(model=policy, optimizer=rule, config=config, dist_init_required=False)[0]
        run_by(model, engine)
        return engine

    def _gathered(self, parameter: Any) -> Tensor:
        def gather() -> Tensor:
            with self._deepspeed.zero.GatheredParameters([parameter]):
                whole: Tensor = parameter.detach().clone()
            return whole

        return Gathered.of(parameter.ds_shape, parameter.dtype, parameter.device, gather)


class Zero3Optimizer:
    """See `PolicyOptimizer`. Its state is by name of the parameter, as that of `ShardOptimizer`."""

    def __init__(self, layout: Zero3, trained: Mapping[str, Any], *, masters: bool) -> None:
        self._layout, self._trained, self._masters = layout, trained, masters
        self._utils = layout.utils
        self._gradients: list[Tensor] = []
        self._steps = 0

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`: those of this rank's parts."""
        self._gradients = [self._utils.safe_get_local_grad(parameter) for parameter in self._trained.values()]
        return self._gradients

    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`."""
        for parameter, gradient in zip(self._trained.values(), self._gradients, strict=True):
            self._utils.safe_set_local_grad(parameter, gradient)
        engine = self._layout.engine
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        self._steps += 1

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        self._gradients = []
        self._layout.engine.optimizer.zero_grad()
        for parameter in self._trained.values():
            # DeepSpeed copies over what is there, but for a parameter that the next pass has no gradient of.
            self._utils.safe_set_local_grad(parameter, torch.zeros_like(parameter.ds_tensor, dtype=torch.float32))

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyOptimizer.state_dict`: by name of the parameter, and how many steps were made."""
        kinds = self._kinds()
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._trained.items():
            found[name] = {kind: self._whole(parameter, kind) for kind in kinds}
            if kinds:
                found[name][_STEP] = torch.tensor(float(self._steps))
            if self._masters:
                found[name][_MASTER] = self._whole(parameter, None)
        return {"parameters": found, _STEPS: self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`. Takes whole tensors."""
        self.make_state()
        self._steps = int(state[_STEPS])
        for name, saved in state["parameters"].items():
            for kind, value in saved.items():
                if kind != _STEP:
                    self._layout.set_master(self._trained[name], value, None if kind == _MASTER else kind)
        for kept in self._rule().state.values():
            if _STEP in kept:
                kept[_STEP].fill_(float(self._steps))

    def make_state(self) -> None:
        """Make the averages that the first step would make."""
        rule = self._rule()
        if not isinstance(rule, torch.optim.AdamW) or self._kinds():
            return
        for part in self._layout.engine.optimizer.fp32_partitioned_groups_flat:
            averages = {kind: torch.zeros_like(part.data) for kind in ("exp_avg", "exp_avg_sq")}
            rule.state[part] = {_STEP: torch.zeros((), device=part.device), **averages}

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`: this rank's part."""
        zero = self._layout.engine.optimizer
        parts = sum(part.numel() for part in zero.fp32_partitioned_groups_flat)
        weights = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in self._layout.engine.module.parameters())
        state = sum(value.numel() * value.element_size() for kept in self._rule().state.values() for value in kept.values())
        return Placed(device=Held(weights=weights, gradients=4 * parts, master=4 * parts, optimizer_state=state))

    def _rule(self) -> torch.optim.Optimizer:
        rule: torch.optim.Optimizer = self._layout.engine.optimizer.optimizer
        return rule

    def _kinds(self) -> list[str]:
        kept: Mapping[str, Any] = next(iter(self._rule().state.values()), {})
        return [kind for kind, value in kept.items() if kind != _STEP and isinstance(value, Tensor)]

    def _whole(self, parameter: Any, kind: str | None) -> Tensor:
        if kind is None:
            gather = partial(self._utils.safe_get_full_fp32_param, parameter)
        else:
            gather = partial(self._utils.safe_get_full_optimizer_state, parameter, kind)
        return Gathered.of(parameter.ds_shape, torch.float32, parameter.device, gather)


def refuse_apart_experts(model: torch.nn.Module) -> None:
    """Raise ModelError for experts that are modules of their own: DeepSpeed waits where ranks use different ones."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and name.endswith("experts"):
            raise ModelError(
                f"{name} of this model is a list of experts, and ranks of DeepSpeed hang where they use different ones; set "
                "trainer.parallel=fsdp2"
            )


def load_deepspeed(device: str) -> Any:
    """The package, for ranks on `device`. Raises MissingDependencyError."""
    if torch.device(device).type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise MissingDependencyError(
            f"trainer.parallel=deepspeed needs DeepSpeed ({error}); pip install 'polyturn[deepspeed]', or use "
            "trainer.parallel=fsdp2, which cuts the same"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # it calls some by their older names
    # Gloo does what this would do; it would be compiled while a rank starts.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _config(dtype: torch.dtype) -> dict[str, Any]:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"trainer.parallel=deepspeed with weights of {dtype}; set model.dtype=bfloat16 or float32")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


def _empty(tree: Any) -> Any:
    """`tree` with whole tensors in CPU memory in the place of all its tensors."""
    if isinstance(tree, Mapping):
        return {key: _empty(value) for key, value in tree.items()}
    return torch.empty(tree.shape, dtype=tree.dtype) if isinstance(tree, Tensor) else tree
