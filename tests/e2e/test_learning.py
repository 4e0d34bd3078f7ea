"""Training makes a policy better at what it is rewarded for: from random weights, by the command line."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.advantages.base import GroupAdvantages
from polyturn.advantages.turn_rtg import TurnRtg

# One colour, to be said exactly in both of two turns: one in 256 by chance. Thirty steps of 128 trajectories. In groups of 8
# one seed of 60 forgets how to end its reply before it has learned to: equal siblings, no advantage, reward 0.4 for ever.
WORDS = ["run.steps=30", "rollout.group_size=16", "rollout.groups_per_step=8", "trainer.learning_rate=0.01"]
WORDS += ["environment.args.colours=1", "environment.args.held_out=32", "evaluation.episodes=32"]


def successes(ended: Any) -> tuple[float, float]:
    """Held-out success before and after."""
    assert ended.code == 0, ended.err
    before, after = (line["eval/success"] for line in ended.metrics if "eval/success" in line)
    return before, after


@pytest.mark.parametrize("loss", ["grpo", *(pytest.param(name, marks=pytest.mark.real) for name in ("gspo", "cispo", "sapo"))])
def test_training_learns_what_is_rewarded(bench, loss):
    before, after = successes(bench("train", f"algorithm.loss={loss}", *WORDS))
    assert before < 0.1
    assert after > 0.8, "measured over 40 seeds: 0.96 to 1"


@pytest.mark.real
def test_it_is_the_credit_that_teaches(bench, monkeypatch):
    """The same run with every advantage turned around learns nothing of the kind."""
    whole = TurnRtg.__call__

    def turned_around(self: TurnRtg, groups: Any) -> list[GroupAdvantages]:
        return [
            GroupAdvantages(per_turn=tuple(None if credit is None else -credit for credit in group.per_turn))
            for group in whole(self, groups)
        ]

    monkeypatch.setattr(TurnRtg, "__call__", turned_around)
    assert max(successes(bench("train", *WORDS))) < 0.1


@pytest.mark.real
def test_builtin_tiny_learns_to_search_before_it_answers(bench):
    """The demonstrations are in a hurry 60 % of the time at each step: 0.28 of them are right."""
    words = ["environment.id=search_qa", "model.path=builtin:tiny", "run.steps=30", "rollout.group_size=8"]
    words += ["environment.args={corpus: 'builtin:facts', top_k: 1, turn_reward: 0.1, instructions: false}"]
    words += ["rollout.groups_per_step=16", "rollout.max_turns=4", "rollout.max_turn_tokens=12", "algorithm.loss=dapo"]
    words += ["rollout.max_trajectory_tokens=160", "trainer.learning_rate=4e-4", "evaluation.episodes=128"]
    before, after = successes(bench("train", *words))
    assert before < 0.4
    assert after > before + 0.25


@pytest.mark.real
def test_builtin_tiny_learns_persistence(bench):
    """The demonstrations give up at a pointer 65 % of the time; two thirds of the held-out chains have one or more."""
    words = ["environment.id=lookup", "environment.args={level: chain, max_hops: 3, instructions: false}"]
    words += ["model.path=builtin:tiny", "run.steps=25", "rollout.group_size=8", "rollout.groups_per_step=16"]
    words += ["rollout.max_turns=6", "rollout.max_turn_tokens=8", "rollout.max_trajectory_tokens=128"]
    before, after = successes(bench("train", *words, "trainer.learning_rate=3e-4", "evaluation.episodes=128"))
    assert before < 0.7
    assert after > before + 0.25
