"""`resolve` derives each open value with a reason, refuses what can't train, and its file reads back as it was."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyturn.config.load import load_recipe
from polyturn.config.resolve import Resolved, resolve, write_resolved
from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError

pytestmark = pytest.mark.usefixtures("presets")


def recipe(**sections) -> Recipe:
    return Recipe.model_validate(
        {"model": {"path": "builtin:tiny"}, "environment": {"id": "lookup"}, "run": {"steps": 200}} | sections
    )


def refusals(made: Recipe, num_train_tasks: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(made, num_train_tasks=num_train_tasks)
    return str(caught.value).split("\n")


def test_steps_give_epochs():
    resolved = resolve(recipe(), num_train_tasks=1000)
    assert resolved.recipe.run.epochs == 3.2
    assert resolved.reasons["run.epochs"] == "200 steps x 16 tasks / 1000 training tasks"


@pytest.mark.parametrize(
    ("epochs", "tasks", "steps"), [(1.0, 160, 10), (1.0, 161, 11), (0.5, 100, 4), (1e-9, 16, 1), (3.2, 1000, 200)]
)
def test_epochs_give_steps_rounded_up(epochs, tasks, steps):
    resolved = resolve(recipe(run={"epochs": epochs}), num_train_tasks=tasks)
    assert resolved.recipe.run.steps == steps
    assert resolved.reasons["run.steps"].endswith("rounded up")


def test_a_source_without_end_has_steps_only():
    resolved = resolve(recipe(), num_train_tasks=None)
    assert resolved.recipe.run.epochs is None
    assert resolved.recipe.run.steps == 200
    assert refusals(recipe(run={"epochs": 2.0})) == [
        "run.epochs=2: the training tasks have no end, so there are no epochs; give run.steps"
    ]


def test_a_length_is_needed():
    assert refusals(recipe(run={}), 100) == [
        "run.steps and run.epochs are both missing; give one of them, such as run.steps=200"
    ]


def test_steps_and_epochs_that_disagree_are_refused():
    assert refusals(recipe(run={"steps": 7, "epochs": 1.0}), 160) == [
        "run.steps=7 and run.epochs=1 disagree: 1 epochs of 160 tasks are 10 steps of 16; set one of the two to null"
    ]
    assert resolve(recipe(run={"steps": 10, "epochs": 1.0}), num_train_tasks=160).recipe.run.steps == 10


def test_no_training_tasks_is_refused():
    assert refusals(recipe(), 0)[0].startswith("data: 0 training tasks; there must be at least 1")


@pytest.mark.parametrize(("path", "rate"), [("builtin:tiny", 3e-4), ("some/model", 1e-6)])
def test_learning_rate_follows_the_model(path, rate):
    resolved = resolve(recipe(model={"path": path}), num_train_tasks=None)
    assert resolved.recipe.trainer.learning_rate == rate
    assert "trainer.learning_rate" in resolved.reasons


@pytest.mark.parametrize(("path", "rate"), [("builtin:tiny", 3e-4), ("some/model", 1e-5)])
def test_adapters_learn_faster(path, rate):
    resolved = resolve(recipe(model={"path": path, "lora": {}}), num_train_tasks=None)
    assert resolved.recipe.trainer.learning_rate == rate
    assert resolved.recipe.model.lora.rank == 16


@pytest.mark.parametrize(
    ("dtype", "chosen", "why"), [("float32", "none", "are float32"), ("bfloat16", "float32", "rounded away")]
)
def test_master_weights_follow_the_type(dtype, chosen, why):
    resolved = resolve(recipe(model={"path": "some/model", "dtype": dtype}), num_train_tasks=None)
    assert resolved.recipe.trainer.master_weights == chosen
    assert why in resolved.reasons["trainer.master_weights"]


MODEL = {"path": "some/model"}
HALF = {"path": "some/model", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sections", "says", "fix"),
    [
        (
            {"trainer": {"master_weights": "float32"}},
            "the weights are float32 already",
            {"trainer": {"master_weights": "auto"}},
        ),
        ({"trainer": {"master_weights": "stochastic"}}, "and lose nothing", {"model": HALF}),
        (
            {"model": HALF, "trainer": {"master_weights": "stochastic", "offload_optimizer": True}},
            "what is stepped in CPU memory are float32 weights",
            {"trainer": {"master_weights": "float32"}},
        ),
        (
            {"model": HALF, "trainer": {"master_weights": "none", "offload_optimizer": True}},
            "what is stepped in CPU memory are float32 weights",
            {"trainer": {"offload_optimizer": False}},
        ),
        (
            {"trainer": {"optimizer": "adamw_8bit", "offload_optimizer": True}},
            "the state in CPU memory is a full one",
            {"trainer": {"optimizer": "adamw"}},
        ),
        (
            {"model": MODEL | {"quantize": "4bit"}},
            "train adapters beside them",
            {"model": {"lora": {"rank": 16}}},
        ),
        (
            {"model": MODEL | {"attention": "flash_attention_2"}},
            "its kernels take weights of 16 bits",
            {"model": {"dtype": "bfloat16"}},
        ),
        (
            {"model": MODEL | {"lora": {"dropout": 0.1}}},
            "nothing is dropped",
            {"model": {"lora": {"dropout": 0.0}}},
        ),
        (
            {"model": MODEL | {"lora": {}}, "engine": {"kind": "hf_server"}},
            "the engine must hold the same base weights",
            {"engine": {"kind": "hf"}},
        ),
        (
            {"model": MODEL | {"lora": {}}, "trainer": {"reference_device": "cpu"}},
            "the reference is the policy with its adapters off",
            {"trainer": {"reference_device": "same"}},
        ),
    ],
)
def test_switches_that_don_t_go_together(sections, says, fix):
    (sentence,) = refusals(recipe(**sections))
    assert says in sentence
    assert sentence.startswith(("trainer.", "model."))
    mended = {name: sections.get(name, {}) | values for name, values in fix.items()}
    resolve(recipe(**(sections | mended)), num_train_tasks=None)


def test_a_resolved_recipe_with_adapters_reads_back(tmp_path):
    made = recipe(model={**HALF, "lora": {"targets": ["q_proj"], "rank": 4}, "quantize": "4bit"})
    resolved = resolve(made, num_train_tasks=None)
    write_resolved(resolved, tmp_path / "recipe.yaml")
    read = load_recipe(tmp_path / "recipe.yaml")
    assert read == resolved.recipe
    assert read.model.lora.targets == ("q_proj",)
    assert load_recipe(tmp_path / "recipe.yaml", ["model.lora.rank=8"]).model.lora.rank == 8
    assert load_recipe(tmp_path / "recipe.yaml", ["model.lora=null", "model.quantize=null"]).model.lora is None


def test_values_that_were_given_stay_and_have_no_reason():
    made = recipe(
        trainer={"learning_rate": 0.5},
        algorithm={"loss_options": {"fixed_length": 7, "sampler_correction": "icepop", "clip_low": 0.1}},
    )
    resolved = resolve(made, num_train_tasks=None)
    assert resolved.recipe.trainer.learning_rate == 0.5
    options = resolved.recipe.algorithm.loss_options
    assert (options.fixed_length, options.sampler_correction, options.clip_low) == (7, "icepop", 0.1)
    given = {"trainer.learning_rate", "algorithm.loss_options.fixed_length", "algorithm.loss_options.clip_low"}
    assert not given & set(resolved.reasons)


@pytest.mark.parametrize(
    ("rollout", "length"),
    [({}, 8 * 256), ({"max_turns": 100}, 4096), ({"max_turns": 2, "max_turn_tokens": 10}, 20)],
)
def test_fixed_length_is_the_token_budget(rollout, length):
    resolved = resolve(recipe(rollout=rollout), num_train_tasks=None)
    assert resolved.recipe.algorithm.loss_options.fixed_length == length
    assert "token budget" in resolved.reasons["algorithm.loss_options.fixed_length"]


@pytest.mark.parametrize(("every_steps", "correction"), [(1, "none"), (2, "tis")])
def test_correction_follows_the_lag(every_steps, correction):
    resolved = resolve(recipe(weight_sync={"every_steps": every_steps}), num_train_tasks=None)
    assert resolved.recipe.algorithm.loss_options.sampler_correction == correction


def test_every_derived_value_has_a_reason_and_nothing_else_has():
    made = recipe()
    resolved = resolve(made, num_train_tasks=100)
    before, after = made.model_dump(), resolved.recipe.model_dump()
    changed = set()
    for section, values in after.items():
        for key, value in values.items():
            if key == "loss_options":
                changed |= {f"algorithm.loss_options.{name}" for name in value if before[section][key][name] != value[name]}
            elif before[section][key] != value:
                changed.add(f"{section}.{key}")
    assert changed == set(resolved.reasons)


def test_default_row_and_warmup_fit_themselves():
    resolved = resolve(recipe(run={"steps": 3}, rollout={"max_trajectory_tokens": 5000}), num_train_tasks=None)
    assert resolved.recipe.trainer.row_tokens == 5000
    assert resolved.recipe.trainer.warmup_steps == 3
    assert {"trainer.row_tokens", "trainer.warmup_steps"} <= set(resolved.reasons)
    short = resolve(recipe(rollout={"max_trajectory_tokens": 512}), num_train_tasks=None)
    assert short.recipe.trainer.row_tokens == 1024


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"rollout": {"group_size": 1}}, ["rollout.group_size=1", "siblings", "2 or more"]),
        ({"rollout": {"top_p": 0.9, "top_k": 50}}, ["rollout.top_p=0.9 rollout.top_k=50", "allow_truncated_sampling=true"]),
        ({"rollout": {"min_p": 0.1}}, ["rollout.min_p=0.1"]),
        (
            {"rollout": {"max_turn_tokens": 600, "max_trajectory_tokens": 512}},
            ["rollout.max_turn_tokens=600", "rollout.max_trajectory_tokens=512"],
        ),
        (
            {"rollout": {"groups_per_step": 4}, "trainer": {"optimizer_steps_per_batch": 5}},
            ["trainer.optimizer_steps_per_batch=5", "set it to 4 or less"],
        ),
        (
            {"trainer": {"row_tokens": 4095}},
            ["trainer.row_tokens=4095", "set trainer.row_tokens=4096, or rollout.max_trajectory_tokens=4095"],
        ),
        (
            {"run": {"steps": 4}, "trainer": {"warmup_steps": 9, "num_iterations": 2}},
            ["trainer.warmup_steps=9", "8 optimizer steps", "set trainer.warmup_steps=8 or less"],
        ),
    ],
)
def test_refusals_have_value_rule_and_fix(sections, parts):
    (line,) = refusals(recipe(**sections))
    assert all(part in line for part in parts), line


def test_refusals_come_all_at_once():
    made = recipe(run={}, rollout={"group_size": 1, "top_k": 3}, trainer={"row_tokens": 64})
    assert len(refusals(made)) == 4


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"top_p": 0.9, "allow_truncated_sampling": True}},
        {"rollout": {"max_turn_tokens": 4096}},
        {"rollout": {"groups_per_step": 4}, "trainer": {"optimizer_steps_per_batch": 4}},
        {"trainer": {"row_tokens": 4096}},
        {"run": {"steps": 4}, "trainer": {"warmup_steps": 8, "num_iterations": 2}},
    ],
)
def test_values_at_the_edge_are_accepted(sections):
    resolve(recipe(**sections), num_train_tasks=None)


def test_an_unknown_preset_is_refused_with_the_rest():
    lines = refusals(recipe(rollout={"group_size": 1}, algorithm={"loss": "grop"}))
    assert len(lines) == 2
    assert "grop" in lines[1]


def test_the_written_file_reads_back_and_resolves_to_itself(tmp_path):
    resolved = resolve(recipe(), num_train_tasks=7473)
    path = tmp_path / "recipe.yaml"
    write_resolved(resolved, path)
    again = load_recipe(path)
    assert again == resolved.recipe
    assert resolve(again, num_train_tasks=7473) == Resolved(recipe=again, reasons={})
    assert list(tmp_path.iterdir()) == [path]


def test_reasons_stand_right_above_their_keys(tmp_path):
    resolved = resolve(recipe(), num_train_tasks=100)
    path = tmp_path / "recipe.yaml"
    write_resolved(resolved, path)
    lines = path.read_text().split("\n")
    for dotted, reason in resolved.reasons.items():
        (index,) = [
            index
            for index, line in enumerate(lines)
            if line.strip() == f"# {reason}" and lines[index + 1].strip().startswith(f"{dotted.split('.')[-1]}:")
        ]
        assert len(lines[index]) - len(lines[index].lstrip()) == 2 * dotted.count(".")
    assert "learning_rate: 0.0003" in path.read_text()


_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text.filter(lambda key: key != "<<"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    args=st.dictionaries(_text.filter(lambda key: key != "<<"), _json, max_size=3),
    name=_text,
    rate=st.floats(min_value=1e-300, max_value=1e300),
    reason=_text,
)
def test_any_recipe_survives_the_file(tmp_path, args, name, rate, reason):
    made = recipe(environment={"id": name, "args": args}, trainer={"learning_rate": rate})
    path = tmp_path / "recipe.yaml"
    write_resolved(Resolved(recipe=made, reasons={"trainer.learning_rate": reason}), path)
    assert load_recipe(path) == made


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {None: 1}}, {3, 4}])
def test_an_argument_that_yaml_cannot_hold_is_named(tmp_path, value):
    made = recipe(environment={"id": "e", "args": {"x": value}})
    with pytest.raises(ConfigError, match=r"environment\.args\.x"):
        write_resolved(Resolved(recipe=made, reasons={}), tmp_path / "recipe.yaml")


def test_rows_are_longer_on_a_gpu():
    assert resolve(recipe(), num_train_tasks=None, on_gpu=True).recipe.trainer.row_tokens == 8192
    long = resolve(recipe(rollout={"max_trajectory_tokens": 9000}), num_train_tasks=None, on_gpu=True)
    assert long.recipe.trainer.row_tokens == 9000
    assert "the usual 8192" in long.reasons["trainer.row_tokens"]


@pytest.mark.parametrize(("kind", "mode"), [("hf", "in_process"), ("hf_server", "nccl")])
def test_how_weights_are_pushed_follows_from_the_engine(kind, mode):
    resolved = resolve(recipe(engine={"kind": kind}), num_train_tasks=None)
    assert resolved.recipe.weight_sync.mode == mode
    assert f"engine.kind={kind}" in resolved.reasons["weight_sync.mode"]
    assert resolve(resolved.recipe, num_train_tasks=None).recipe == resolved.recipe


@pytest.mark.parametrize(("kind", "mode"), [("hf", "nccl"), ("hf_server", "in_process")])
def test_a_push_that_can_not_reach_the_engine_is_refused(kind, mode):
    with pytest.raises(ConfigError, match=f"weight_sync.mode={mode} can't reach"):
        resolve(recipe(engine={"kind": kind}, weight_sync={"mode": mode}), num_train_tasks=None)


def test_a_server_has_no_batches_to_repeat():
    with pytest.raises(ConfigError, match=r"engine\.deterministic=true: a server forms its batches by arrival"):
        resolve(recipe(engine={"kind": "hf_server", "deterministic": True}), num_train_tasks=None)


# ── vLLM in the driver's process ───────────────────────────────────────────────────────────────────────────────────────


def test_what_vllm_in_this_process_leaves_open():
    found = resolve(recipe(engine={"kind": "vllm"}), num_train_tasks=None)
    engine = found.recipe.engine
    assert (engine.gpu_memory_utilization, engine.max_model_len) == (0.3, found.recipe.rollout.max_trajectory_tokens)
    assert found.recipe.weight_sync.mode == "single_copy"
    assert found.recipe.algorithm.loss_options.sampler_correction == "tis"
    assert resolve(found.recipe, num_train_tasks=None).recipe == found.recipe
    apart = resolve(recipe(engine={"kind": "vllm", "device": "cuda:1"}), num_train_tasks=None).recipe
    assert (apart.engine.gpu_memory_utilization, apart.weight_sync.mode) == (0.9, "in_process")


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"engine": {"kind": "vllm", "max_model_len": 64}}, "engine.max_model_len=64: vLLM must hold a whole trajectory"),
        ({"engine": {"kind": "hf", "gpu_memory_utilization": 0.5}}, "engine.gpu_memory_utilization=0.5 is a setting of vLLM"),
        ({"engine": {"kind": "vllm"}, "trainer": {"num_ranks": 2}}, "vLLM in the driver's process goes with one rank"),
        ({"engine": {"kind": "vllm", "deterministic": True}}, "vLLM forms its batches by arrival"),
        (
            {"engine": {"kind": "vllm"}, "weight_sync": {"mode": "nccl"}},
            "the engine is in the driver's process; use single_copy",
        ),
        (
            {"engine": {"kind": "vllm", "device": "cuda:1"}, "weight_sync": {"mode": "single_copy"}},
            "the engine has a GPU of its own, engine.device=cuda:1; use in_process",
        ),
        (
            {"engine": {"kind": "vllm", "dtype": "bfloat16"}, "weight_sync": {"mode": "single_copy"}},
            "the engine has weights of another type, engine.dtype=bfloat16; use in_process",
        ),
        ({"engine": {"kind": "vllm"}, "model": {"path": "x", "lora": {}}}, "model.lora with engine.kind=vllm"),
    ],
)
def test_what_vllm_in_this_process_can_not_do(sections, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        resolve(recipe(**sections), num_train_tasks=None)


# ── vLLM servers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def on_vllm(mode="auto", lora=False, **engine) -> Recipe:
    model = {"path": "builtin:tiny"} | ({"lora": {}} if lora else {})
    return recipe(model=model, engine={"kind": "vllm_server"} | engine, weight_sync={"mode": mode})


@pytest.mark.parametrize(
    ("made", "mode", "why"),
    [
        (on_vllm(), "nccl", "they go over a process group"),
        (on_vllm(lora=True), "lora", "adapters are small and go as files"),
        (on_vllm("restart"), "restart", None),
        (on_vllm("nccl", urls=["http://h:1"]), "nccl", None),
        (on_vllm(lora=True, urls=["http://h:1"]), "lora", "adapters"),
    ],
)
def test_how_weights_reach_vllm_servers(made, mode, why):
    resolved = resolve(made, num_train_tasks=None)
    assert resolved.recipe.weight_sync.mode == mode
    assert (why is None) == ("weight_sync.mode" not in resolved.reasons)
    assert why is None or why in resolved.reasons["weight_sync.mode"]
    assert resolved.recipe.algorithm.loss_options.sampler_correction == "tis"
    assert "vLLM computes in another order" in resolved.reasons["algorithm.loss_options.sampler_correction"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (on_vllm("in_process"), "all weights are trained; use nccl, restart, single_copy or auto"),
        (on_vllm("lora", num_servers=2), "all weights are trained; use nccl, restart or auto"),
        (on_vllm("single_copy", lora=True), r"adapters are trained \(model\.lora\); use lora or auto"),
        (on_vllm("nccl", lora=True), r"adapters are trained \(model\.lora\); use lora or auto"),
        (on_vllm("restart", urls=["http://h:1"]), "only servers that the run started are restarted"),
    ],
)
def test_how_they_can_not(made, said):
    with pytest.raises(ConfigError, match=said):
        resolve(made, num_train_tasks=None)


CUT = {"devices": [3, 4], "num_ranks": 2, "tensor_ranks": 2}
PARTS = {"devices": [3, 4], "tensor_parallel_size": 2}
BESIDE = {"trainer": {"devices": [3]}, "engine": {"kind": "vllm_server", "devices": [3]}}


def beside(**sections) -> Recipe:
    """A server on the trainer's GPU."""
    return recipe(**{name: BESIDE.get(name, {}) | sections.get(name, {}) for name in BESIDE | sections})


@pytest.mark.parametrize(
    ("made", "mode", "why"),
    [
        (beside(), "single_copy", "two processes on GPU 3, which NCCL can't connect, so they hold one copy of the weights"),
        (beside(model={"path": "builtin:tiny", "lora": {}}), "lora", "adapters are small and go as files"),
        (
            beside(engine={"dtype": "bfloat16"}),
            "restart",
            "NCCL can't connect, and one copy of the weights can't be had: the e",
        ),
        (beside(weight_sync={"every_steps": 2}), "restart", "weight_sync.every_steps=2"),
        (
            beside(trainer={"devices": [3, 4], "num_ranks": 2}, engine={"devices": [3, 4], "num_servers": 2}),
            "single_copy",
            "so they hold one copy",
        ),
        (beside(trainer=CUT | {"parallel": "ddp"}, engine=PARTS), "single_copy", "so they hold one copy"),
        (
            beside(
                trainer={"devices": [3, 4], "num_ranks": 2, "parallel": "zero1"}, engine={"devices": [3, 4], "num_servers": 2}
            ),
            "single_copy",
            "so they hold one copy",
        ),
        (
            beside(trainer={"devices": [3, 4], "num_ranks": 2}, engine={"devices": [3]}),
            "restart",
            "trainer.num_ranks=2 and engine.num_servers=1",
        ),
        (
            beside(trainer={"devices": [3, 4], "num_ranks": 2, "parallel": "fsdp2"}, engine={"devices": [4]}),
            "nccl",
            "over a process group from rank 0, on GPU 3, which it shares with no server",
        ),
    ],
)
def test_how_weights_reach_a_server_on_the_trainers_gpu(made, mode, why):
    resolved = resolve(made, num_train_tasks=None)
    assert resolved.recipe.weight_sync.mode == mode
    assert why in resolved.reasons["weight_sync.mode"]
    assert resolve(resolved.recipe, num_train_tasks=None).recipe == resolved.recipe


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (on_vllm("single_copy", urls=["http://h:1"]), "engine.urls are servers of others"),
        (
            on_vllm("single_copy", tensor_parallel_size=2),
            "cut over trainer.tensor_ranks=1 and engine.tensor_parallel_size=2; use nccl, or the same for both",
        ),
        (
            beside(trainer=CUT | {"tensor_ranks": 1, "parallel": "ddp"}, engine=PARTS, weight_sync={"mode": "single_copy"}),
            "cut over trainer.tensor_ranks=1 and engine.tensor_parallel_size=2",
        ),
        (
            beside(trainer=CUT | {"num_ranks": 4}, engine=PARTS, weight_sync={"mode": "single_copy"}),
            "there are trainer.num_ranks=4 and engine.num_servers x engine.tensor_parallel_size=2; use nccl",
        ),
        (
            beside(
                trainer={"devices": [3, 4], "num_ranks": 2, "parallel": "fsdp2"}, engine={"devices": [4, 3], "num_servers": 2}
            ),
            "use weight_sync.mode=nccl and other engine.devices than 3, from which rank 0 sends",
        ),
        (on_vllm("single_copy", num_servers=2), "there are trainer.num_ranks=1 and engine.num_servers=2"),
        (on_vllm("single_copy", dtype="bfloat16"), "weights of another type, engine.dtype=bfloat16"),
        (on_vllm("single_copy", extra_args={"enable_sleep_mode": True}), "enable_sleep_mode gives the weights back"),
        (
            beside(weight_sync={"mode": "single_copy", "every_steps": 3}),
            "with one copy every step is a push, and weight_sync.every_steps=3",
        ),
        (
            beside(weight_sync={"mode": "single_copy"}, trainer={"num_ranks": 2, "parallel": "fsdp2", "devices": [3, 4]}),
            "fsdp2 cuts every weight into shards of its own, which can't be views of a server's tensors",
        ),
        (
            recipe(engine={"kind": "vllm"}, weight_sync={"mode": "single_copy", "every_steps": 3}),
            "with one copy every step is a push, and weight_sync.every_steps=3; use in_process",
        ),
    ],
)
def test_when_there_can_not_be_one_copy(made, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(made, num_train_tasks=None)


def test_layers_that_an_engine_has_too_are_not_shards():
    made = beside(trainer=CUT, engine=PARTS, weight_sync={"mode": "single_copy"})
    resolved = resolve(made, num_train_tasks=None)
    assert resolved.recipe.trainer.parallel == "ddp"
    assert "cut as the engine cuts its own" in resolved.reasons["trainer.parallel"]
    assert resolve(resolved.recipe, num_train_tasks=None).recipe == resolved.recipe


def test_a_push_by_restart_has_the_time_of_a_start():
    resolved = resolve(on_vllm("restart", start_deadline_s=200.0), num_train_tasks=None)
    assert resolved.recipe.weight_sync.deadline_s == 260.0
    assert "a push is a start" in resolved.reasons["weight_sync.deadline_s"]
    assert resolve(on_vllm(), num_train_tasks=None).recipe.weight_sync.deadline_s == 60.0
