"""Which tasks `eval` plays, and what it records of them."""

from __future__ import annotations

import json

from parts.runs import read_jsonl


def episodes(ended) -> int:
    """Tasks that a table says were played."""
    assert ended.code == 0, ended.err
    line = next(line for line in ended.out.splitlines() if " tasks x " in line)
    return int(line.split()[1])


def test_a_split_is_all_of_it_unless_episodes_says_otherwise(bench):
    arguments = "environment.args.held_out=6"
    assert episodes(bench("eval", arguments)) == 4, "the recipe's number"
    for split in ("test", "eval"):
        assert episodes(bench("eval", "--split", split, arguments)) == 6
    assert episodes(bench("eval", "--split", "test", "--episodes", "5", arguments)) == 5


def test_training_tasks_can_be_played(bench, tmp_path):
    out = tmp_path / "said.jsonl"
    assert episodes(bench("eval", "--split", "train", "--episodes", "3", "--out", str(out))) == 3
    assert all(row["task"]["id"].startswith("train") for row in read_jsonl(out))


def test_another_file_and_every_trajectory_of_it(bench, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": "red", "answer": "red"}) + "\n" for _ in range(3)))
    out = tmp_path / "deep" / "said.jsonl"
    words = ["environment={id: chat, args: {exact: true}}", "evaluation.modes=[greedy,sampled]", "data.path=" + str(rows)]
    ended = bench("eval", "--data", str(rows), "--out", str(out), "--samples", "2", *words)
    assert episodes(ended) == 3
    said = read_jsonl(out)
    assert [row["task"]["id"].rsplit(":", 1)[1] for row in said] == ["1", "2", "3", "1", "1", "2", "2", "3", "3"]
    assert all(row["outcome"].keys() == {"answer"} for row in said)


def test_a_file_and_a_split_are_two_answers_to_one_question(bench):
    ended = bench("eval", "--data", "rows.jsonl", "--split", "test")
    assert ended.code == 2
    assert "--data=rows.jsonl and --split both say which tasks to take" in ended.err


def test_a_file_that_is_not_there(bench):
    ended = bench("eval", "--data", "none.jsonl")
    assert ended.code == 2
    assert "none.jsonl" in ended.err
