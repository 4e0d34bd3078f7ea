"""Float32 copies of the trained parameters, which the optimizer changes in their place, here or in CPU memory.

The gradient of every row is added to the copy's own, in float32, as soon as autograd has it, and given back: many rows add up
without losing the small ones among them, and no second set of gradients is ever held.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyturn.config.memory import Held, Placed
from polyturn.trainer.in_place import apply, bytes_of, forget_gradients, gradient_bytes, gradient_of, state_bytes
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.update_rules import build_rule

_CPU = torch.device("cpu")


class MasterOptimizer:
    """See `PolicyOptimizer`. With `settings.offload_optimizer` copies, gradients and state lie in CPU memory.

    A copy starts at its parameter's `exact` value where that is known. From the rounded one, in the middle between two
    roundings, no parameter of usual size would move for the first hundreds of small steps.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        settings: TrainerSettings,
        exact: Sequence[Tensor | None] | None = None,
    ) -> None:
        starts = exact or [None] * len(parameters)
        self._offloaded: list[_Offloaded] = []
        if settings.offload_optimizer:
            lane = _Lane(parameters[0].device)
            self._offloaded = [_Offloaded(*pair, lane) for pair in zip(parameters, starts, strict=True)]
        self._masters: list[_Master] = [*self._offloaded] or [_Master(*pair) for pair in zip(parameters, starts, strict=True)]
        self._copies = [master.copy for master in self._masters]
        self._rule = build_rule([(copy, copy.ndim) for copy in self._copies], settings)
        # Whoever trains the model next has an optimizer of its own: this one takes no gradients once it is gone.
        hooks = [master.hook() for master in self._masters]
        weakref.finalize(self, _remove, hooks)

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`; waits for those that are on their way to CPU memory."""
        for master in self._masters:
            master.settle()
        return [gradient_of(copy) for copy in self._copies]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`; a parameter becomes its copy, rounded to the nearest."""
        self.gradients()  # whoever changed none of them need not have asked
        apply(self._rule, learning_rate)
        if not self._offloaded:
            torch._foreach_copy_([master.parameter for master in self._masters], [*self._copies])
        for master in self._offloaded:
            master.give()

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        for master in self._masters:
            master.forget()
        forget_gradients(self._copies)

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyOptimizer.state_dict`."""
        return {"masters": [copy.detach() for copy in self._copies], "rule": self._rule.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`."""
        for copy, saved in zip(self._copies, state["masters"], strict=True):
            copy.copy_(saved)
        self._rule.load_state_dict(state["rule"])

    def rules(self) -> list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
        """The one rule with the copies, in the order of the parameters."""
        return [(self._rule, self._copies)]

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`."""
        weights = bytes_of(master.parameter for master in self._masters)
        kept = {"master": bytes_of(self._copies), "optimizer_state": state_bytes([self._rule])}
        staging = bytes_of(master.staging for master in self._masters if master.staging is not None)
        gradients = gradient_bytes(self._copies) + staging
        if self._offloaded:
            return Placed(device=Held(weights=weights), cpu=Held(gradients=gradients, **kept))
        return Placed(device=Held(weights=weights, gradients=gradients, **kept))


class _Master:
    """One parameter and its float32 copy on the same device."""

    staging: Tensor | None = None

    def __init__(self, parameter: torch.nn.Parameter, start: Tensor | None) -> None:
        self.parameter = parameter
        if start is None:
            start = parameter.detach().to(torch.float32, copy=True)
        self.copy = torch.nn.Parameter(start.to(parameter.device, torch.float32))

    def hook(self) -> Any:
        """Take gradients from now on, until what is returned is told to `remove`."""
        return self.parameter.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def take(self, parameter: Tensor) -> None:
        """Autograd has added to `parameter.grad`: add it up here instead."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "called when there is a gradient"
        self._add(gradient)

    def settle(self) -> None:
        """Wait until all that was taken is added up."""

    def forget(self) -> None:
        """Drop what was taken and not added up."""
        self.parameter.grad = None

    def _add(self, gradient: Tensor) -> None:
        if self.copy.grad is None:
            self.copy.grad = gradient.to(torch.float32, copy=True)
        else:
            self.copy.grad += gradient


class _Lane:
    """The way from a device to CPU memory: a stream of its own, so that copies run beside the backward pass."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.pinned else None  # type: ignore[no-untyped-call]

    def fetch(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start to copy; the event, where there is one, comes when it is done."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            arrival: torch.cuda.Event = self._stream.record_event()
            return arrival


class _Offloaded(_Master):
    """One parameter, its float32 copy in CPU memory, and the buffer through which both directions pass.

    The buffer has the parameter's own type, so that half as much travels; its content is added up when the next row's
    gradient comes, or when all are asked for.
    """

    staging: Tensor

    def __init__(self, parameter: torch.nn.Parameter, start: Tensor | None, lane: _Lane) -> None:
        self.parameter = parameter
        self._lane = lane
        pinned: dict[str, Any] = {"device": _CPU, "pin_memory": lane.pinned}
        self.staging = torch.empty(parameter.shape, dtype=parameter.dtype, **pinned)
        self.copy = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, **pinned))
        self.copy.data.copy_(parameter.detach() if start is None else start)
        self._on_its_way = False
        self._arrival: torch.cuda.Event | None = None

    def take(self, parameter: Tensor) -> None:
        self.settle()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "called when there is a gradient"
        self._arrival = self._lane.fetch(gradient, self.staging)
        self._on_its_way = True

    def settle(self) -> None:
        if not self._on_its_way:
            return
        self._on_its_way = False
        if self._arrival is not None:
            self._arrival.synchronize()
        self._add(self.staging)

    def give(self) -> None:
        """The copy becomes the parameter."""
        # Rounded here, before it travels. The next gradient comes into the same buffer after this copy: the lane waits for it.
        self.staging.copy_(self.copy)
        self.parameter.copy_(self.staging, non_blocking=True)

    def forget(self) -> None:
        self.parameter.grad = None
        self._on_its_way = False


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
