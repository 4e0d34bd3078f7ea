"""What both kinds of file say in words of their own: how the weights are shared, in which type, and what a batch is."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.convert.part import Part

_ALONE = "there is one rank, and nothing to share"
BATCH = _TOTAL, _MICRO, _ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ACCUMULATED = "gradients are added up over as many rows as an optimizer step has, and summed over the ranks once"
_STAGES = {
    1: "each rank has a part of the optimizer's state",
    2: "ZeRO-2 cuts the optimizer's state and gradients, fsdp2 weights too: less memory, the same numbers, and weights "
    "travel in every pass; trainer.parallel=ddp keeps everything whole",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a file's words are read against."""

    recipe: Recipe
    """With the overrides of the command line."""
    started: int | None = None
    """Ranks that another program has started, such as torchrun."""
    starts_here: bool = False
    """Whether the ranks are about to be started, on this machine alone."""
    ranks: int = 1
    """Ranks of the trainer, whoever says so."""
    says_ranks: bool = False
    """Whether the recipe, whoever started them, or a file that names this one says how many ranks there are."""


def share_by_stage(part: Part, name: str, context: Context) -> int | None:
    """The ZeRO stage that `name` gives, after `trainer.parallel` was chosen by it."""
    stage = part.whole(name, least=0)
    if stage is None:
        return None
    if stage > 3:
        part.refuse(name, "ZeRO has the stages 0 to 3; give one of them")
        return None
    if context.ranks == 1:
        part.note(name, _ALONE)
    elif stage == 0:
        part.take(name, "trainer.parallel", "ddp", "each rank holds whole copies")
    elif stage == 3:
        part.take(name, "trainer.parallel", "deepspeed", "trainer.parallel=fsdp2 cuts the same, with PyTorch alone")
    else:
        part.take(name, "trainer.parallel", "zero1" if stage == 1 else "fsdp2", _STAGES[stage])
    return stage


def offload_optimizer(part: Part, name: str, device: str | None, *, cut: bool) -> None:
    """`trainer.offload_optimizer`, where `device` is `cpu` and the state is not `cut` over ranks."""
    if device == "nvme":
        part.refuse(name, "the optimizer's state is kept on a GPU or in CPU memory; give cpu or none")
    elif device == "cpu" and cut:
        part.refuse(
            name,
            "shards of the optimizer's state stay on their GPUs, where each rank has its part of it only; remove it, or set "
            "the stage to 0 for whole copies whose state is in CPU memory",
        )
    elif device == "cpu":
        part.take(name, "trainer.offload_optimizer", True, "float32 weights and gradients are there too, and it steps there")


def offload_parameters(part: Part, name: str, device: str | None) -> None:
    """Weights that wait outside the GPU are refused."""
    if device in ("cpu", "nvme"):
        part.refuse(
            name,
            "weights stay on the GPUs, cut over the ranks; set it to none, and use more ranks, model.lora or "
            "trainer.activations=full where memory is short",
        )


def half_precision(part: Part, name: str, kind: str | None) -> None:
    """`model.dtype`, from a file's word for a type: `no`, `bf16`, `fp16` or `fp8`."""
    if kind == "bf16":
        part.take(name, "model.dtype", "bfloat16", "with float32 copies that the optimizer steps (trainer.master_weights)")
    elif kind in ("fp16", "fp8"):
        part.refuse(name, f"there is no {kind} here, which needs scaled losses; use bf16, or no for float32")
    elif kind == "no":
        part.note(name, "model.dtype of the recipe says in which type the weights are")


def batch(part: Part, context: Context) -> None:
    """`rollout.groups_per_step`, from the trajectories of an optimizer step. Their numbers must multiply out, as they do there.

    Nothing else in a recipe has to divide by anything.
    """
    total, micro, accumulation = (part.whole(name) for name in BATCH)
    ranks, said, by = context.ranks, _TOTAL, ""
    if total is not None:
        _must_multiply_out(part, total, micro, accumulation, ranks)
    elif micro is not None:
        total, said = micro * (accumulation or 1) * ranks, _MICRO
        by = f"{micro} x {accumulation or 1} x {ranks} ranks = "
    if accumulation is not None:
        part.note(_ACCUMULATION, ACCUMULATED)
    if total is not None:
        _groups(part, said, total, context, by=by)


def _must_multiply_out(part: Part, total: int, micro: int | None, accumulation: int | None, ranks: int) -> None:
    """Refuse a batch that is not a whole number of micro-batches on every rank."""
    if micro is not None:
        part.note(_MICRO, "rows are packed up to trainer.row_tokens tokens, however many trajectories that is")
    if micro is not None and accumulation is not None:
        product = micro * accumulation * ranks
        if total != product:
            part.refuse(
                _TOTAL,
                f"it must be {_MICRO}={micro} x {_ACCUMULATION}={accumulation} x {ranks} ranks = {product}; set it to that",
            )
        return
    unit = (micro or accumulation or 1) * ranks
    if total % unit:
        by = f"{_MICRO}={micro} x " if micro else f"{_ACCUMULATION}={accumulation} x " if accumulation else ""
        part.refuse(_TOTAL, f"it must divide by {by}{ranks} ranks = {unit}; set it to {multiples(total, unit)}")


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` nearest to `value`, in words.

    >>> multiples(20, 8), multiples(3, 8)
    ('16 or 24', '8')
    """
    low = value - value % unit
    return " or ".join(str(near) for near in (low, low + unit) if near)


def _groups(part: Part, name: str, total: int, context: Context, *, by: str) -> None:
    """Trajectories of an optimizer step, as whole groups of siblings."""
    size, cuts = context.recipe.rollout.group_size, context.recipe.trainer.optimizer_steps_per_batch
    if total % size:
        divisors = [part for part in range(2, total + 1) if total % part == 0]
        nearest_size = min(divisors, key=lambda divisor: (abs(divisor - size), divisor)) if divisors else size
        fix = f"make it {multiples(total, size)}" + (f", or set rollout.group_size={nearest_size}" if divisors else "")
        part.refuse(
            name, f"{by}{total} trajectories are no whole number of groups of rollout.group_size={size} siblings; {fix}"
        )
        return
    cut = f" x trainer.optimizer_steps_per_batch={cuts}" if cuts > 1 else ""
    part.take(
        name,
        "rollout.groups_per_step",
        total // size * cuts,
        f"{by}{total} trajectories of an optimizer step / rollout.group_size={size}{cut}",
    )
