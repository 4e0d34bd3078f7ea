"""Environments for processes that play them: what a reply says is done."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from polyturn.environments.base import Environment, StepResult, TaskList
from polyturn.types import Message, Task

FOREVER = 3600.0
TASK = Task(id="task", environment="sleepy", messages=(Message(role="user", content="go"),))


class Sleepy(Environment):
    """Sleeps or blocks when it is told to, and notes every close in the run folder."""

    name = "sleepy"

    def tasks(self, split, seed):
        return TaskList([TASK])

    async def setup(self, task):
        return task

    async def step(self, state, reply):
        if reply.text == "sleep":
            await asyncio.sleep(FOREVER)
        if reply.text == "block":
            time.sleep(FOREVER)  # noqa: ASYNC251 # what an author should not do
        return StepResult(messages=(Message(role="tool", content=reply.text),))

    async def rewards(self, state):
        return {"answer": 1.0}

    async def close(self, state):
        with (Path(os.environ["POLYTURN_RUN_FOLDER"]) / "closed").open("a") as file:
            file.write(f"{state.id}\n")

    def gold(self, task):
        return ["x"]
