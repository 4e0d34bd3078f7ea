"""One rank of a group over gloo, in a process of its own: `python -m parts.ranks SCENE`, with torchrun's variables set."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from parts.patience import PATIENCE_S
from polyturn.errors import RankError
from polyturn.trainer import roll_call
from polyturn.trainer.ranks import ProcessRanks

DEADLINE_S = 4.0  # also what a busy machine may take to form a group


def talk(ranks: ProcessRanks) -> str:
    """Everything a group can do."""
    tensors = [torch.full((3,), float(ranks.rank)), torch.arange(4.0).reshape(2, 2), torch.tensor(ranks.rank + 1)]
    ranks.sum_in_place(tensors, "a sum")
    ragged, start = ranks.concatenate(torch.arange(ranks.rank * 2), "a concatenation")
    notes = ranks.gather({"rank": ranks.rank, "text": "ü\n"}, "notes")
    if ranks.rank == 0:
        time.sleep(2 * DEADLINE_S)  # longer than the others wait for a word: it must say that it is alive
        with ranks.tell("work", [b"x" * 10 * rank for rank in range(1, ranks.size)]):
            pass
        heard = ("", b"")
    else:
        heard = ranks.hear()
    summed = [tensor.tolist() for tensor in tensors]
    return f"{summed} {ragged.tolist()} {start} {notes} {heard[0]} {len(heard[1])}"


def lose_a_rank(ranks: ProcessRanks) -> str:
    """Rank 1 is killed where the others count on it."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.sum_in_place([torch.zeros(3)], "the gradients of optimizer step 7")
    return "it went on"


def stop_a_rank(ranks: ProcessRanks) -> str:
    """Rank 1 stands still."""
    if ranks.rank == 1:
        time.sleep(60)
    ranks.sum_in_place([torch.zeros(3)], "the gradients of optimizer step 7")
    return "it went on"


def silent_driver(ranks: ProcessRanks) -> str:
    """The driver stands still as a whole, the thread that speaks for it too."""
    ranks.gather("here", "all to be there")
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return ranks.hear()[0]


def silent_store(ranks: ProcessRanks) -> str:
    """The driver stands still, and with it the store at which rank 1 would form one more group."""
    ranks.gather("here", "all to be there")
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.context(2)
    return "it went on"


def late_for_the_roll(ranks: ProcessRanks) -> str:
    """The driver stands still before the others are counted: see `join_late`."""
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "it joined"


def join_late() -> ProcessRanks:
    """Rank 1 comes late to the store, where rank 0 has been already."""
    connect = roll_call._own_connection

    def connect_late() -> object:
        time.sleep(DEADLINE_S)
        return connect()

    if os.environ["RANK"] == "1":
        roll_call._own_connection = connect_late
    return join()


def join() -> ProcessRanks:
    """Join the others."""
    return ProcessRanks.join(deadline_s=DEADLINE_S, start_deadline_s=PATIENCE_S)


SCENES = {scene.__name__: scene for scene in (talk, lose_a_rank, stop_a_rank, silent_driver, silent_store, late_for_the_roll)}

if __name__ == "__main__":
    scene = SCENES[sys.argv[1]]
    try:
        joined = join_late() if scene is late_for_the_roll else join()
        print(scene(joined), flush=True)
        joined.leave()
    except RankError as lost:
        print(f"RankError: {lost}", flush=True)
    os._exit(0)
