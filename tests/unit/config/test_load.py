"""`load_recipe`: every mistake is one sentence with its place, and nothing is guessed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from polyturn.config.load import load_recipe
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError

DATA = Path(__file__).parents[2] / "data" / "recipes"
SMALLEST = "model: {path: 'builtin:tiny'}\nenvironment: {id: lookup}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write `recipe.yaml` into the working folder, so that messages start with its short name."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str | bytes) -> str:
        raw = text.encode() if isinstance(text, str) else text
        Path("recipe.yaml").write_bytes(raw)
        return "recipe.yaml"

    return _write


def problems(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).split("\n")


def test_smallest_recipe_takes_every_default(write):
    recipe = load_recipe(write(SMALLEST))
    assert recipe == Recipe.model_validate({"model": {"path": "builtin:tiny"}, "environment": {"id": "lookup"}})
    assert recipe.rollout.group_size == 8


def test_numbers_lists_and_text_mean_what_they_look_like(write):
    recipe = load_recipe(
        write(
            SMALLEST
            + "run: {steps: 1_000, name: no}\n"
            + "trainer: {learning_rate: 1e-6, betas: [0.9, 1], max_grad_norm: 1}\n"
            + "evaluation:\n  modes: [sampled, greedy]\n"
        )
    )
    assert recipe.trainer.learning_rate == 1e-6
    assert recipe.trainer.betas == (0.9, 1.0)
    assert recipe.run.steps == 1000
    assert recipe.run.name == "no"
    assert recipe.evaluation.modes == ("sampled", "greedy")


def test_byte_order_mark_and_windows_line_ends_are_read(write):
    text = "\ufeff" + SMALLEST.replace("\n", "\r\n") + "trainer:\r\n  learning_rat: 1\r\n"
    assert problems(write(text)) == ["recipe.yaml:4: trainer.learning_rat: unknown key, did you mean learning_rate?"]


def test_a_section_with_nothing_below_it_is_a_section_of_defaults(write):
    recipe = load_recipe(write("model: {path: x}\nenvironment: {id: e, args: }\nrollout:\nalgorithm:\n  loss_options:\n"))
    assert recipe.rollout.groups_per_step == 16
    assert recipe.environment.args == {}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("trainer:\n  learning_rat: 1", "4: trainer.learning_rat: unknown key, did you mean learning_rate?"),
        ("trainer: {group_size: 4}", "3: trainer.group_size: unknown key, it belongs in the section rollout"),
        ("learning_rate: 1e-6", "3: learning_rate: unknown key, it belongs in the section trainer"),
        ("learnin_rate: 1e-6", "3: learnin_rate: unknown key, did you mean trainer.learning_rate?"),
        ("trainr: {}", "3: trainr: unknown key, did you mean trainer?"),
        (
            "trainer:\n  every_steps: 2",
            "4: trainer.every_steps: unknown key, it belongs in the section weight_sync or evaluation",
        ),
        (
            "engine: {zzz: 1}",
            "3: engine.zzz: unknown key, valid: deterministic, device, devices, dtype, extra_args, gpu_memory_utilization, "
            "host, kind, max_batch_size, max_model_len, num_servers, port, sleep, start_deadline_s, tensor_parallel_size, urls",
        ),
        ("algorithm:\n  clip_low: 0.1", "4: algorithm.clip_low: unknown key, it belongs in the section algorithm.loss_options"),
        (
            "rollout:\n  group_size: '4'",
            "4: rollout.group_size: '4' is text; a whole number above 0 is needed: write 4 without quotes",
        ),
        (
            "rollout:\n  group_size: 4.0",
            "4: rollout.group_size: 4.0 is a number; a whole number above 0 is needed: write 4",
        ),
        (
            "rollout:\n  group_size: true",
            "4: rollout.group_size: true is a truth value; a whole number above 0 is needed: "
            "give one, or leave the key out for 8",
        ),
        (
            "rollout:\n  tool_deadline_s: 1:30",
            "4: rollout.tool_deadline_s: '1:30' is text; a number above 0 is needed: give one, or leave the key out for 30.0",
        ),
        (
            "rollout: {top_p: 1.5}",
            "3: rollout.top_p: 1.5 is out of range; a number above 0 and at most 1 is needed: "
            "give one, or leave the key out for 1.0",
        ),
        (
            "rollout: {max_dropped_share: 2}",
            "3: rollout.max_dropped_share: 2 is out of range; a number from 0 to 1 is needed: "
            "give one, or leave the key out for 0.1",
        ),
        ("rollout: {mask_truncated: no}", "3: rollout.mask_truncated: 'no' is text; true or false is needed: write false"),
        ("run: {name: 3}", "3: run.name: 3 is a whole number; text is needed: quote it, '3'"),
        ("run: {name: true}", "3: run.name: true is a truth value; text is needed: quote it, 'true'"),
        (
            "trainer:\n  num_iterations:",
            "4: trainer.num_iterations: no value; a whole number above 0 is needed: give one, or leave the key out for 1",
        ),
        ("trainer: {optimizer: adam}", "3: trainer.optimizer: 'adam' is no valid value; did you mean adamw?"),
        ("trainer: {schedule: 3}", "3: trainer.schedule: 3 is no valid value; valid: constant, cosine, linear"),
        ("trainer: {betas: 0.9}", "3: trainer.betas: 0.9 is a number; a list of 2 numbers is needed: write [0.9, 0.95]"),
        (
            "trainer:\n  betas:\n  - 0.9\n  - x",
            "6: trainer.betas[1]: 'x' is text; a number is needed: give one",
        ),
        (
            "trainer: {betas: [0.9]}",
            "3: trainer.betas[1]: this list needs another value; a list of 2 numbers is needed",
        ),
        (
            "evaluation: {modes: greedy}",
            "3: evaluation.modes: 'greedy' is text; a list, each one of sampled, greedy is needed: write [greedy]",
        ),
        ("evaluation: {modes: [greed]}", "3: evaluation.modes[0]: 'greed' is no valid value; did you mean greedy?"),
        (
            "evaluation: {modes: []}",
            "3: evaluation.modes: this list is empty; a list, each one of sampled, greedy is needed: give one, or leave the "
            "key out for ['sampled']",
        ),
        ("rollout: 7", "3: rollout: 7 is a whole number; a section of keys is needed: put keys below it, such as group_size"),
        ("run: {seed: 010}", "3: run.seed: 010 has a leading zero, octal to some YAML readers; write 10, or '010' for text"),
        ("trainer: {learning_rate: .inf}", "3: trainer.learning_rate: .inf is not a finite number; give one"),
        ("run: {steps: 1}\nrollout: {}\nrun: {seed: 2}", "5: run: given twice (line 3 and line 5); keep one"),
        ("run: {1: 2}", "3: run: the key 1 is not text; quote it"),
        ("run: &r {<<: *r}", "3: run: merge keys (<<) are not supported; write the keys out"),
        ("run: {name: !secret x}", "3: run.name: the tag !secret means nothing here; remove it"),
        ("data: &d {path: *d}", "3: data.path: an alias (*name) repeats itself without end; write the value out"),
    ],
)
def test_each_mistake_has_its_sentence(write, lines, expected):
    assert problems(write(SMALLEST + lines + "\n")) == [f"recipe.yaml:{expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "recipe.yaml: the file is empty; a recipe needs at least model.path, environment.id"),
        ("# only a comment\n", "recipe.yaml: the file is empty; a recipe needs at least model.path, environment.id"),
        ("- a\n- b\n", "recipe.yaml:1: the file holds a list; a recipe is a mapping of sections, as in model:"),
        (
            "model:x\n",
            "recipe.yaml:1: the file holds text; a recipe is a mapping of sections, as in model: "
            "(is a space missing after a colon?)",
        ),
        (
            "run:\n\tseed: 1\n",
            "recipe.yaml:2: a tab is used to indent; YAML allows only spaces: put two spaces in place of each tab",
        ),
        ("a: 1\n---\nb: 2\n", "recipe.yaml:2: a second document starts here; a recipe is one document: remove the '---'"),
        ("a: b: c\n", "recipe.yaml:1: a ': ' where no key can stand; quote the value, or mend the indentation"),
        ("a: 1\nb: 'x\nc: 2\n", "recipe.yaml:2: the quote that opens here is never closed; close it"),
        ("a: [1, 2\nb: 3\n", "recipe.yaml:1: the '[' that opens here is not closed by line 2; close it, items apart by commas"),
        ("a: 1\nb: @x\n", "recipe.yaml:2: a value can't start with '@'; quote it"),
        ("a: 1\nb: \x07\n", "recipe.yaml:2: not valid YAML: the control character U+0007; remove it"),
        ("a: *b\n", "recipe.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("a: " + "[" * 500, "recipe.yaml:1: not a recipe: values are nested hundreds of levels deep; flatten them"),
        (
            b"run:\n  name: caf\xe9\n",
            "recipe.yaml:2: not valid UTF-8: byte 0xE9; the file may be Latin-1 (Windows-1252), save it as UTF-8",
        ),
    ],
)
def test_a_file_that_is_no_recipe_has_its_sentence(write, text, expected):
    assert problems(write(text)) == [expected]


def test_missing_sections_and_keys_are_named(write):
    assert problems(write("run: {}\n")) == [
        "recipe.yaml: model: this section is missing; it needs path",
        "recipe.yaml: environment: this section is missing; it needs id",
    ]
    assert problems(write("environment: {id: e}\nmodel:\n  dtype: float32\n")) == [
        "recipe.yaml:2: model.path: required and missing: `builtin:tiny`, `builtin:smollm2`, a folder that transformers loads, "
        "or a hub id"
    ]


def test_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    assert problems(tmp_path / "recipes.yaml") == [f"{tmp_path}/recipes.yaml: no such file; did you mean recipe.yaml?"]
    assert problems(tmp_path / "none" / "a.yaml") == [f"{tmp_path}/none/a.yaml: no such file; check the path"]
    assert problems(tmp_path) == [f"{tmp_path}: a folder, not a file; give {tmp_path}/recipe.yaml"]


def test_all_problems_come_in_one_run_in_the_order_of_the_file(write):
    found = problems(write("rollout: {group_size: 0}\nmodel: {path: 3}\nenvironment: {id: e}\nx: 1\n"), "trainer.y=1", "z")
    places = [line.split(": ")[0] for line in found]
    assert places == ["recipe.yaml:1", "recipe.yaml:2", "recipe.yaml:4", "override trainer.y=1", "override z"]


def test_a_huge_value_does_not_fill_the_screen(write):
    (line,) = problems(write(f"{SMALLEST}rollout: {{group_size: {'x' * 5000}}}\n"))
    assert len(line) < 200


def test_aliases_that_multiply_are_refused_quickly(write):
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("repeats itself without end" in line for line in problems(write("\n".join(rows))))


def test_overrides_are_yaml_and_reach_into_arguments(write):
    recipe = load_recipe(
        write(SMALLEST),
        [
            "rollout.group_size=4",
            "trainer.learning_rate=1e-5",
            "environment.args.level=maze",
            "environment.args.size.width=3",
            "environment.id=my_package.envs:Maze",
            "evaluation.modes=[greedy]",
            "algorithm.loss_options={beta: 0.1}",
            "run.name=a=b",
            "data.path=",
            "rollout.group_size=6",
        ],
    )
    assert recipe.rollout.group_size == 6
    assert recipe.trainer.learning_rate == 1e-5
    assert recipe.environment.args == {"level": "maze", "size": {"width": 3}}
    assert recipe.environment.id == "my_package.envs:Maze"
    assert recipe.evaluation.modes == ("greedy",)
    assert recipe.algorithm.loss_options.beta == 0.1
    assert recipe.run.name == "a=b"
    assert recipe.data.path is None


def test_an_override_does_not_leak_into_an_alias_of_what_it_changes(write):
    recipe = load_recipe(
        write("model: {path: x}\nenvironment:\n  id: e\n  args:\n    a: &a {n: 1}\n    b: *a\n"), ["environment.args.b.n=2"]
    )
    assert recipe.environment.args == {"a": {"n": 1}, "b": {"n": 2}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size", "an override is written section.key=value, as in rollout.group_size=8"),
        ("rollout..x=1", "an override is written section.key=value, as in rollout.group_size=8"),
        ("trainer.learning_rat=1", "unknown key, did you mean learning_rate?"),
        ("learning_rate=1", "unknown key, it belongs in the section trainer"),
        ("model.path.x=3", "model.path is text and has no keys; override it itself"),
        ("rollout.group_size=0", "0 is out of range; a whole number above 0 is needed: give one, or leave the key out for 8"),
        ("run.name=@x", "a value can't start with '@'; quote it"),
        ("run.seed=010", "010 has a leading zero, octal to some YAML readers; write 10, or '010' for text"),
        ("environment.args=[1]", "[1] is a list; a mapping is needed: give one, or leave the key out"),
    ],
)
def test_a_wrong_override_is_named(write, override, expected):
    assert problems(write(SMALLEST), override) == [f"override {override}: {expected}"]


def test_an_override_of_a_section_is_to_blame_for_keys_inside_it(write):
    path = write(SMALLEST + "trainer: {warmup_steps: 3}\n")
    assert problems(path, "trainer={warmup: 3}") == [
        "override trainer={warmup: 3}: trainer.warmup: unknown key, did you mean warmup_steps?"
    ]


def test_a_mistake_in_the_file_that_an_override_replaces_is_gone(write):
    path = write(SMALLEST + "rollout: {group_size: 0}\n")
    assert load_recipe(path, ["rollout.group_size=2"]).rollout.group_size == 2


def test_quiet_mistakes_are_all_found():
    found = problems(DATA / "config_quiet_mistakes.yaml")
    expected = {
        3: "learning_rate: unknown key, it belongs in the section trainer",
        5: "seed: 010 has a leading zero",
        9: "learnin_rate: unknown key, did you mean trainer.learning_rate?",
        10: "steps: given twice (line 6 and line 10); keep one",
        11: "time_limit: unknown key",
    }
    for line, sentence in expected.items():
        assert any(f"config_quiet_mistakes.yaml:{line}: {sentence}" in problem for problem in found), (line, found)


def test_tabs_are_named_at_their_line():
    (found,) = problems(DATA / "config_with_tabs.yaml")
    assert "config_with_tabs.yaml:3: a tab is used to indent" in found


@pytest.mark.real
def test_every_error_the_dirty_inputs_list_for_a_recipe_is_found():
    folder = Path(os.environ["POLYTURN_DATA"]) / "dirty_inputs"
    files = [entry for entry in json.loads((folder / "manifest.json").read_text())["files"] if entry["schema"] == "config"]
    assert files
    for entry in files:
        found = problems(folder / entry["file"])
        for problem in entry["problems"]:
            if problem["severity"] == "error":
                assert any(f"{entry['file']}:{problem['line']}: " in line for line in found), (problem, found)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.lora.rnk=4", "unknown key, did you mean rank?"),
        ("model.lora.rank=0", "a whole number above 0 is needed"),
        ("model.lora.targets=q_proj", "write [q_proj]"),
        ("model.lora=16", "a section of keys is needed: put keys below it, such as rank"),
        ("model.quantize=2bit", "did you mean"),
    ],
)
def test_mistakes_in_a_section_that_may_be_left_out(tmp_path, override, says):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: builtin:tiny}\nenvironment: {id: lookup}\nrun: {steps: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [override])
    assert says in str(caught.value)
    assert load_recipe(path).model.lora is None
    assert load_recipe(path, ["model.lora={}"]).model.lora.rank == 16
