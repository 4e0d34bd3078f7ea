"""Mistakes of a user: one sentence on stderr, exit 2, no traceback, and nothing paid for it.

That `train` refuses them all is invariant 10, see `semantics/test_invariants_training.py`.
"""

from __future__ import annotations

import pytest

from parts.models import tiny_model
from parts.refusals import refused


def test_the_other_verbs_refuse_what_train_refuses(tmp_path, colours_model):
    out = ["--out", str(tmp_path / "out")]
    refused(tmp_path, colours_model, [["eval"], ["warmstart", *out], ["rollout", *out], ["replay", "recorded.jsonl", *out]])
    assert not (tmp_path / "out").exists()


# ── mistakes that only show once torch is there, and options of the verbs ──────────────────────────────────────────────


def one_sentence(ended, code: int, says: str) -> None:
    assert ended.code == code, ended
    assert ended.err.startswith("polyturn: error: ")
    assert ended.err.count("\n") == 1
    assert says in ended.err


def test_a_device_that_is_not_there(bench):
    one_sentence(bench("train", "trainer.device=cuda:7"), 2, "this machine has")


def test_a_device_that_is_not_there_is_found_before_a_warm_start(bench, monkeypatch):
    monkeypatch.setattr("polyturn.loop.build.ensure_tiny", lambda *_: pytest.fail("the warm start was paid for"))
    one_sentence(bench("train", "trainer.device=cuda:7", "model.path=builtin:tiny"), 2, "this machine has")


def test_a_weight_for_a_component_that_nobody_scores(bench):
    ended = bench("train", "environment.reward_weights={anser: 2.0}", "evaluation.episodes=0", f"run.output_dir={bench.runs}")
    says = "environment.reward_weights has anser, on which no trajectory of the first step was scored; did you mean answer?"
    one_sentence(ended, 2, says)


def test_a_model_made_for_fewer_tokens(bench, colours_model):
    folder = bench.folder / "small"
    folder.mkdir()
    for file in colours_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tiny_model(vocab_size=8).save_pretrained(folder)
    one_sentence(bench("train", f"model.path={folder}"), 2, "has 8 embeddings but its tokenizer has ids up to")


@pytest.mark.parametrize("argv", [["train"], ["eval"], ["warmstart", "--out", "OUT"]])
def test_a_model_that_transformers_can_not_load(bench, colours_model, argv):
    folder = bench.folder / "torn"
    folder.mkdir()
    for file in colours_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:40] if file.suffix == ".safetensors" else file.read_bytes())
    argv = [word.replace("OUT", str(bench.folder / "out")) for word in argv]
    one_sentence(bench(*argv, f"model.path={folder}"), 2, "transformers could not load")


def test_a_cache_that_can_not_be_written_to(bench, monkeypatch):
    monkeypatch.setenv("POLYTURN_CACHE", str(bench.recipe))
    one_sentence(bench("train", "model.path=builtin:tiny"), 2, "set POLYTURN_CACHE to a folder of yours")


@pytest.mark.parametrize("words", [["train"], ["train", "--dry-run"]])
def test_an_output_folder_that_can_not_be_written_to(bench, words):
    ended = bench.raw(words[0], str(bench.recipe), f"run.output_dir={bench.recipe}/runs", *words[1:])
    one_sentence(ended, 2, "can't be written to (Not a directory); give another folder")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "--episodes", "0"], "--episodes=0"),
        (["eval", "--samples", "-1"], "--samples=-1"),
        (["eval", "evaluation.episodes=0"], "there are no held-out tasks"),
        (["eval", "--model", "nowhere"], "model.path=nowhere does not exist"),
        (["warmstart", "--out", "NEW", "--steps", "0"], "--steps=0"),
        (["warmstart", "--out", "NEW", "--demonstrations", "0"], "--demonstrations=0"),
        (["warmstart", "--out", "NEW", "--learning-rate", "0"], "--learning-rate=0.0"),
        (["warmstart", "--out", "NEW", "--learning-rate", "nan"], "--learning-rate=nan"),
        (["warmstart", "--out", "OLD"], "exists already"),
        (["warmstart", "--out", "FILE/new"], "can't be made (Not a directory)"),
    ],
)
def test_options_of_the_verbs(bench, words, says):
    places = {"NEW": bench.folder / "new", "OLD": bench.folder, "FILE/new": bench.recipe / "new"}
    one_sentence(bench(*(str(places.get(word, word)) for word in words)), 2, says)
    assert not (bench.folder / "new").exists()
