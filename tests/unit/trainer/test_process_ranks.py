"""A trainer's ranks in processes, over gloo: what they tell each other, and what each says when another is gone."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from parts.patience import PATIENCE_S
from parts.ranks import DEADLINE_S
from parts.runs import child_environment, run_python

pytestmark = pytest.mark.real


def play(scene: str, size: int, *, waited_for: tuple[int, ...]) -> list[str]:
    """The last line of every rank that is waited for; the others are killed in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "parts.ranks", scene],
            env=child_environment(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [ranks[rank].communicate(timeout=PATIENCE_S)[0].strip() for rank in waited_for]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for stream in filter(None, (rank.stdout, rank.stderr)):
                stream.close()


def test_they_sum_and_speak():
    zero, one, two = play("talk", 3, waited_for=(0, 1, 2))
    said = "[[3.0, 3.0, 3.0], [[0.0, 3.0], [6.0, 9.0]], 6] [0, 1, 0, 1, 2, 3]"
    notes = str([{"rank": rank, "text": "ü\n"} for rank in range(3)])
    assert zero == f"{said} 0 {notes}  0"
    assert one == f"{said} 0 {notes} work 10"
    assert two == f"{said} 2 {notes} work 20"


def test_a_rank_that_is_killed_ends_the_others_at_once():
    for said in play("lose_a_rank", 3, waited_for=(0, 2)):
        assert said.startswith("RankError: waited for the gradients of optimizer step 7 (rank ")
        assert re.search(r"; rank 1 \(.+, process \d+\) can't be heard any more", said), said


def test_a_rank_that_hangs_is_noticed_within_the_deadline():
    (said,) = play("stop_a_rank", 2, waited_for=(0,))
    assert said.startswith("RankError: waited for the gradients of optimizer step 7 (rank 0 of 2)")
    assert f"took longer than trainer.collective_deadline_s={DEADLINE_S:g}" in said


def test_a_driver_that_hangs_is_noticed_by_those_who_wait_for_its_word():
    (said,) = play("silent_driver", 2, waited_for=(1,))
    assert said.startswith("RankError: waited for the driver's next word (rank 1 of 2)")


@pytest.mark.parametrize(
    ("scene", "waits_for"), [("silent_store", "groups of 2 ranks"), ("late_for_the_roll", "a group of all ranks")]
)
def test_a_driver_that_hangs_is_noticed_by_those_who_would_meet_at_its_store(scene, waits_for):
    (said,) = play(scene, 2, waited_for=(1,))
    assert said.startswith(
        f"RankError: waited for {waits_for} (rank 1 of 2) and lost it: waited {DEADLINE_S + 5:g} s for the store"
    )
    assert said.endswith(f"took longer than trainer.collective_deadline_s={DEADLINE_S:g}")


JOINS = """
from polyturn.errors import RankError
from polyturn.trainer.ranks import ProcessRanks
try:
    ProcessRanks.join(deadline_s=2, start_deadline_s=2)
except RankError as lost:
    print(lost)
"""


def test_a_store_that_takes_no_calls_ends_a_rank_that_would_join():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(mute.getsockname()[1])}
        ended = run_python(JOINS, timeout_s=PATIENCE_S, **place)
    assert ended.out.startswith("waited for all ranks to join and lost it: waited 7 s for the store"), ended


ENDS = """
import sys
from polyturn.trainer import ranks, roll_call
roll_call._BEAT_S = 0.0  # always in the middle of a beat
ranks._SPEAK_S = 0.0
ranks.ProcessRanks.join(deadline_s=60, start_deadline_s=60)
sys.exit(4)
"""


def test_a_process_that_ends_without_leaving_is_not_aborted_by_what_its_threads_say():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for _ in range(3):
        assert run_python(ENDS, timeout_s=120, **place).code == 4
