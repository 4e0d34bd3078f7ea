"""The synchronous loop: the reference, and the page to read first.

    take tasks ─> roll out groups ─> credit every turn ─> assemble, filter, pack ─> train ─> push the weights ─> report, save

One step ends before the next begins, so every sample is from the newest weights the engine has. Everything that computes
runs in a thread, so that the event loop always answers and every wait has its deadline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from polyturn.advantages.base import GroupAdvantages
from polyturn.config.schema import filled
from polyturn.data.stream import Stream
from polyturn.engine.base import Engine, Sleeper
from polyturn.errors import ResourceError, WeightMismatchError
from polyturn.loop.build import Policy, build_engine_and_bridge, build_trainer, policy_to_train
from polyturn.loop.card import write_card
from polyturn.loop.check import Checked, chat_template
from polyturn.loop.engine_start import show_engine
from polyturn.loop.evaluate import Evaluation, evaluate
from polyturn.loop.openings import refuse_hidden_tools, refuse_long_openings
from polyturn.loop.place import Place, unseen
from polyturn.loop.restore import loop_state, restore_randomness, restore_trainer, with_weights
from polyturn.loop.resume import LOCK_WAIT_S, resume_of
from polyturn.loop.saving import Saving
from polyturn.loop.step import BatchReport, DropGuard, build_batches, make_groups, player_for, refuse_unknown_weights
from polyturn.loop.stopping import Stopping, StopRequested
from polyturn.loop.tasks import authors_code, open_stream
from polyturn.metrics.run_folder import RunFolder
from polyturn.metrics.sinks import MetricsLog
from polyturn.metrics.spans import Spans
from polyturn.models.load import export_model
from polyturn.processes.deadlines import deadline
from polyturn.processes.lock import FileLock
from polyturn.processes.threads import in_thread_within
from polyturn.processes.watchdog import LOOP_GRACE_S, LoopWatchdog
from polyturn.rollouts.record import to_json, write_trajectories
from polyturn.trainer.trainer import Trainer
from polyturn.types import TrainBatch, TrajectoryGroup
from polyturn.weight_sync.base import WeightBridge


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run, put together: what `train` drives."""

    checked: Checked
    folder: RunFolder
    policy: Policy
    trainer: Trainer
    engine: Engine
    bridge: WeightBridge
    stream: Stream
    log: MetricsLog
    guard: DropGuard
    spans: Spans
    say: Callable[[str], None]
    stopping: Stopping
    place: Place
    saving: Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: held-out success before and after, by mode, and where everything lies."""

    before: dict[str, Evaluation]
    after: dict[str, Evaluation]
    """Empty after a stop."""
    folder: Path
    export: Path
    steps_done: int
    stopped_by: str | None
    """Name of the signal that ended the run early."""


async def train_recipe(
    checked: Checked, folder: RunFolder, log: MetricsLog, say: Callable[[str], None], place: Place
) -> Outcome:
    """Start the environment, put the run together, train. Raises what `build_run` and `train` raise."""
    with FileLock(folder.lock, f"the run folder {folder.root}", wait_s=LOCK_WAIT_S) as lock:
        async with Stopping(say) as stopping, checked.opened():
            return await train(await build_run(checked, folder, log, say, stopping, place, lock=lock.descriptor))


async def build_run(
    checked: Checked,
    folder: RunFolder,
    log: MetricsLog,
    say: Callable[[str], None],
    stopping: Stopping | None = None,
    place: Place | None = None,
    *,
    lock: int | None = None,
) -> Run:
    """Load the policy and build trainer, engine and bridge around it, as they were where the run goes on from a checkpoint.

    Within `checked.opened()`. Without `stopping` no signal is heeded, without `place` nobody sees what the run waits for.
    Raises UserError for what can't be loaded.
    """
    place = place or unseen(folder.root)
    recipe, resume = checked.recipe, resume_of(folder)
    start = loop_state(resume)
    policy = with_weights(await policy_to_train(recipe, checked.environment, say), resume)
    refuse_long_openings(recipe, checked.train_tasks, policy.renderer)
    stream = open_stream(recipe, checked.train_tasks, cursor=start.cursor)
    refuse_hidden_tools(checked.environment, checked.train_tasks, policy.renderer)
    stopping = stopping or Stopping(say)
    ranks = place.join_ranks(recipe, on_lost=stopping.lose_from_thread())
    trainer = build_trainer(recipe, policy.model, ranks, exact=policy.exact)
    policy = replace(policy, exact=None)  # the trainer has taken them over
    restore_trainer(trainer, resume)
    engine, bridge = build_engine_and_bridge(recipe, policy, trainer, place)
    guard = DropGuard(recipe.rollout.max_dropped_share, recipe.rollout.dropped_window_steps)
    guard.go_on_from(start.guard)
    if start.estimator is not None:
        checked.estimator.load_state_dict(start.estimator)  # type: ignore[attr-defined]
    restore_randomness(resume, 0)
    saving = Saving(
        recipe,
        folder,
        trainer=trainer,
        stream=stream,
        guard=guard,
        estimator=checked.estimator,
        engine=engine,
        place=place,
        start=start,
        resume=resume,
        export=partial(write_model, checked, folder, policy, trainer),
        say=say,
        lock=lock,
    )
    return Run(
        checked=checked,
        folder=folder,
        policy=policy,
        trainer=trainer,
        engine=engine,
        bridge=bridge,
        stream=stream,
        log=log,
        guard=guard,
        spans=Spans(),
        say=say,
        stopping=stopping,
        place=place,
        saving=saving,
    )


async def train(run: Run) -> Outcome:
    """Train from the first step to the last, evaluate before and after, export the policy.

    A stop that was asked for ends it after the step that is being trained, saves that state everywhere, and exports the policy.

    Raises:
        ResourceError: the engine, a push, a rank or a deadline was lost, or a run that was stopped could not be saved.
        TrainingError: a number was not finite, too much was dropped, or engine and trainer disagree.
    """
    recipe = run.checked.recipe
    after: dict[str, Evaluation] = {}
    stopped_by: str | None = None
    unsaved: list[str] = []
    await run.engine.start()
    if found := show_engine(recipe, str(run.policy.folder), run.engine, run.say):
        run.log.write(0, found)
    try:
        with LoopWatchdog(recipe.rollout.tool_deadline_s + LOOP_GRACE_S):
            try:
                run.saving.begin()
                await push(run)
                if run.saving.step == 0:
                    run.saving.evaluated(await run.stopping.unless(evaluate_now(run, step=0)))
                await train_steps(run)
                await push(run)
                after = await run.stopping.unless(evaluate_now(run, step=filled(recipe.run.steps)))
            except StopRequested:
                stopped_by = run.stopping.requested
            unsaved = await run.saving.last()
    finally:
        try:
            await run.saving.close()
        finally:
            try:
                await run.bridge.close()
            finally:
                await run.engine.stop()
    limit_s, what = recipe.trainer.step_deadline_s, f"the export of the model to {run.folder.export}"
    with run.place.waiting(what, limit_s):
        export = partial(write_model, run.checked, run.folder, run.policy, run.trainer)
        await in_thread_within(limit_s, what, export, run.folder.export, run.saving.step)
    await in_thread_within(recipe.trainer.collective_deadline_s, "the other ranks to hear that it is over", run.trainer.end)
    if unsaved and stopped_by is not None:
        raise ResourceError(f"stopped by {stopped_by}, and not saved: {'; '.join(unsaved)}")
    return Outcome(
        before=run.saving.before,
        after=after,
        folder=run.folder.root,
        export=run.folder.export,
        steps_done=run.saving.step,
        stopped_by=stopped_by,
    )


async def train_steps(run: Run) -> None:
    """Every step that is left, with the evaluations between them. Raises StopRequested, and what `train_step` raises."""
    steps, every = filled(run.checked.recipe.run.steps), run.checked.recipe.evaluation.every_steps
    done = run.saving.step
    while True:
        # Also where a run goes on: its checkpoint is of the moment before this evaluation.
        if done and every is not None and done % every == 0 and done < steps:
            await run.stopping.unless(evaluate_now(run, step=done))
        if done >= steps:
            return await run.saving.settle()
        done += 1
        await train_step(run, done)
        if run.stopping.requested:
            raise StopRequested


async def train_step(run: Run, step: int) -> None:
    """One training step, exactly the arrows at the top of this page."""
    recipe, spans, start = run.checked.recipe, run.spans, time.perf_counter()
    with authors_code(f"a training task of {run.checked.environment.name}"):
        tasks = run.stream.take(recipe.rollout.groups_per_step)
    player = player_for(recipe, run.checked.environment, run.policy.renderer, run.engine, f"train/{step}")
    what = f"the rollout of step {step}: {len(tasks)} groups of {recipe.rollout.group_size}"
    with spans.span("rollout"), run.place.waiting(what):
        groups = await run.stopping.unless(make_groups(recipe, player, tasks))
    if step == 1:
        refuse_unknown_weights(recipe, groups)
    credit = run.checked.estimator(groups)
    batches, report = build_batches(recipe, groups, credit, run.trainer.sharing)
    save_trajectories(run, step, groups, credit)
    run.guard.check(report)
    with spans.span("checkpoint"):
        await run.saving.settle()  # from here on weights change
    await sleep(run)
    with spans.span("train"):
        metrics = await train_batches(run, batches)
    refuse_mismatch(run, metrics)
    if step % recipe.weight_sync.every_steps == 0:
        with spans.span("push"):
            await push(run)
        metrics |= {f"push/{phase.replace(' ', '_')}_s": seconds for phase, seconds in run.bridge.seconds.items()}
    metrics |= rollout_metrics(groups, report, batches) | spans.take()
    metrics["time/step_s"] = time.perf_counter() - start
    metrics["tokens_per_s"] = metrics["num_tokens"] / metrics["time/step_s"]
    metrics["policy_version"] = run.engine.policy_version
    metrics["optimizer_step"] = run.trainer.optimizer_step
    run.log.write(step, metrics | run.saving.metrics())
    run.saving.after_step(step)


async def sleep(run: Run) -> None:
    """Have the engine give memory back where the recipe says so; the push after the step takes it again."""
    if run.checked.recipe.engine.sleep != "on" or not isinstance(run.engine, Sleeper):
        return
    limit_s, what = run.checked.recipe.weight_sync.deadline_s, "the engine to give memory back (weight_sync.deadline_s)"
    with run.spans.span("sleep"), run.place.waiting(what, limit_s):
        async with deadline(limit_s, what):
            await run.engine.sleep()


async def train_batches(run: Run, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """The trainer's step, in a thread; nothing to do when every group was filtered out."""
    if not batches:
        return {}
    with run.place.waiting("the engine to answer nobody while weights change", run.checked.recipe.weight_sync.deadline_s):
        await run.bridge.hold(run.trainer.version + 1)
    limit_s, what = run.checked.recipe.trainer.step_deadline_s, "the trainer's step (trainer.step_deadline_s)"
    with run.place.waiting(what, limit_s):
        return await in_thread_within(limit_s, what, run.trainer.train, batches)


async def push(run: Run) -> None:
    """Push the trainer's weights as its version."""
    version, limit_s = run.trainer.version, run.checked.recipe.weight_sync.deadline_s
    with run.place.waiting(f"weight push {version} (weight_sync.deadline_s)", limit_s):
        await run.bridge.push(version)


async def evaluate_now(run: Run, *, step: int) -> dict[str, Evaluation]:
    """Held-out success of the engine's current weights, in every mode the recipe asks for."""
    recipe, checked = run.checked.recipe, run.checked
    if not checked.eval_tasks:
        return {}
    results: dict[str, Evaluation] = {}
    for mode in recipe.evaluation.modes:
        with run.place.waiting(f"the evaluation at step {step}, {mode}: {len(checked.eval_tasks)} tasks"):
            results[mode] = await evaluate(
                recipe,
                checked.environment,
                run.policy.renderer,
                run.engine,
                checked.eval_tasks,
                mode=mode,
                samples_per_task=recipe.evaluation.samples_per_task,
            )
        run.log.write(step, results[mode].metrics())
    return results


def write_model(checked: Checked, folder: RunFolder, policy: Policy, trainer: Trainer, target: Path, step: int) -> None:
    """Write the policy after `step` to `target` as an ordinary folder, with a card that says where it is from."""
    whole = trainer.state_to_save()  # of shards, rank 0 holds it in CPU memory meanwhile
    export_model(trainer.model, policy.folder, target, chat_template=chat_template(checked.recipe), state=whole)
    write_card(target, checked.recipe, folder.metrics, step=step)


def save_trajectories(run: Run, step: int, groups: Sequence[TrajectoryGroup], credit: Sequence[GroupAdvantages]) -> None:
    """Write the step's trajectories before anything is trained on them, so that a failing step can be looked at."""
    every = run.checked.recipe.logging.trajectories_every
    if every and step % every == 0:
        rows = (
            to_json(trajectory, None if advantages is None else advantages.tolist())
            for group, credited in zip(groups, credit, strict=True)
            for trajectory, advantages in zip(group.trajectories, credited.per_turn, strict=True)
        )
        write_trajectories(run.folder.trajectories_of(step), rows)


def refuse_mismatch(run: Run, metrics: dict[str, float]) -> None:
    """Raise WeightMismatchError when fresh samples are not on-policy: engine and trainer disagree about the same weights."""
    limit = run.checked.recipe.weight_sync.max_mismatch
    mismatch = metrics.get("mismatch", 0.0)
    if limit is not None and metrics.get("policy_age") == 0 and mismatch > limit:
        raise WeightMismatchError(
            f"engine and trainer log-probabilities of fresh samples differ by {mismatch:.3g} on average, more than "
            f"weight_sync.max_mismatch={limit:g}: they don't run the same weights, temperature or template"
        )


def rollout_metrics(groups: Sequence[TrajectoryGroup], report: BatchReport, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Numbers of a step's trajectories; means are over the valid ones."""
    played = [trajectory for group in groups for trajectory in group.valid]
    rewards = [trajectory.total_reward for trajectory in played]
    outcomes = sorted({name for trajectory in played for name in trajectory.outcome})
    counted = sorted({name for trajectory in played for turn in trajectory.turns for name in turn.counts})

    def mean(values: Iterable[float | None]) -> float:
        known = [value for value in values if value is not None]
        return sum(known) / max(1, len(known))

    return {
        "reward": mean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "success": mean(trajectory.success for trajectory in played),
        **{f"outcome/{name}": mean(trajectory.outcome.get(name) for trajectory in played) for name in outcomes},
        **{
            f"environment/{name}": mean(sum(turn.counts.get(name, 0.0) for turn in t.turns) for t in played) for name in counted
        },
        "turns_per_trajectory": mean(len(trajectory.turns) for trajectory in played),
        "completion_tokens_per_trajectory": mean(trajectory.num_completion_tokens for trajectory in played),
        "truncated_share": mean(trajectory.truncated for trajectory in played),
        "dropped_share": report.dropped / max(1, report.planned),
        "num_faults": len(report.faults),
        "num_dropped_samples": len(report.broken_samples),
        "num_dropped_groups": report.small_groups,
        "num_zero_advantage_groups": report.zero_advantage_groups,
        "num_masked_truncated": report.masked_truncated,
        "num_rows": sum(len(batch.rows) for batch in batches),
        "num_tokens": sum(batch.num_tokens for batch in batches),
        "num_shared_tokens": sum(batch.num_shared_tokens for batch in batches),
        "num_trained_tokens": sum(batch.num_trained_tokens for batch in batches),
    }
