"""Trajectories as JSON lines: every token, log-probability, version, reward and, after training, advantage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.errors import DataError
from polyturn.types import Message, Task, Trajectory, Turn

FORMAT = 1


def to_json(trajectory: Trajectory, turn_advantages: Sequence[float] | None = None) -> dict[str, Any]:
    """One trajectory as plain JSON. `turn_advantages` `[K]` is None for a trajectory that was not trained on."""
    turns = []
    for index, turn in enumerate(trajectory.turns):
        turns.append(
            {
                "continues": turn.continues,
                "prompt_ids": list(turn.prompt_ids),
                "completion_ids": list(turn.completion_ids),
                "loss_mask": [0] * len(turn.prompt_ids) + [1] * len(turn.completion_ids),
                "engine_logprobs": list(turn.engine_logprobs),
                "policy_versions": list(turn.policy_versions),
                "stop_reason": turn.stop_reason,
                "text": turn.text,
                "reply": [_message(message) for message in turn.reply],
                "reward": turn.reward,
                "advantage": None if turn_advantages is None else float(turn_advantages[index]),
                "state_key": turn.state_key,
                "counts": dict(turn.counts),
            }
        )
    task = trajectory.task
    return {
        "format": FORMAT,
        "task": {
            "id": task.id,
            "environment": task.environment,
            "messages": [_message(message) for message in task.messages],
            "answer": task.answer,
            "info": task.info,
        },
        "sibling": trajectory.sibling,
        "turns": turns,
        "end_reason": trajectory.end_reason,
        "outcome": dict(trajectory.outcome),
        "outcome_reward": trajectory.outcome_reward,
        "success": trajectory.success,
        "fault": trajectory.fault,
    }


def from_json(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `to_json` wrote. Raises KeyError or TypeError on anything else."""
    task = row["task"]
    return Trajectory(
        task=Task(
            id=task["id"],
            environment=task["environment"],
            messages=tuple(Message(**message) for message in task["messages"]),
            answer=task["answer"],
            info=task["info"],
        ),
        sibling=row["sibling"],
        turns=tuple(
            Turn(
                continues=turn["continues"],
                prompt_ids=tuple(turn["prompt_ids"]),
                completion_ids=tuple(turn["completion_ids"]),
                engine_logprobs=tuple(math.nan if value is None else value for value in turn["engine_logprobs"]),
                policy_versions=tuple(turn["policy_versions"]),
                stop_reason=turn["stop_reason"],
                text=turn["text"],
                reply=tuple(Message(**message) for message in turn["reply"]),
                reward=turn["reward"],
                state_key=turn["state_key"],
                counts=turn["counts"],
            )
            for turn in row["turns"]
        ),
        end_reason=row["end_reason"],
        outcome=row["outcome"],
        outcome_reward=row["outcome_reward"],
        success=row["success"],
        fault=row["fault"],
    )


def write_trajectories(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of `to_json` as JSON lines, complete or not at all.

    What JSON can't say never ends a run: nan and inf become null, and objects in a task's `info` their text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(_line(row) + "\n")
    partial.replace(path)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a file that `write_trajectories` wrote. Raises DataError with file and line."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a file of recorded trajectories")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode())
                if row.get("format") != FORMAT:
                    raise DataError(
                        f"{path}:{number}: trajectory format {row.get('format')!r} is not {FORMAT}, the one this version reads"
                    )
                yield from_json(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path}:{number}: not a recorded trajectory ({type(error).__name__}: {error})") from error


def _line(row: Mapping[str, Any]) -> str:
    try:
        text = _dump(row, ensure_ascii=False)
    except (TypeError, ValueError):
        row = _plain(row)
        text = _dump(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as Python reads odd bytes: JSON can spell it
        text = _dump(row, ensure_ascii=True)
    return text


def _dump(row: Mapping[str, Any], *, ensure_ascii: bool) -> str:
    return json.dumps(row, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """`value` in the types that JSON has."""
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
