"""Files and recipes together: who goes first, what comes out as YAML, and that no file is too broken for a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyturn.cli.main import main
from polyturn.config.load import load_recipe
from polyturn.config.resolve import resolve
from polyturn.config.schema import with_values
from polyturn.config.yaml_lines import parse_yaml
from polyturn.convert import accelerate, deepspeed
from polyturn.convert.convert import convert, load_with
from polyturn.convert.foreign import read_foreign
from polyturn.errors import ConfigError

FILES = Path(__file__).parents[2] / "data" / "convert"
RECIPE = """\
run: {steps: 5}
model: {path: 'builtin:tiny'}
environment: {id: lookup, args: {instructions: false}}
engine: {kind: hf_server}
"""
TWO = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str = "", file: str = TWO) -> tuple[str, str]:
        Path("recipe.yaml").write_text(RECIPE + text)
        Path("acc.yaml").write_text(file)
        return "recipe.yaml", "acc.yaml"

    return write


# ── with a recipe ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_recipe_leaves_open_comes_from_the_file(recipe):
    path, file = recipe()
    found, _ = load_with(path, (), file)
    assert (found.trainer.num_ranks, found.trainer.parallel) == (2, "fsdp2")
    assert resolve(found, num_train_tasks=None).recipe.trainer.parallel == "fsdp2"


def test_what_both_say_alike_is_right(recipe):
    path, file = recipe("trainer: {num_ranks: 2}\n")
    assert load_with(path, (), file)[0].trainer.num_ranks == 2


def test_what_both_say_otherwise_is_refused_with_both_places(recipe):
    path, file = recipe("trainer:\n  num_ranks: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_with(path, (), file)
    assert str(caught.value) == (
        "acc.yaml:2: num_processes: 2 is trainer.num_ranks=2, but recipe.yaml:6 says 4; take one of the two out, or decide on "
        "the command line, with trainer.num_ranks=2"
    )


@pytest.mark.parametrize("override", ["trainer.num_ranks=4", "trainer={num_ranks: 4}"])
def test_the_command_line_decides(recipe, override):
    path, file = recipe("trainer:\n  num_ranks: 3\n")
    found, _ = load_with(path, [override], file)
    assert (found.trainer.num_ranks, found.trainer.parallel) == (4, "fsdp2")


def test_the_other_tools_defaults_give_way_to_what_a_recipe_says(recipe):
    path, _ = recipe("trainer: {betas: [0.9, 0.95]}\n")
    Path("ds.json").write_text('{"optimizer": {"type": "AdamW", "params": {}}}')
    assert load_with(path, (), "ds.json")[0].trainer.betas == (0.9, 0.95)
    path, _ = recipe()
    assert load_with(path, (), "ds.json")[0].trainer.betas == (0.9, 0.999)


def test_a_value_out_of_the_recipes_range_names_the_file_it_came_from(recipe):
    path, _ = recipe()
    Path("ds.json").write_text('{"optimizer": {"type": "AdamW", "params": {"eps": 0}}}')
    with pytest.raises(ConfigError, match=r"^ds\.json:1: trainer\.adam_epsilon: 0 is out of range"):
        load_with(path, (), "ds.json")


def test_a_recipe_whose_section_is_no_mapping_stays_one_sentence(recipe):
    path, file = recipe("trainer: 3\n")
    with pytest.raises(ConfigError, match=r"^recipe\.yaml:5: trainer: 3 is a whole number"):
        load_with(path, (), file)


# ── on its own ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("file", sorted(path.name for path in FILES.iterdir()))
def test_what_convert_prints_is_a_piece_of_a_recipe(file, tmp_path, capsys):
    assert main(["convert", str(FILES / file)]) == 0
    printed = capsys.readouterr().out
    target = tmp_path / "recipe.yaml"
    target.write_text("run: {steps: 5}\nenvironment: {id: lookup}\nengine: {kind: hf_server}\n" + printed)
    loaded = load_recipe(target, ["model.path=builtin:tiny"])
    for taken in convert(FILES / file).taken:
        value = getattr(getattr(loaded, taken.key[0]), taken.key[1])
        assert (list(value) if isinstance(value, tuple) else value) == taken.value
    resolve(with_values(loaded, "trainer", device="cpu"), num_train_tasks=None)


def test_a_dry_run_says_every_decision_and_keeps_it(recipe, capsys):
    path, file = recipe()
    assert main(["train", path, "--from", file, "--dry-run", "rollout.group_size=4", "rollout.max_trajectory_tokens=512"]) == 0
    out = capsys.readouterr().out
    assert "acc.yaml:2: num_processes: 2 is trainer.num_ranks=2\n" in out
    written = load_recipe("runs/run.resolved.yaml")
    assert (written.trainer.parallel, written.trainer.num_ranks, written.rollout.group_size) == ("fsdp2", 2, 4)


def test_several_machines_are_not_started_from_one(recipe, capsys):
    path, file = recipe(file=TWO + "num_machines: 2\n")
    assert main(["train", path, "--from", file]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "torchrun --nnodes 2 --nproc-per-node 1" in err


# ── bad files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "", r"a\.json:1: not valid JSON"),
        ("a.json", '{"zero_optimization": {"stage": 3},}', r"a\.json:1: not valid JSON"),
        ("a.json", '{\n  // ZeRO\n  "zero_optimization": {}}', r"a\.json:2: .*JSON has no comments: remove it"),
        ("a.json", '{"train_batch_size": 1, "train_batch_size": 2}', "'train_batch_size' is given twice"),
        ("a.json", '{"gradient_clipping": NaN}', "NaN is no number of JSON"),
        ("a.json", "[" * 100_000, "nested hundreds of levels deep"),
        ("a.json", "[1]", "the file holds a list"),
        ("a.json", '{"train_batch_size": ' + "9" * 5000 + "}", "a.json: not valid JSON"),
        ("a.yaml", "", "the file holds nothing"),
        ("a.yaml", "distributed_type: FSDP\n\tnum_processes: 2", r"a\.yaml:2: a tab is used"),
        ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n", r"a\.yaml:2: distributed_type: given twice"),
        ("a.yaml", "model: {path: x}\n", "neither a YAML of accelerate.*nor a JSON of DeepSpeed"),
        ("a.yaml", "caf\udce9: 1\n", "not valid UTF-8"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        convert(name)
    assert re.search(words, str(caught.value)), caught.value


def test_a_missing_file_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"ds_confg\.json: no such file; did you mean ds_config\.json\?"):
        convert("ds_confg.json")


def test_tabs_and_a_byte_order_mark_are_json(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{\n\t"zero_optimization": {\n\t\t"stage": 7}}')
    with pytest.raises(ConfigError, match=r"a\.json:3: zero_optimization\.stage: 7"):
        convert(file)


def attempt(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except ConfigError as error:
        return error


KNOWN = sorted(
    {
        *"zero_optimization bf16 fp16 optimizer scheduler gradient_clipping train_batch_size steps_per_print amp".split(),
        *"train_micro_batch_size_per_gpu gradient_accumulation_steps activation_checkpointing stage offload_param".split(),
        *"offload_optimizer device enabled type params lr betas eps weight_decay warmup_num_steps warmup_max_lr".split(),
        *"distributed_type num_processes num_machines mixed_precision fsdp_config deepspeed_config gpu_ids use_cpu".split(),
        *"fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params dynamo_config".split(),
        *"parallelism_config parallelism_config_dp_shard_size zero_stage offload_optimizer_device".split(),
        *deepspeed._TUNING,
        *accelerate._LAUNCHER,
    }
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["auto", "FSDP", "DEEPSPEED", "NO", "MULTI_GPU", "AdamW", "WarmupLR", "cpu", "bf16", "FULL_SHARD", "2"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(held=st.dictionaries(st.sampled_from(KNOWN), VALUES, min_size=1, max_size=8), alone=st.booleans())
def test_any_values_give_keys_that_hold_or_sentences_with_the_files_name(tmp_path_factory, held, alone):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    file = folder / "any.json"
    file.write_text(json.dumps(held))
    (folder / "recipe.yaml").write_text(RECIPE)
    found = attempt(lambda: convert(file) if alone else load_with(folder / "recipe.yaml", (), file)[1])
    if isinstance(found, ConfigError):
        assert all(str(file) in line for line in str(found).splitlines())
        return
    assert parse_yaml(found.yaml()).problems == ()
    assert len({taken.key for taken in found.taken}) == len(found.taken)
    for name in held:  # whatever is on is spoken of
        if held[name] not in (None, False, 0, 1, [], "") and isinstance(held[name], int | float):
            assert any(name in sentence for sentence in found.sentences()), name


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.text("{}[]:,\"'\n\t #-ab1.", max_size=60), name=st.sampled_from(["any.json", "any.yaml"]))
def test_any_text_is_read_or_refused(tmp_path_factory, text, name):
    file = tmp_path_factory.getbasetemp() / name
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = attempt(lambda: read_foreign(file))
    assert not isinstance(found, ConfigError) or str(found).startswith(str(file))
