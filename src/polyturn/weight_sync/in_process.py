"""The `in_process` bridge: the engine has its own copy of the model in this process, and a push copies every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from polyturn.weight_sync.base import WeightTarget, check_coverage, check_equal, check_frozen, confirmed


class InProcessBridge:
    """Copies `source()` into `target`; checksums are compared at the first push and at every `verify_every`-th.

    `frozen` gives what no push brings, of the trainer and of the engine: it is compared before the first push.
    """

    def __init__(
        self,
        source: Callable[[], Mapping[str, torch.Tensor]],
        target: WeightTarget,
        *,
        verify_every: int,
        deadline_s: float,
        frozen: Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._verify_every = verify_every
        self._deadline_s = deadline_s
        self._frozen = frozen
        self._pushes = 0

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightBridge.seconds`: there are no phases."""
        return {}

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`."""
        if self._frozen is not None and self._pushes == 0:
            check_frozen(*self._frozen())
        weights = self._source()
        check_coverage(weights, self._target.named_weights())
        await confirmed(version, lambda: self._target.update_weights(weights, version), self._deadline_s)
        if self._pushes % self._verify_every == 0:
            check_equal(weights, self._target.named_weights(), version)
        self._pushes += 1

    async def hold(self, version: int) -> None:
        """Nothing: the engine's weights are its own."""

    async def close(self) -> None:
        """Nothing to give back."""
