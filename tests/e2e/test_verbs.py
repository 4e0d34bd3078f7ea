"""`eval`, `warmstart` and `env` from the command line, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import transformers

from parts.models import same_bits, snapshot
from parts.patience import PATIENCE_S
from parts.runs import Bench, child_environment, read_jsonl

# ── eval ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_eval_prints_a_table(bench):
    ended = bench("eval", "--episodes", "6")
    assert (ended.code, ended.err) == (0, "")
    title, *rows = ended.out.splitlines()
    assert title == "sampled: 6 tasks x 1; mean [95 % interval]"
    table = dict(re.fullmatch(r"  (.+?)  +(\S.*)", row).groups() for row in rows)
    assert {"success", "reward", "reward/answer", "turns", "tokens", "faults"} <= table.keys()
    assert table["turns"] == "2.000 [2.000, 2.000]"
    assert table["faults"] == "0"
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", table["success"])


def test_eval_as_json_is_one_object_and_nothing_else(bench):
    ended = bench("eval", "evaluation.modes=[sampled,greedy]", "--samples", "4", "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found.keys() == {"sampled", "greedy"}
    assert {"eval/success", "eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/num_faults"} <= found["sampled"].keys()
    assert "eval_greedy/success" in found["greedy"]
    assert "eval_greedy/pass@2" not in found["greedy"], "greedy is the same every time"


def test_eval_is_repeatable_and_follows_its_seed(bench):
    def numbers(*words):
        return json.loads(bench("eval", "--json", "--samples", "8", *words).out)["sampled"]

    assert numbers() == numbers()
    assert numbers() != numbers("run.seed=1")


def test_eval_of_another_model_does_not_need_the_recipes(bench, colours_model):
    trained = bench("train", "run.steps=3", "trainer.learning_rate=0.05", "evaluation.episodes=0").folder / "export"
    bench.recipe.write_text(bench.recipe.read_text().replace(str(colours_model), "gone"))
    ended = bench("eval", "--model", str(trained), "--json")
    assert ended.code == 0
    assert ended.out != bench("eval", "--model", str(colours_model), "--json").out


def test_eval_finds_what_train_found_at_its_end(bench):
    ended = bench("train", "trainer.learning_rate=0.05", "evaluation.episodes=8")
    after = {name: value for name, value in ended.metrics[-1].items() if name.startswith("eval/")}
    again = bench("eval", "--model", str(ended.folder / "export"), "--episodes", "8", "--json")
    assert json.loads(again.out)["sampled"] == pytest.approx(after)


# ── warmstart ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_warmstart_writes_a_better_model(bench, colours_model):
    out = bench.folder / "warm"
    words = ["--out", str(out), "--steps", "25", "--demonstrations", "8", "--learning-rate", "0.02"]
    ended = bench("warmstart", *words)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == f"model: {out}"
    nll = [float(number) for number in re.findall(r"nll=([\d.e-]+)", ended.out)]
    assert nll[-1] < 0.3 < nll[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    before = transformers.AutoModelForCausalLM.from_pretrained(colours_model, local_files_only=True)
    assert not same_bits(snapshot(model), snapshot(before))
    success = json.loads(bench("eval", "--model", str(out), "--json", "evaluation.modes=[greedy]").out)["greedy"]
    assert success["eval_greedy/success"] == 1


def test_warmstart_demonstrates_the_rows_of_the_recipe(bench):
    """Not the environment's own tasks: here there are none."""
    rows = bench.folder / "rows.jsonl"
    rows.write_text('{"answer": "blue"}\n{"answer": "green"}\n')
    out = bench.folder / "warm"
    words = ["environment.id=parts.environments:NoTasks", f"data.path={rows}"]
    ended = bench("warmstart", *words, "--out", str(out), "--steps", "3", "--demonstrations", "4")
    assert (ended.code, ended.err) == (0, "")
    assert (out / "model.safetensors").is_file()


def test_warmstart_of_a_demonstration_that_is_too_long(bench):
    ended = bench("warmstart", "rollout.max_turn_tokens=1", "--out", str(bench.folder / "warm"))
    assert ended.code == 2
    says = "has a reply of 2 tokens, and there is room for 1; set rollout.max_turn_tokens=2 or more"
    assert ended.err.startswith("polyturn: error: a demonstration of colours for task train/0/0 ")
    assert says in ended.err
    assert not (bench.folder / "warm").exists()


def test_warmstart_of_a_demonstration_that_does_not_end(bench):
    ended = bench("warmstart", "rollout.max_turns=1", "--out", str(bench.folder / "warm"))
    assert ended.code == 2
    assert "a demonstration of colours for task train/0/0 did not play to its end (max_turns)" in ended.err
    assert not (bench.folder / "warm").exists()


# ── env ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_env_list_names_environments_with_their_arguments(bench):
    ended = bench.raw("env", "list")
    assert ended.code == 0
    assert re.search(r"^lookup +Follow pointers between records", ended.out, re.M)
    assert "max_hops=4" in ended.out
    assert re.search(r"^reasoning_gym:NAME Answer tasks[^\n]*\n +config=None ", ended.out, re.M)


@pytest.mark.parametrize("words", [["max_hops=2", "--seed", "3"], ["--seed", "3", "max_hops=2"]])
def test_env_check_plays_an_environment(bench, words):
    ended = bench.raw("env", "check", "lookup", "level=maze", *words)
    assert (ended.code, ended.err) == (0, "")
    assert "ok      the gold replies score full marks" in ended.out
    assert "BROKEN" not in ended.out
    assert "task train/3/" in ended.out, "the seed is that of the tasks shown"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["parts.environments:Colours", "rounds=3"], 0, "ok      the gold replies score full marks"),
        (["parts.environments:Colours", "held_out=0"], 0, "ok      held-out tasks do not depend on the seed"),
        (["parts.environments:NeverFull"], 2, "BROKEN  the gold replies score full marks: task train/0/0 scores 0.5 of 1"),
        (["parts.environments:SameIds"], 2, "BROKEN  task ids are unique"),
        (["parts.environments:AlwaysCrashes"], 2, "raised ConnectionError: no sandbox answers"),
        (["parts.environments:TasksRaise"], 2, "BROKEN  tasks can be made: tasks('train', 0) raised KeyError: 'split'"),
        (["parts.environments:NoTasks"], 2, "polyturn: error: environment colours has no training tasks"),
        (["parts.environments:Needy"], 2, "polyturn: error: environment parts.environments:Needy needs environment.args.url"),
        (["lookup", "max_hop=2"], 2, "did you mean max_hops?"),
        (["lokup"], 2, "did you mean lookup?"),
    ],
)
def test_env_check_exit_codes(bench, words, code, says):
    ended = bench.raw("env", "check", *words)
    assert ended.code == code
    assert says in ended.out + ended.err


# ── Ctrl-C ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def interrupted(bench: Bench, number: signal.Signals, times: int) -> tuple[int, str, str]:
    """Exit code and output of a long run that gets `number` after its second step."""
    argv = [sys.executable, "-m", "polyturn", "train", str(bench.recipe), f"run.output_dir={bench.runs}", "run.steps=100000"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(), start_new_session=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("step=2 "):
                break
        for _ in range(times):
            run.send_signal(number)
            time.sleep(0.001)  # two at once may arrive as one
        out, err = run.communicate(timeout=PATIENCE_S)
    return run.returncode, out, err


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_and_ends(bench, number):
    code, out, err = interrupted(bench, number, 1)
    assert (code, err) == (0, "")
    (done,) = re.findall(rf"stopped by {number.name} after (\d+) of 100000 steps", out)
    folder = bench.runs / "short"
    assert int(done) == read_jsonl(folder / "metrics.jsonl")[-1]["step"], (
        "the step that was under way has ended, no other began"
    )
    assert (folder / "export" / "model.safetensors").is_file()
    assert bench("eval", "--model", str(folder / "export"), "evaluation.episodes=2").code == 0


@pytest.mark.real
def test_the_second_signal_ends_at_once(bench):
    code, _, err = interrupted(bench, signal.SIGINT, 40)
    assert code == 130, err
    assert "Traceback" not in err
