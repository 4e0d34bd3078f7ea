"""A study as lines to read and as an object for JSON."""

from __future__ import annotations

from typing import Any

from polyturn.config.arithmetic import batch_arithmetic, sentences
from polyturn.plan.batch_words import batch_words, indivisible, word_lines
from polyturn.plan.hardware import Machine
from polyturn.plan.money import cost_lines
from polyturn.plan.picture import picture
from polyturn.plan.planner import GIB, HEADROOM, GpuPlan, Plan
from polyturn.plan.speed import StepTime
from polyturn.plan.splits import Split, split_lines
from polyturn.plan.study import Study, Verdict
from polyturn.plan.suggest import Suggestion

_PHASES = {"always": "", "training": "while it trains", "scoring": "while it scores", "generating": "while it generates"}


def lines(study: Study) -> list[str]:
    """The report, a line an item."""
    plan, machine = study.plan, study.machine
    found = [_model_line(plan)]
    if machine is not None:
        found.append(_machine_line(machine))
        if machine.nodes > 1:
            found.append(
                "Polyturn starts the processes of one machine only, so far; a plan of several is an estimate of what would be."
            )
    if study.preferred is not None:
        found += ["", *study.preferred.lines]
    found += ["", *picture(plan, machine), *_chosen_lines(plan)]
    usable = None if machine is None else machine.gpu.usable_bytes
    for gpu in plan.gpus:
        found += ["", *_table(gpu, usable)]
    # Nobody counted the tasks, which need not mean that they have no end.
    counted = (sentence.replace(", from a source without end", "") for sentence in sentences(plan.recipe, study.num_tasks))
    found += ["", *counted, *word_lines(plan.recipe)]
    if machine is not None and study.time is not None and study.cost is not None:
        found += ["", *_time_lines(study.time)]
        found += ["", *cost_lines(study.cost, steps=plan.recipe.run.steps, num_tasks=study.num_tasks)]
        if study.splits:
            found += ["", *split_lines(study.splits, study.faster, machine)]
    found += ["", *(f"not measured: {words}" for words in plan.caveats)]
    return [*found, "", *verdict_lines(plan, machine, study.verdict)]


def as_object(study: Study) -> dict[str, Any]:
    """The same for JSON; memory in bytes, time in seconds, money in dollars."""
    plan, machine, verdict = study.plan, study.machine, study.verdict
    arithmetic, words = batch_arithmetic(plan.recipe, study.num_tasks), batch_words(plan.recipe)
    return {
        "model": {"name": plan.facts.name, "parameters": plan.facts.parameters, "max_positions": plan.facts.max_positions},
        "machine": None if machine is None else machine_object(machine),
        "weight_sync": {"mode": plan.recipe.weight_sync.mode, "because": plan.reasons.get("weight_sync.mode")},
        "gpus": [_gpu_object(gpu) for gpu in plan.gpus],
        "batch": {name: getattr(arithmetic, name) for name in arithmetic.__dataclass_fields__},
        "words": {name: getattr(words, name) for name in words.__dataclass_fields__} | {"indivisible": indivisible(words)},
        "time": None if study.time is None else time_object(study.time),
        "cost": None if study.cost is None else {name: getattr(study.cost, name) for name in study.cost.__dataclass_fields__},
        "splits": [_split_object(split) for split in study.splits],
        "faster": None if study.faster is None else list(study.faster.overrides),
        "changed": None if study.preferred is None else list(study.preferred.changes),
        "not_measured": list(plan.caveats),
        "fits": None if machine is None else verdict.fits,
        "problems": list(verdict.problems),
        "overrides": None if verdict.overrides is None else list(verdict.overrides),
        "smallest_gpu": verdict.smallest_gpu,
        "elsewhere": None if verdict.elsewhere is None else suggestion_objects((verdict.elsewhere,))[0],
    }


def machine_object(machine: Machine) -> dict[str, Any]:
    """A machine for JSON; the price is of all nodes."""
    return {
        "name": machine.name,
        "gpu": machine.gpu_name,
        "gpus": machine.count,
        "nodes": machine.nodes,
        "usable_bytes": machine.gpu.usable_bytes,
        "price_per_hour": machine.total_price,
        "price_date": machine.price_date,
    }


def time_object(time: StepTime) -> dict[str, Any]:
    """A step for JSON."""
    return {
        "seconds": round(time.seconds, 3),
        "tokens": round(time.tokens),
        "sampled_tokens": round(time.sampled),
        "fill": time.fill,
        "parts": [{"name": part.name, "seconds": round(part.seconds, 3), "formula": part.formula} for part in time.parts],
    }


def suggestion_objects(found: tuple[Suggestion, ...]) -> list[dict[str, Any]]:
    """The table for JSON."""
    return [
        {
            "machine": machine_object(one.machine),
            "how": one.how,
            "placement": one.placement,
            "needed_bytes": round(one.plan.needed),
            "time": time_object(one.time),
            "per_100_steps": round(one.per_100_steps, 4),
            "overrides": list(one.overrides),
        }
        for one in found
    ]


def verdict_lines(plan: Plan, machine: Machine | None, verdict: Verdict) -> list[str]:
    """Whether it fits, why not, and what would."""
    needs = f"{plan.num_gpus} x {plan.needed / GIB:.1f} GiB"
    smallest = (
        "it fits on no known kind of GPU as it is"
        if verdict.smallest_gpu is None
        else f"the smallest known kind of GPU on which it fits as it is: {verdict.smallest_gpu}"
    )
    if machine is None:
        open_ = plan.recipe.trainer.num_ranks > 1 and "trainer.parallel" in plan.reasons
        whole = " with whole copies (a smaller GPU gets shards)" if open_ else ""
        return [*(f"does not fit: {problem}" for problem in verdict.problems), f"needs {needs}{whole}; {smallest}"]
    if verdict.fits:
        return [f"fits: {needs} on {machine.name}"]
    found = [f"{'too dear' if verdict.too_dear else 'does not fit'}: {problem}" for problem in verdict.problems]
    if verdict.overrides is not None:
        return [*found, f"nearest that fits there: {' '.join(verdict.overrides)}", smallest]
    found.append(
        f"the GPUs of {machine.name} are large enough" if verdict.too_dear else f"nothing known makes it fit on {machine.name}"
    )
    other = verdict.elsewhere
    if other is not None:
        price = "" if other.machine.total_price is None else f" (${other.machine.total_price:.2f} an hour)"
        found.append(f"the cheapest machine on which it fits: {other.machine.name}{price}, with {' '.join(other.overrides)}")
    elif verdict.too_dear:
        found.append("no machine of that price is known on which it fits")
    return [*found, smallest]


def _gpu_object(gpu: GpuPlan) -> dict[str, Any]:
    paged = gpu.engine
    return {
        "role": gpu.role,
        "count": gpu.count,
        "numbers": list(gpu.numbers),
        "needed_bytes": round(gpu.needed),
        "terms": [
            {"name": term.name, "bytes": round(term.bytes), "phase": term.phase, "formula": term.formula} for term in gpu.terms
        ],
        "engine": None
        if paged is None
        else {
            "budget_bytes": round(paged.budget),
            "kv_bytes": round(paged.kv_bytes),
            "bytes_per_token": paged.bytes_per_token,
            "blocks": paged.blocks,
            "tokens": paged.tokens,
        },
    }


def _split_object(split: Split) -> dict[str, Any]:
    return {
        "name": split.name,
        "seconds": round(split.time.seconds, 3),
        "fits": split.fits,
        "planned": split.planned,
        "overrides": list(split.overrides),
    }


def _model_line(plan: Plan) -> str:
    facts = plan.facts
    return (
        f"model: {facts.name}, {facts.parameters:,} parameters (embedding {facts.embedding:,}, head "
        f"{f'{facts.head:,}' if facts.head else 'the same'}, layers {facts.layer_weights:,}, norms {facts.norm_weights:,})"
    )


def _machine_line(machine: Machine) -> str:
    gpu = machine.gpu
    links = {True: ", NVLink", False: ", no NVLink", None: ""}[machine.nvlink]
    price = "" if machine.total_price is None else f", ${machine.total_price:.2f} an hour on {machine.price_date}"
    nodes = f"{machine.nodes} x " if machine.nodes > 1 else ""
    kind = f"{machine.count} x {machine.gpu_name}"
    gpus = "" if machine.name == kind else f", {kind}"
    return f"machine: {nodes}{machine.name}{gpus} of {gpu.usable_bytes / GIB:.1f} GiB ({gpu.usable_from}){links}{price}"


def _chosen_lines(plan: Plan) -> list[str]:
    """What `trainer.memory=auto` chose."""
    trainer, keys = plan.recipe.trainer, ("activations", "row_tokens", "offload_optimizer")
    return [
        f"trainer.{key}={getattr(trainer, key)}, by {plan.reasons[f'trainer.{key}']}"
        for key in keys
        if plan.reasons.get(f"trainer.{key}", "").startswith("trainer.memory=auto")
    ]


def _table(gpu: GpuPlan, usable: int | None) -> list[str]:
    """A line a term in GiB, and the worst moment."""
    rows = [f"{gpu.role}{'' if gpu.count == 1 else f' ({gpu.count} GPUs, each)'}, GiB"]
    for term in gpu.terms:
        when = f" [{_PHASES[term.phase]}]" if _PHASES[term.phase] else ""
        rows.append(f"  {term.name:<18} {term.bytes / GIB:>9.2f}  {term.formula}{when}")
    rows.append(f"  {'worst moment':<18} {gpu.needed / GIB:>9.2f}  what is there always, and the largest of the phases")
    if usable is not None:
        left, of = (usable - gpu.needed) / GIB, f"of {usable / GIB:.2f} that a process can have; {HEADROOM:.0%} stay free"
        rows.append(f"  {'left':<18} {left:>9.2f}  {of}")
    if gpu.engine is not None and gpu.sleep is not None:
        rows.append(f"  {gpu.sleep}")
    return rows


def _time_lines(time: StepTime) -> list[str]:
    rows = [
        f"about {time.seconds:,.1f} s a step, an estimate for trajectories that reach {time.fill:.0%} of their limits: "
        f"{time.tokens:,.0f} tokens, {time.sampled:,.0f} of them sampled"
    ]
    return rows + [f"  {part.name:<9} {part.seconds:>9.2f} s  {part.formula}" for part in time.parts]
