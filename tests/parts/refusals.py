"""Mistakes of a user, what each is told, and a child process that makes them all."""

from __future__ import annotations

import json
from pathlib import Path

from parts.runs import RECIPE, run_python

CHILD = """
import contextlib, io, json, sys
from polyturn.cli.main import main
{prelude}
found = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    found.append({{"argv": argv, "code": code, "err": err.getvalue(), "heavy": heavy}})
print(json.dumps(found))
"""

ENVIRONMENT = "environment.id=parts.environments:"


def cases(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Words for the command line, and what the sentence must say."""
    rows, empty, wrong, words = (folder / f"{name}.jsonl" for name in ("rows", "empty", "wrong", "words"))
    rows.write_text('{"answer": "red"}\n')
    empty.write_text("\n")
    wrong.write_text('{"answer": "red"}\n{"question": "blue"}\n')
    words.write_text("red\n")
    (folder / "no_model").mkdir(exist_ok=True)
    (folder / "no_tokenizer").mkdir(exist_ok=True)
    (folder / "no_tokenizer" / "config.json").write_text("{}")
    (folder / "broken.jinja").write_text("{% if %}")
    return {
        "unknown key": (["rollout.grup_size=8"], "rollout.grup_size"),
        "unknown section": (["rolout.group_size=8"], "rolout"),
        "wrong type": (["rollout.group_size=eight"], "rollout.group_size"),
        "out of range": (["rollout.temperature=0"], "rollout.temperature"),
        "no steps": (["run.steps=null"], "run.steps and run.epochs are both missing"),
        "steps and epochs": (["run.epochs=1"], "there are no epochs"),
        "missing data": ([f"data.path={folder}/gone.jsonl"], "gone.jsonl does not exist"),
        "empty data": ([f"data.path={empty}"], "holds no rows"),
        "no JSON": ([f"data.path={words}"], "words.jsonl:1: not valid JSON"),
        "no answer": ([f"data.path={wrong}"], "wrong.jsonl:2: field 'answer' is missing"),
        "missing held-out data": (
            [f"data.path={rows}", f"data.eval_path={folder}/gone.jsonl", "rollout.groups_per_step=1"],
            "gone.jsonl does not exist",
        ),
        "too few tasks": ([f"data.path={rows}", "rollout.groups_per_step=2"], "only 1 training tasks"),
        "data that nobody reads": (
            [f"data.path={rows}", "environment.id=lookup", "environment.args={}"],
            "a lookup row needs start, records and answer",
        ),
        "unknown environment": (["environment.id=lokup"], "did you mean lookup?"),
        "unknown module": (["environment.id=parts.gone:Colours"], "parts.gone"),
        "unknown class": ([f"{ENVIRONMENT}Colors"], "did you mean Colours?"),
        "no environment": (["environment.id=json:JSONDecoder"], "not a subclass"),
        "abstract environment": ([f"{ENVIRONMENT}Abstract"], "lacks gold, rewards, setup, step, tasks"),
        "argument missing": ([f"{ENVIRONMENT}Needy"], "needs environment.args.url"),
        "argument unknown": (["environment.args.round=2"], "did you mean rounds?"),
        "argument out of range": (["environment.id=lookup", "environment.args.max_hops=99"], "use 1 to 12"),
        "tasks raise": ([f"{ENVIRONMENT}TasksRaise"], "colours.tasks('train', 0) raised KeyError: 'split'"),
        "no tasks": ([f"{ENVIRONMENT}NoTasks"], "0 training tasks"),
        "unknown estimator": (["algorithm.advantage=grop"], "did you mean grpo?"),
        "unknown option": (["algorithm.advantage_options.gama=1.0"], "did you mean gamma?"),
        "wrong option": (["algorithm.advantage_options.gamma=2.0"], "no discount"),
        "unknown loss": (["algorithm.loss=grop"], "did you mean grpo?"),
        "idle loss option": (["algorithm.loss=cispo", "algorithm.loss_options.delta=2.0"], "has no effect"),
        "group of one": (["rollout.group_size=1"], "a group has 2 or more"),
        "truncated sampling": (["rollout.top_p=0.9"], "allow_truncated_sampling"),
        "row too short": (["trainer.row_tokens=10"], "a row must hold a whole trajectory"),
        "too many optimizer steps": (["trainer.optimizer_steps_per_batch=3"], "cut by whole groups"),
        "warm-up too long": (["trainer.warmup_steps=9"], "longer than the run"),
        "unknown built-in model": (["model.path=builtin:tinny"], "did you mean builtin:tiny?"),
        "smollm2 has too few positions": (
            ["model.path=builtin:smollm2", "rollout.max_trajectory_tokens=9000"],
            "exceeds the 8192 positions of builtin:smollm2",
        ),
        "rows without data": (["environment.id=gsm8k"], "takes its problems from rows; set data.path"),
        "unknown tool": (["environment.id=gsm8k", "environment.args.tool=calculater"], "did you mean calculator?"),
        "no such model": ([f"model.path={folder}/gone"], "does not exist; give a folder"),
        "no model": ([f"model.path={folder}/no_model"], "has no config.json"),
        "no tokenizer": ([f"model.path={folder}/no_tokenizer"], "tokenizer.json"),
        "too few positions": (["rollout.max_trajectory_tokens=300"], "exceeds the 256 positions"),
        "tiny has too few positions": (
            ["model.path=builtin:tiny", "rollout.max_trajectory_tokens=4096"],
            "exceeds the 2048 positions of builtin:tiny",
        ),
        "tiny can't speak": (["model.path=builtin:tiny", f"{ENVIRONMENT}OpenWords"], "has no closed vocabulary"),
        "no such template": ([f"model.chat_template={folder}/gone.jinja"], "gone.jinja is not a file"),
        "broken template": ([f"model.chat_template={folder}/broken.jinja"], "template"),
        "no device": (["trainer.device=gpu"], "use auto, cpu, cuda or cuda:N"),
        "no folder name": (["run.name=a/b"], "is no folder name"),
        "no override": (["rollout.group_size"], "an override is written section.key=value"),
    }


def refused(folder: Path, model: Path, verbs: list[list[str]], *, prelude: str = "") -> None:
    """Assert that every mistake, by every command, ends in one sentence with exit 2 before torch is imported."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE % {"model": model})
    mistakes = cases(folder).values()
    wanted = [(verb, words, says) for verb in verbs for words, says in mistakes]
    wanted += [(verb, [], "no such file; did you mean recipe.yaml?") for verb in verbs]
    given = []
    for verb, words, says in wanted:
        named = str(folder / ("recip.yaml" if "no such file" in says else "recipe.yaml"))
        options = next((index for index, word in enumerate(verb) if word.startswith("--")), len(verb))
        given.append([verb[0], named, *verb[1:options], *words, *verb[options:]])
    ended = run_python(CHILD.format(prelude=prelude), json.dumps(given), timeout_s=120)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert len(found) == len(wanted)
    for (_, words, says), answer in zip(wanted, found, strict=True):
        name = f"{answer['argv'][0]} {words}"
        assert answer["code"] == 2, f"{name}: exit {answer['code']}: {answer['err']}"
        lines = [line for line in answer["err"].splitlines() if not line.startswith(("usage:", " "))]
        assert len(lines) == 1, f"{name}: {answer['err']}"
        assert lines[0].startswith("polyturn: error: "), name
        assert says in lines[0], f"{name}: {lines[0]}"
        assert not answer["heavy"], f"{name}: {answer['heavy']} imported before it was refused"
    assert not list(folder.glob("**/*.resolved.yaml"))
