"""One rank of a group over gloo, in a process of its own: `python -m parts.ranks SCENE`, with torchrun's variables set."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from parts.patience import PATIENCE_S
from polyturn.errors import RankError
from polyturn.trainer.ranks import ProcessRanks

DEADLINE_S = 2.0


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
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return ranks.hear()[0]


SCENES = {scene.__name__: scene for scene in (talk, lose_a_rank, stop_a_rank, silent_driver)}

if __name__ == "__main__":
    try:
        joined = ProcessRanks.join(deadline_s=DEADLINE_S, start_deadline_s=PATIENCE_S)
        print(SCENES[sys.argv[1]](joined), flush=True)
        joined.leave()
    except RankError as lost:
        print(f"RankError: {lost}", flush=True)
    os._exit(0)
