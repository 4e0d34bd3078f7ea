"""Trajectories as JSON lines: every token, log-probability, version, reward and, after training, advantage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from polyturn.errors import DataError
from polyturn.types import EndReason, Message, StopReason, Task, Trajectory, Turn

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
    """The trajectory that `to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""
    task = row["task"]
    trajectory = Trajectory(
        task=Task(
            id=task["id"],
            environment=task["environment"],
            messages=tuple(Message(**message) for message in task["messages"]),
            answer=task["answer"],
            info=task["info"],
        ),
        sibling=row["sibling"],
        turns=tuple(_turn(turn, index) for index, turn in enumerate(row["turns"])),
        end_reason=row["end_reason"],
        outcome=row["outcome"],
        outcome_reward=row["outcome_reward"],
        success=row["success"],
        fault=row["fault"],
    )
    _require(trajectory.end_reason in get_args(EndReason), f"end_reason is {trajectory.end_reason!r}")
    numbers = [value for value in (trajectory.outcome_reward, *trajectory.outcome.values()) if value is not None]
    _require(all(map(_is_finite, numbers)), "a reward of the outcome is no finite number")
    return trajectory


def write_trajectories(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of `to_json` as JSON lines, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    partial.replace(path)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a file that `write_trajectories` wrote, the one of line n as the n-th.

    Raises:
        DataError: no such file, an empty one, or a line that is no recorded trajectory; has file and line.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a file that `polyturn rollout` or a run wrote")
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                if row.get("format") != FORMAT:
                    raise DataError(
                        f"{path}:{number}: trajectory format {row.get('format')!r} is not {FORMAT}, the one this version reads"
                    )
                yield from_json(row)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(
                    f"{path}:{number}: not a recorded trajectory ({type(error).__name__}: {error}); "
                    "give a file that `polyturn rollout` or a run wrote"
                ) from error
    if number == 0:
        raise DataError(f"{path} holds no trajectories; give a file that `polyturn rollout` or a run wrote")


def _turn(turn: Mapping[str, Any], index: int) -> Turn:
    """One turn, checked: what is wrong here would otherwise train the wrong tokens, or fail far away."""
    made = Turn(
        continues=turn["continues"],
        prompt_ids=tuple(turn["prompt_ids"]),
        completion_ids=tuple(turn["completion_ids"]),
        engine_logprobs=tuple(turn["engine_logprobs"]),
        policy_versions=tuple(turn["policy_versions"]),
        stop_reason=turn["stop_reason"],
        text=turn["text"],
        reply=tuple(Message(**message) for message in turn["reply"]),
        reward=turn["reward"],
        state_key=turn["state_key"],
        counts=turn["counts"],
    )
    where = f"in turn {index}"
    ids = (*made.prompt_ids, *made.completion_ids, *made.policy_versions)
    _require(all(type(number) is int and number >= 0 for number in ids), f"{where} an id or version is no whole number")
    sampled = len(made.completion_ids)
    lengths = (len(made.engine_logprobs), len(made.policy_versions))
    _require(lengths == (sampled, sampled), f"{where} {sampled} sampled ids have {lengths} log-probabilities and versions")
    _require(all(map(_is_finite, (*made.engine_logprobs, made.reward))), f"{where} a log-probability or reward is not finite")
    _require(made.stop_reason in get_args(StopReason), f"{where} stop_reason is {made.stop_reason!r}")
    _require(index > 0 or not made.continues, "the first turn continues nothing")
    return made


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
