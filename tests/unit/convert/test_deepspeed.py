"""A DeepSpeed JSON: what it sets, what it says in vain, and what is refused, each in a sentence with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, with_values
from polyturn.config.yaml_lines import dotted
from polyturn.convert.convert import Converted, convert
from polyturn.errors import ConfigError

FILES = Path(__file__).parents[2] / "data" / "convert"
RECIPE = Recipe(model=ModelSection(path="builtin:tiny"), environment=EnvironmentSection(id="lookup"))
FOUR = with_values(RECIPE, "trainer", num_ranks=4)
STAGE = {"train_batch_size": "auto"}


def keys(found: Converted) -> dict[str, object]:
    return {dotted(taken.key): taken.value for taken in found.taken}


def refused(path: str, recipe: Recipe | None = FOUR) -> str:
    with pytest.raises(ConfigError) as caught:
        convert(path, recipe)
    return str(caught.value)


def test_a_file_of_literals_sets_all_it_says_and_its_batch_says_how_many_ranks():
    assert keys(convert(FILES / "deepspeed_zero3.json")) == {
        "trainer.num_ranks": 2,
        "trainer.parallel": "deepspeed",
        "trainer.max_grad_norm": 1.0,
        "trainer.optimizer": "adamw",
        "trainer.learning_rate": 1e-5,
        "trainer.adam_epsilon": 1e-8,
        "trainer.weight_decay": 0.01,
        "trainer.betas": [0.9, 0.95],
        "trainer.schedule": "cosine",
        "trainer.warmup_steps": 5,
        "trainer.min_learning_rate_ratio": 0.1,
        "model.dtype": "bfloat16",
        "rollout.groups_per_step": 8,
    }


def test_auto_leaves_it_to_the_recipe_and_says_so():
    found = convert(FILES / "deepspeed_auto.json", FOUR)
    assert keys(found) == {"trainer.parallel": "fsdp2", "trainer.optimizer": "adamw", "trainer.schedule": "constant"}
    (auto,) = [note for note in found.notes if ": auto: the recipe decides about " in note]
    for key in ("gradient_clipping", "optimizer.params.lr", "bf16.enabled", "train_batch_size"):
        assert key in auto


@pytest.mark.parametrize(("stage", "parallel"), [(0, "ddp"), (1, "zero1"), (2, "fsdp2"), (3, "deepspeed")])
def test_stages(given, stage, parallel):
    found = convert(given({"zero_optimization": {"stage": stage}}), FOUR)
    assert keys(found) == {"trainer.parallel": parallel}
    (taken,) = found.taken
    assert taken.place == "ds.json:3"
    if stage == 2:
        assert "ZeRO-2 cuts" in taken.why
        assert "trainer.parallel=ddp" in taken.why


def test_one_rank_has_nothing_to_share_and_may_offload(given):
    found = convert(given({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}), RECIPE)
    assert keys(found) == {"trainer.offload_optimizer": True}
    assert any("trainer.num_ranks=N" in note for note in found.notes)
    assert any("nothing to share" in note for note in found.notes)


def test_copies_within_a_node(given):
    file = given({"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert keys(convert(file, FOUR))["trainer.shard_ranks"] == 2


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"fp16": {"enabled": True}}, r"ds\.json:3: fp16\.enabled: true: there is no fp16 here.*use bf16"),
        ({"zero_optimization": {"stage": 4}}, "stages 0 to 3"),
        ({"zero_optimization": {"stage": "3x"}}, "stage: 3x: this is text, and a number is needed"),
        ({"zero_optimization": True}, "this is a truth value, and a mapping of keys is needed"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "shards of the optimizer's state stay"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "weights stay on the GPUs"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "give cpu or none"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "nothing here does that; remove it"),
        ({"bf16": {"enabled": "maybe"}}, "true or false is needed"),
        ({"gradient_clipping": 0}, "always clipped here"),
        ({"gradient_cliping": 1.0, **STAGE}, r"ds\.json:2: gradient_cliping: .*did you mean gradient_clipping\?"),
        ({"zero_optimization": {"stage": 3, "overlap_com": True}}, r"did you mean overlap_comm\?"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "no such optimizer here; use AdamW or SGD"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "sgd has no momentum"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "decoupled here"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "a list of 2 numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "a number of 0 or more"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0}}}, "above 0"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}}, "no such schedule here; use WarmupLR"),
        ({"pipeline": {"stages": 2}, **STAGE}, "pipeline: .*nothing here does that"),
        ({"amp": {"enabled": True}, **STAGE}, "nothing here does that"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}, **STAGE}, "trainer.activations=full"),
    ],
)  # fmt: skip
def test_what_can_not_be_had_is_refused_with_its_line(given, held, words):
    said = refused(given(held))
    assert re.search(words, said), said
    assert all(line.startswith("ds.json:") for line in said.splitlines())


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((64, 4, 2), "must be train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=2 x 4 ranks = 32"),
        ((30, 4, None), "must divide by train_micro_batch_size_per_gpu=4 x 4 ranks = 16; set it to 16 or 32"),
        ((36, None, 2), "must divide by gradient_accumulation_steps=2 x 4 ranks = 8; set it to 32 or 40"),
        ((30, None, None), "must divide by 4 ranks = 4; set it to 28 or 32"),
        ((20, None, None), "20 trajectories are no whole number of groups of rollout.group_size=8 siblings; make it 16 or 24"),
        ((None, 5, 3), "5 x 3 x 4 ranks = 60 trajectories are no whole number"),
        ((0, None, None), "a number of 1 or more"),
        ((6.5, None, None), "a whole number is needed"),
    ],
)
def test_a_batch_must_multiply_out_as_it_does_there(given, batch, words):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    held = {name: value for name, value in zip(names, batch, strict=True) if value is not None}
    assert words in refused(given(held))


@pytest.mark.parametrize(
    ("batch", "groups"), [((64, 8, 2), 8), ((64, None, None), 8), ((None, 4, 2), 4), ((None, 16, None), 8)]
)
def test_a_batch_is_trajectories_and_becomes_groups(given, batch, groups):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    held = {name: value for name, value in zip(names, batch, strict=True) if value is not None}
    assert keys(convert(given(held), FOUR)) == {"rollout.groups_per_step": groups}
    cut = with_values(FOUR, "trainer", optimizer_steps_per_batch=2)
    assert keys(convert(given(held), cut)) == {"rollout.groups_per_step": 2 * groups}


def test_a_fix_for_a_group_size_is_one_that_works(given):
    said = refused(given({"train_batch_size": 20}))
    size = int(re.search(r"set rollout\.group_size=(\d+)", said)[1])
    assert keys(convert(given({"train_batch_size": 20}), with_values(FOUR, "rollout", group_size=size)))


def test_a_schedule_goes_before_the_optimizers_rate(given):
    held = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 3, "warmup_type": "linear"}},
    }
    found = convert(given(held), FOUR)
    assert keys(found)["trainer.learning_rate"] == 2e-5
    assert keys(found)["trainer.betas"] == [0.9, 0.999]  # of DeepSpeed's AdamW, where they are left out


def test_a_switch_for_unused_parameters_is_answered_in_a_sentence(given):
    found = convert(given({"zero_optimization": {"stage": 2, "ignore_unused_parameters": True}}), FOUR)
    assert any("never waited for, so there is no such switch" in note for note in found.notes)
