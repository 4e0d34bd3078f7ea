"""Every rank's weights as those of an engine server beside it: what rank 0 asks of the others for the `single_copy` bridge."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from polyturn.trainer.ranks import Ranks
from polyturn.weight_sync.shared_tensors import SharedTensors
from polyturn.weight_sync.single_copy import SharedModel, refuse_other_count

_ADOPT, _CHECK = "adopt", "check adopted"


class BesideEngines:
    """See `single_copy_server.SharedParameters`, whose methods are rank 0's; the other ranks `heard` what it says.

    `weights` and `whole` are those of a policy that is cut, of which `model` is this rank's part.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ranks: Ranks,
        *,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        whole: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._own = SharedModel(model)
        self._ranks = ranks
        self.weights = weights or self._own.weights
        """Every tensor by name, with whole shapes."""
        self.whole = whole or self._own.whole
        """Every tensor by name, with all its numbers."""

    def adopt(self, places: Sequence[SharedTensors]) -> None:
        """Make the parameters of rank N views of the tensors at place N, which get their values.

        Raises WeightSyncError for what can't be so, RankError where it can't on another rank, which says why.
        """
        refuse_other_count(places, self._ranks.size)
        with self._ranks.tell(_ADOPT, [json.dumps(place.to_json()).encode() for place in places[1:]]):
            self._adopt(places[0])

    def check_adopted(self) -> None:
        """Wait for all devices. Raises WeightMismatchError, or RankError, unless all parameters are what they adopted."""
        with self._ranks.tell(_CHECK):
            self._check()

    def heard(self, word: str, payload: bytes) -> bool:
        """Do what rank 0 says; False where it is not for this. Raises what rank 0's methods raise."""
        if word == _ADOPT:
            self._adopt(SharedTensors.from_json(json.loads(payload)))
        elif word == _CHECK:
            self._check()
        return word in (_ADOPT, _CHECK)

    def _adopt(self, place: SharedTensors) -> None:
        self._own.adopt([place])
        self._ranks.gather(None, "the weights of every rank to be its engine's")

    def _check(self) -> None:
        self._own.check_adopted()
        self._ranks.gather(None, "every rank to look at its weights")
