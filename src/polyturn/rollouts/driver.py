"""Runs the trajectories of a step at once: each its own task, each turn its own request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from polyturn.errors import EnvironmentSetupError
from polyturn.rollouts.barrier import TurnBarrier
from polyturn.rollouts.episode import Player, play
from polyturn.rollouts.opening import Opening
from polyturn.types import Task, Trajectory, TrajectoryGroup


async def rollout_groups(
    player: Player,
    tasks: Sequence[Task],
    *,
    group_size: int,
    concurrency: int,
    deterministic: bool = False,
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[TrajectoryGroup]:
    """Play every task `group_size` times and return the groups in the order of `tasks`.

    No turn waits for another trajectory, except with `deterministic`, which sends turn k of all of them together (so
    `concurrency` is then without effect). A fault stays in its trajectory.

    Raises:
        ResourceError: the engine is gone; the trajectories under way are cancelled and awaited.
        EnvironmentSetupError: two tasks share an id. Their trajectories would share seeds, and be trained on as if one.
    """
    twice = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise EnvironmentSetupError(
            f"{len(twice)} task ids stand for several tasks of one step, first {twice[0]!r}; make them unique"
        )
    attempts = [(task, sibling) for task in tasks for sibling in range(group_size)]
    openings = {task.id: Opening() for task in tasks}
    barrier = TurnBarrier([f"{task.id}/{sibling}" for task, sibling in attempts]) if deterministic else None
    slots = asyncio.Semaphore(len(attempts) if deterministic else concurrency)

    async def attempt(task: Task, sibling: int) -> Trajectory:
        async with slots:
            trajectory = await play(player, task, sibling, barrier, openings[task.id])
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    running = [asyncio.create_task(attempt(task, sibling), name=f"{task.id}/{sibling}") for task, sibling in attempts]
    try:
        trajectories = await asyncio.gather(*running)
    finally:
        # Reached with tasks still running when one of them lost the engine or we were cancelled: leave none behind.
        for running_task in running:
            running_task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [
        TrajectoryGroup(task=task, trajectories=tuple(trajectories[index * group_size : (index + 1) * group_size]))
        for index, task in enumerate(tasks)
    ]
