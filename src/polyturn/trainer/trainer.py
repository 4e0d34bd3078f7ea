"""Runs the optimizer steps of a batch: score rows, sum their losses backward, step.

Every loss is a plain sum of weighted per-token losses, with weights fixed over the whole optimizer step, so the gradient
does not depend on how the tokens are cut into rows, nor on how the rows are dealt to the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from polyturn.errors import DeviceMemoryError, NonFiniteError, RankError, TrainingError
from polyturn.processes.garbage import put_aside
from polyturn.trainer.beside_engines import BesideEngines
from polyturn.trainer.context_attention import CutProbe, attend_across
from polyturn.trainer.layers import prepare_layers
from polyturn.trainer.optimizer import learning_rate_at
from polyturn.trainer.parallel import OnDemand, ShardedWeights, context_of, lay_out
from polyturn.trainer.passes import Passes, Prepared
from polyturn.trainer.random_state import RandomState, random_state
from polyturn.trainer.ranks import Alone, Ranks
from polyturn.trainer.record import Record
from polyturn.trainer.reference import present, reference_of, without_gradient
from polyturn.trainer.row import one_sample
from polyturn.trainer.scorer import Scorer, refuse_mixed_samples
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.sharding import same_parameters
from polyturn.trainer.shared_prefixes import sharing_of
from polyturn.trainer.shares import Share, from_bytes, share_out, to_bytes
from polyturn.trainer.whole import gather_shards
from polyturn.types import TrainBatch
from polyturn.weight_sync.base import WeightSource, WholeWeights, checksum
from polyturn.weight_sync.transfer import BUCKET_BYTES, buckets

Result = TypeVar("Result")
Contents: TypeAlias = Literal["all", "model"]

_TRAIN, _GATHER, _SCORE, _SAVE, _END = "train", "gather", "score", "save", "end"
_COMPILING = 2
"""Steps that compile, as a rule: the first, and one with rows of another length."""


class Trainer:
    """Owns the policy being trained. `version` counts batches trained on: the version that a push would carry.

    `reference` is the frozen policy of the KL term, on the model's device or in CPU memory; the model itself stands for itself
    with its adapters off. Without one `settings.loss.beta` must be 0. With several `ranks`, each has the same model: rank 0
    calls `train` and at last `end`, the others `serve`. `exact` are float32 values, by name, that the model's are rounded from.

    Raises ModelError for an architecture that can't be trained on packed rows, TrainingError for ranks whose weights differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: TrainerSettings,
        *,
        reference: torch.nn.Module | None = None,
        version: int = 0,
        ranks: Ranks | None = None,
        exact: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert reference is not None or settings.loss.beta == 0, "a KL term needs a reference"
        self.model = model.eval()
        self._ranks: Ranks = ranks or Alone()
        self._refuse_different("weights", sum(checksum(tensor) for tensor in model.state_dict().values()) if ranks else 0)
        self._layout = lay_out(model, settings, self._ranks, exact)
        if reference is not None and reference is not model:
            self._layout.cut_reference(reference)
        self._score = Scorer(self.model, float32_head=settings.float32_head)
        refuse_mixed_samples(self._score)
        self.sharing = sharing_of(self._score, settings.share_prefixes)
        """When the rows that this trainer is given should have common beginnings once; None for never."""
        self._context = context_of(settings, self._ranks)
        if self._context is not None:
            self._cut_rows(reference)
        prepare_layers(self.model, activations=settings.activations, compiled=settings.compiled)
        self._compiling = _COMPILING if settings.compiled else 0
        self._reference = reference_of(reference, self.model, self._score, partial(Scorer, float32_head=settings.float32_head))
        self.settings = settings
        self._together = settings.context_ranks * settings.tensor_ranks
        """Ranks that get the same rows."""
        self._speaks = self._ranks.rank % settings.tensor_ranks == 0
        """Whether this rank's numbers count, of those that have the same."""
        self._passes = Passes(
            self._score,
            settings,
            layout=self._layout,
            ranks=self._ranks,
            context=self._context,
            reference=self._reference,
            speaks=self._speaks,
        )
        self.version = version
        self.optimizer_step = 0
        self._device = next(model.parameters()).device
        self.optimizer = self._layout.optimizer()
        parts: dict[str, Any] = {"weights": self.weights, "whole": self.whole} if self._layout.lockstep else {}
        self.beside_engines = BesideEngines(model, self._ranks, **parts)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor that a push has to bring to an engine, by name: all of them, or the adapters where those are trained.

        Of a sharded policy they have whole shapes and this rank's numbers; see `gather`.
        """
        return self._layout.weights()

    def source(self) -> WeightSource:
        """The weights as a bridge wants them. On rank 0."""
        return ShardedWeights(self.weights, self.gather) if self._layout.lockstep else WholeWeights(self.weights)

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """On rank 0, with all others in `serve`: whole tensors of the model's state by name, as the policy computes with them.

        Raises RankError.
        """
        if not self._layout.lockstep:
            return self._layout.whole(names)
        with self._ranks.tell(_GATHER, [json.dumps(list(names)).encode()] * (self._ranks.size - 1)):
            return self._layout.whole(names)

    def whole(self, names: Iterable[str] | None = None) -> Mapping[str, Tensor]:
        """On rank 0: these tensors of the model's state, those of `weights` when None, whole.

        Where they are shards, they are gathered when they are asked for, some at a time, and not kept.
        """
        if not self._layout.lockstep:
            return self._layout.whole(list(self.weights() if names is None else names))
        together = buckets(self.weights(), BUCKET_BYTES) if names is None else ([name] for name in names)
        return OnDemand(together, self.gather)

    def state_to_save(self) -> dict[str, Tensor] | None:
        """On rank 0: what an export writes, gathered bucket by bucket into CPU memory; None where the model holds it whole.

        It has the type that the policy computes in. Raises RankError.
        """
        if not self._layout.lockstep:
            return None
        same, weights = same_parameters(self.model), self.weights()
        owners = {name: same.get(name, name) for name in weights}
        together = buckets({owner: weights[owner] for owner in owners.values()}, BUCKET_BYTES)
        state = {name: whole.to("cpu") for names in together for name, whole in self.gather(names).items()}
        return {name: state[owner] for name, owner in owners.items()}

    def logprobs_of(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """On rank 0: log-probabilities of `ids` after `prompt`, at temperature 1. Raises RankError."""
        asked = json.dumps([list(prompt), list(ids)]).encode()
        with self._ranks.tell(_SCORE, [asked] * (self._ranks.size - 1)) if self._layout.lockstep else nullcontext():
            return self._logprobs_of(prompt, ids)

    def train(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """All optimizer steps of one training step: `num_iterations` passes over `batches`, one step each.

        With more than one optimizer step the old policy is the one from before the first: its log-probabilities are
        computed once, by an extra forward. With exactly one they are the forward's own, and every ratio is exactly 1.

        Raises:
            NonFiniteError: a loss, a log-probability or a gradient is nan or inf; the weights are those before the step.
            RankError: another rank ended or is late.
        """
        on_policy, even = not self._several(len(batches)), self._layout.lockstep
        together = self._together
        shares = share_out(batches, self._ranks.size // together, self.settings, on_policy=on_policy, equally_many=even)
        payloads = [to_bytes(share) for share in shares for _ in range(together)]
        with self._ranks.tell(_TRAIN, payloads[1:]):
            return self._train(shares[0])

    def serve(self) -> None:
        """On ranks other than 0: do what rank 0 says, until it ends. Raises what `train` raises."""
        while True:
            word, payload = self._ranks.hear()
            if word == _END:
                self._ranks.leave()
                return
            if word == _TRAIN:
                self._train(from_bytes(payload))
            elif word == _SAVE:
                self._save("model" if payload == b"model" else "all")
            elif word == _GATHER:
                self._layout.whole(json.loads(payload))
            elif word == _SCORE:
                self._logprobs_of(*json.loads(payload))
            elif not self.beside_engines.heard(word, payload):
                raise RankError(f"rank 0 said {word!r}, which no rank knows; all ranks must run the same version of Polyturn")

    def state(self, contents: Contents = "all") -> dict[str, Any]:
        """What a later trainer goes on from, with the live tensors: the trained weights, the optimizer, both counters.

        `contents` "model" leaves the optimizer and its steps out, but for float32 copies of the weights.
        """
        state: dict[str, Any] = {
            "model": self._layout.weights(),
            "optimizer": self.optimizer.state_dict(),
            "trained": [name for name, parameter in self.model.named_parameters() if parameter.requires_grad],
            "optimizer_step": self.optimizer_step,
            "version": self.version,
        }
        if contents == "model":
            optimizer, _ = state.pop("optimizer"), state.pop("optimizer_step")
            if "masters" in optimizer:
                state["optimizer"] = {"masters": optimizer["masters"]}
        return state

    def state_to_fill(self) -> dict[str, Any]:
        """`state` with a place for everything that an optimizer keeps, which it makes only when it first steps."""
        return self._layout.to_fill(self.optimizer, self.state)

    @torch.no_grad()
    def go_on_from(self, state: Mapping[str, Any], *, counters: bool = True) -> None:
        """Take over a `state`, whose tensors may be those of `state_to_fill`. Called on every rank.

        Without `counters` the versions and the schedule start anew. Raises TrainingError when ranks have read different ones.
        """
        self._layout.overwrite(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if counters:
            self.optimizer_step, self.version = state["optimizer_step"], state["version"]
        if self._ranks.size > 1 and not self._layout.lockstep:  # of shards, every rank has others
            self._refuse_different("weights of the checkpoint", sum(map(checksum, self.weights().values())))

    def save(self, copy: Callable[[dict[str, Any], list[RandomState]], Result], contents: Contents = "all") -> Result:
        """On rank 0: call `copy` with `state`, and where each rank's random numbers stand; returns what it returns.

        The other ranks help to gather what is sharded, tensor by tensor in the order of the state.
        """
        with self._ranks.tell(_SAVE, [contents.encode()] * (self._ranks.size - 1)), self._layout.meeting("a save"):
            randomness = self._ranks.gather(random_state(), "the random states of all ranks")
            return copy(self.state(contents), randomness)

    def end(self) -> None:
        """On rank 0: let the others go. The trainer trains no more."""
        with self._ranks.tell(_END):
            pass
        self._ranks.leave()

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Add the gradient of `batch` to the parameters, as one on-policy optimizer step would. Raises NonFiniteError."""
        (shares,) = share_out([batch], 1, self.settings, on_policy=True)
        self.model.eval()
        record = Record()
        with present(self._reference):
            prepared = self._passes.prepare(shares[0], record, version=self.version, keep_old=False)
        self._forward_backward(prepared, record)
        return record.metrics([record.note()])

    def optim_step(self) -> None:
        """Clip, step, clear the gradient. Raises NonFiniteError before it touches the weights."""
        self._optim_step(Record())

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, contents: Contents) -> None:
        """What the other ranks do while rank 0 saves."""
        self._ranks.gather(random_state(), "the random states of all ranks")
        with self._layout.meeting("a save"):
            gather_shards(self.state(contents))

    def _logprobs_of(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        self.model.eval()
        with self._layout.meeting("the log-probabilities of a few tokens"):
            (logprobs_N,) = without_gradient(self._score, [one_sample(prompt, ids, self._device)])
        return [float(value) for value in logprobs_N]

    def _several(self, num_batches: int) -> bool:
        return self.settings.num_iterations * num_batches > 1

    def _train(self, shares: Sequence[Share]) -> dict[str, float]:
        try:
            metrics = self._train_shares(shares)
        except torch.OutOfMemoryError as error:
            longest = max((len(row.input_ids) for share in shares for row in share.rows), default=0)
            raise DeviceMemoryError(_out_of_memory(error, self.settings, longest)) from error
        if self._compiling:
            self._compiling -= 1
            put_aside()
        return metrics

    def _train_shares(self, shares: Sequence[Share]) -> dict[str, float]:
        # Dropout stays off: the policy that is trained is the one that sampled.
        self.model.eval()
        record = Record()
        with present(self._reference), self._layout.meeting("the log-probabilities of a step's rows"):
            keep_old = self._several(len(shares))
            prepared = [self._passes.prepare(share, record, version=self.version, keep_old=keep_old) for share in shares]
        for _ in range(self.settings.num_iterations):
            for share in prepared:
                self._forward_backward(share, record)
                self._optim_step(record)
        self.version += 1
        note = record.note() if self._speaks else Record().note()
        return record.metrics(self._ranks.gather(note, "the metrics of a step"))

    def _cut_rows(self, reference: torch.nn.Module | None) -> None:
        """Let the models attend across the ranks that share rows. Raises ModelError where that changes what they compute."""
        assert self._context is not None
        with self._layout.meeting("the first cut row"):
            probe = CutProbe(self._score, self._context)
            for model in {id(model): model for model in (self.model, reference) if model is not None}.values():
                attend_across(model)
            gap = probe.gap()
        probe.refuse(self._ranks.gather(gap, "the first cut row of all ranks"))

    def _forward_backward(self, batch: Prepared, record: Record) -> None:
        total = self._passes.forward_backward(batch, record, f"the loss of optimizer step {self.optimizer_step}")
        self._refuse_non_finite("loss", total)

    def _optim_step(self, record: Record) -> None:
        record.learning_rate = learning_rate_at(self.optimizer_step, self.settings)
        what = f"the gradients of optimizer step {self.optimizer_step}"
        norm = self._layout.sum_and_clip(self.optimizer.gradients(), self.settings.max_grad_norm, what)
        self._refuse_non_finite("gradient norm", norm)
        if self.optimizer_step == 0:
            self._refuse_different("gradient norm of the first step", float(norm) if self._ranks.size > 1 else 0.0)
        self.optimizer.step(record.learning_rate)
        self.optimizer.zero_grad()
        self.optimizer_step += 1
        record.grad_norms.append(norm.detach())

    def _refuse_different(self, what: str, value: float) -> None:
        """Raise TrainingError unless all ranks have the same value."""
        values = self._ranks.gather(value, f"the {what} of all ranks")
        wrong = [rank for rank, other in enumerate(values) if other != values[0]]
        if wrong:
            raise TrainingError(
                f"the {what} differs between rank 0 ({values[0]}) and rank {wrong[0]} ({values[wrong[0]]}): they would train "
                "two policies; give every rank the same model folder, and the same kind of device"
            )

    def _refuse_non_finite(self, what: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"the {what} is {float(value)} in optimizer step {self.optimizer_step}, so training can't go on; the "
                "weights are those of the step before, and this step's trajectories are in the run folder"
            )


def _out_of_memory(error: BaseException, settings: TrainerSettings, longest: int) -> str:
    """What ran out, and what to change, the cheapest first."""
    changes = [f"trainer.row_tokens below {longest} (never below the longest trajectory)"]
    if settings.activations != "full":
        changes.append("trainer.activations=full")
    if not settings.offload_optimizer:
        changes.append("trainer.offload_optimizer=true")
    changes.append("model.lora")
    said = next(iter(str(error).splitlines()), "").removeprefix("CUDA out of memory. ").split(" Of the allocated")[0]
    return (
        f"the GPU ran out of memory in a training step with rows of up to {longest} tokens ({said}); set one of "
        f"{', '.join(changes)}; docs/memory.md has what each saves"
    )
