"""The numbers against hand-computed ones, and the sentences that print them."""

from __future__ import annotations

from polyturn.config.arithmetic import batch_arithmetic, sentences
from polyturn.config.schema import Recipe


def recipe(**sections) -> Recipe:
    trainer = {"row_tokens": 4096, "warmup_steps": 1} | sections.pop("trainer", {})
    return Recipe.model_validate({"model": {"path": "x"}, "environment": {"id": "e"}, "trainer": trainer} | sections)


SMALL = recipe(
    run={"steps": 10},
    rollout={"group_size": 4, "groups_per_step": 6, "max_turns": 3, "max_turn_tokens": 50, "max_trajectory_tokens": 400},
    trainer={"num_iterations": 2, "optimizer_steps_per_batch": 3, "row_tokens": 512, "warmup_steps": 5},
    weight_sync={"every_steps": 3},
    evaluation={"episodes": 7, "samples_per_task": 2, "modes": ["sampled", "greedy"], "every_steps": 4},
)


def test_numbers_of_a_small_run():
    numbers = batch_arithmetic(SMALL, 120)
    assert numbers.trajectories_per_step == 24
    assert numbers.optimizer_steps_per_step == 6
    assert numbers.groups_per_optimizer_step == 2
    assert numbers.max_sampled_tokens_per_trajectory == 150
    assert numbers.max_sampled_tokens_per_step == 3600
    assert numbers.max_tokens_per_step == 9600
    assert numbers.max_rows_per_step == 24
    assert numbers.optimizer_steps == 60
    assert numbers.trajectories == 240
    assert numbers.max_tokens == 96_000
    assert numbers.epochs == 0.5
    assert numbers.weight_pushes == 4


def test_sentences_of_a_small_run():
    assert sentences(SMALL, 120) == (
        "A step plays 6 tasks x 4 siblings = 24 trajectories.",
        "A step makes 6 optimizer steps (2 passes over the batch, each cut into 3 of about 2 groups), the run 60, "
        "of which the first 5 warm up.",
        "A trajectory holds at most 400 tokens, 150 of them sampled (3 turns of 50).",
        "A step holds at most 9,600 tokens, in at most 24 rows of 512.",
        "The run is 10 steps: 60 tasks, 240 trajectories, at most 96,000 tokens, 0.5 x 120 training tasks.",
        "The engine gets new weights 4 times, every 3 steps and at the end.",
        "Evaluation plays 28 episodes at the start and at the end and every 4 steps, 4 times.",
    )


def test_a_run_without_length_has_no_totals():
    numbers = batch_arithmetic(recipe(), None)
    assert (numbers.optimizer_steps, numbers.trajectories, numbers.max_tokens, numbers.epochs) == (None, None, None, None)
    lines = sentences(recipe(evaluation={"episodes": 0}), None)
    assert lines[1] == "A step makes 1 optimizer step (1 pass over the batch)."
    assert lines[-1] == "There is no evaluation."


def test_a_source_without_end_has_no_epochs():
    line = next(line for line in sentences(recipe(run={"steps": 1}), None) if line.startswith("The run"))
    assert line == "The run is 1 step: 16 tasks, 128 trajectories, at most 524,288 tokens, from a source without end."
