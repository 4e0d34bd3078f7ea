"""A run that goes on is the run that was never cut; what it goes on from, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest

from parts.kills import PHASES, Cut, arm, comparable, files_of, metrics_of
from parts.memory_tier import memory_tier
from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.loop import resume as resuming
from polyturn.metrics.run_folder import RunFolder
from polyturn.storage.manifest import read_manifest

RUN = [
    "run.steps=4",
    "engine.deterministic=true",
    "checkpoint.every.disk=1",
    "evaluation.every_steps=2",
    "evaluation.episodes=2",
]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Checkpoints are written where they are saved: a process of their own costs seconds; the real tests have it."""

    class Here(Checkpointer):
        def __init__(self, *given, separate, **named):
            super().__init__(*given, separate=False, **named)

    monkeypatch.setattr("polyturn.loop.saving.Checkpointer", Here)


def steps_in(folder):
    return sorted(path.name for path in (folder / "checkpoints" / folder.name).glob("step_*"))


def cut_run(bench, monkeypatch, phase, step, *words):
    def cut():
        raise Cut

    with monkeypatch.context() as patching:
        arm(phase, step, cut, patching.setattr)
        with pytest.raises(Cut):
            bench("train", *RUN, *words)


# ── exactness ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def whole(bench):
    ended = bench("train", *RUN, "run.name=whole")
    assert (ended.code, ended.err) == (0, "")
    return ended


@pytest.mark.parametrize("phases", [pytest.param(tuple(PHASES), marks=pytest.mark.real, id="all"), ("optimizer",)])
def test_cut_at_any_phase_it_is_the_run_that_was_never_cut(bench, monkeypatch, whole, phases):
    for number, phase in enumerate(phases):
        words = ("run.name=cut", f"run.output_dir={bench.folder / phase}")
        cut_run(bench, monkeypatch, phase, 2 + number % 2, *words)
        ended = bench("train", *RUN, *words, "--resume")
        assert (ended.code, ended.err) == (0, ""), phase
        assert comparable(ended.metrics) == comparable(whole.metrics), phase
        assert files_of(ended.folder) == files_of(whole.folder), phase
        assert not (ended.folder / "checkpoints" / ".resume").exists()
        assert list((ended.folder / "checkpoints" / ".writing").iterdir()) == []


@pytest.mark.real
def test_cut_before_there_is_a_checkpoint_it_starts_anew_in_its_folder(bench, monkeypatch, whole):
    cut_run(bench, monkeypatch, "optimizer", 1, "run.name=cut")
    ended = bench("train", *RUN, "run.name=cut", "--resume")
    assert ended.folder == bench.runs / "cut"
    assert "run cut has no checkpoint yet, so it starts from the beginning" in ended.out
    assert comparable(ended.metrics) == comparable(whole.metrics)


@pytest.mark.real
def test_a_run_with_nothing_to_go_on_from_just_starts(bench):
    ended = bench("train", "--resume", "run.steps=1", "run.name=fresh", "evaluation.episodes=0")
    assert ended.code == 0
    assert ended.folder == bench.runs / "fresh"


@pytest.mark.real
def test_a_run_that_has_ended_can_be_longer(bench, whole):
    first = bench("train", *RUN, "run.name=longer", "run.steps=2")
    ended = bench("train", *RUN, "run.name=longer", "--resume")
    assert first.folder == ended.folder
    assert "since the checkpoint was saved, run.steps: 2 -> 4" in ended.out
    assert files_of(ended.folder) == files_of(whole.folder)
    assert comparable(ended.metrics) == comparable(whole.metrics)


@pytest.mark.real
def test_what_is_remembered_across_a_cut(bench, monkeypatch):
    """Fixed reference, guard, schedule: all of them would show in the numbers."""
    words = ["algorithm.loss_options.beta=0.1", "trainer.schedule=linear", "trainer.warmup_steps=2", "evaluation.episodes=0"]
    whole = bench("train", *RUN, *words, "run.name=whole")
    cut_run(bench, monkeypatch, "backward", 3, *words, "run.name=cut")
    ended = bench("train", *RUN, *words, "run.name=cut", "--resume")
    assert comparable(ended.metrics) == comparable(whole.metrics)
    assert files_of(ended.folder) == files_of(whole.folder)


@pytest.mark.real
def test_a_lagging_engine_is_saved_where_it_has_caught_up(bench, monkeypatch):
    words = ["weight_sync.every_steps=2", "evaluation.every_steps=null", "evaluation.episodes=0"]
    whole = bench("train", *RUN, *words, "run.name=whole")
    assert steps_in(whole.folder) == ["step_00000002", "step_00000004"]
    cut_run(bench, monkeypatch, "backward", 4, *words, "run.name=cut")
    ended = bench("train", *RUN, *words, "run.name=cut", "--resume")
    assert comparable(ended.metrics) == comparable(whole.metrics)
    assert files_of(ended.folder) == files_of(whole.folder)


# ── which one ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_newest_whole_one_is_taken_and_the_others_named(bench, monkeypatch, whole):
    cut_run(bench, monkeypatch, "backward", 4, "run.name=cut")
    store = bench.runs / "cut" / "checkpoints" / "cut"
    (shard,) = (store / "step_00000003").glob("__0_0.distcp.*")
    shard.chmod(0o644)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    ended = bench("train", *RUN, "run.name=cut", "--resume")
    assert "step_00000003 in tier disk is not taken: its shard __0_0.distcp is damaged" in ended.out
    assert "goes on after step 2" in ended.out
    assert files_of(ended.folder) == files_of(whole.folder)
    assert steps_in(ended.folder) == ["step_00000002", "step_00000003", "step_00000004"]
    assert read_manifest(store / "step_00000003").step == 3


def test_no_whole_one_is_an_error_and_nothing_is_lost(bench, monkeypatch):
    cut_run(bench, monkeypatch, "backward", 2, "run.name=cut")
    (shard,) = (bench.runs / "cut" / "checkpoints" / "cut" / "step_00000001").glob("state.json.*")
    shard.unlink()
    ended = bench("train", *RUN, "run.name=cut", "--resume")
    assert ended.code == 3
    assert "nothing starts anew unasked: step_00000001 in tier disk is not taken: its shard state.json" in ended.err
    assert len(metrics_of(bench.runs / "cut")) > 1


def test_the_newest_folder_of_that_name(tmp_path):
    for name in ("lookup", "lookup-2", "lookup-10", "lookup-x", "lookups", "lookup-3.txt"):
        (tmp_path / name).mkdir()
    assert resuming.newest_folder(tmp_path, "lookup") == tmp_path / "lookup-10"
    assert resuming.newest_folder(tmp_path, "other") is None
    assert resuming.newest_folder(tmp_path, "lookup*") is None


def test_metrics_that_are_made_again_do_not_stand_twice(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    lines = [{"step": 0, "eval/success": 0}, {"step": 1, "loss": 1}, {"step": 2, "loss": 2}, {"step": 2, "eval/success": 1}]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3, "loss": 3}]) + '{"step": 3, "eval/su'
    for step, kept in ((2, 3), (1, 2), (0, 0), (3, 5)):
        folder.metrics.write_text(text)
        for number in (1, 2, 3):
            folder.trajectories_of(number).write_text("")
        resuming.trim(folder, step=step)
        assert len(metrics_of(folder.root)) == kept
        assert len(list(folder.trajectories.iterdir())) == step


# ── a new run from a checkpoint ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_a_checkpoint_by_its_path_starts_a_new_run_that_goes_on(bench, whole):
    path = whole.folder / "checkpoints" / "whole" / "step_00000002"
    ended = bench("train", *RUN, "run.name=other", "--resume", str(path))
    assert ended.folder == bench.runs / "other"
    assert [line["step"] for line in ended.steps] == [3, 4]
    assert files_of(ended.folder)["model"] == files_of(whole.folder)["model"]
    again = bench("train", *RUN, "--resume", str(whole.folder))
    assert again.folder == whole.folder, "a run folder goes on in its place"
    assert again.steps == whole.steps


@pytest.mark.real
@pytest.mark.parametrize("load", ["model", "model+optimizer"])
def test_a_part_of_one_starts_a_run_from_the_beginning(bench, whole, load):
    path = str(whole.folder / "checkpoints" / "whole" / "step_00000004")
    words = (*RUN, "run.name=part", "trainer.learning_rate=0.001", "rollout.groups_per_step=3", "evaluation.every_steps=null")
    ended = bench("train", *words, "--resume", path, "--load", load)
    assert (ended.code, ended.err) == (0, "")
    assert [line["step"] for line in ended.metrics] == [0, 1, 2, 3, 4, 4]
    assert ended.metrics[0]["eval/reward"] == whole.metrics[-1]["eval/reward"], (
        "measured before training: the weights are there"
    )
    assert ended.steps[0]["optimizer_step"] == 1


@pytest.mark.real
def test_a_run_from_a_checkpoint_that_is_cut_before_its_own_starts_as_it_did(bench, monkeypatch, whole):
    path = str(whole.folder / "checkpoints" / "whole" / "step_00000002")
    cut_run(bench, monkeypatch, "backward", 3, "run.name=other", "--resume", path)
    ended = bench("train", *RUN, "run.name=other", "--resume")
    assert "has no checkpoint of its own yet, so it starts as it did" in ended.out
    assert [line["step"] for line in ended.steps] == [3, 4]
    assert files_of(ended.folder)["model"] == files_of(whole.folder)["model"]


@pytest.mark.real
def test_weights_alone(bench, whole):
    light = bench("train", *RUN, "run.name=light", "checkpoint.contents=model")
    path = light.folder / "checkpoints" / "light" / "step_00000004"
    assert read_manifest(path).num_bytes < read_manifest(whole.folder / "checkpoints/whole/step_00000004").num_bytes / 2
    refused = bench("train", *RUN, "run.name=light", "run.steps=5", "--resume")
    assert refused.code == 2
    assert "holds weights only (checkpoint.contents=model), and a run can't go on from those" in refused.err
    assert bench("train", *RUN, "run.name=from", "--resume", str(path), "--load", "model").code == 0


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_recipe_is_shown_and_refused(bench, whole):
    ended = bench(
        "train", *RUN, "run.name=whole", "rollout.group_size=6", "trainer.learning_rate=0.5", "run.seed=1", "--resume"
    )
    assert ended.code == 2
    for change in ("rollout.group_size: 4 -> 6", "trainer.learning_rate: 0.003 -> 0.5", "run.seed: 0 -> 1"):
        assert change in ended.err
    assert comparable(metrics_of(whole.folder)) == comparable(whole.metrics), "nothing was touched"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "model"], "--load=model says how much of a checkpoint to take"),
        (["--resume", "--load", "model"], "--load=model starts a new run"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_options_that_make_no_sense(bench, words, said):
    ended = bench("train", *RUN, *words)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.real
def test_adapters_go_on_and_take_little_room(bench, monkeypatch):
    pytest.importorskip("peft")
    words = ["model.lora.rank=2", "evaluation.episodes=0", "evaluation.every_steps=null"]
    whole = bench("train", *RUN, *words, "run.name=whole")
    cut_run(bench, monkeypatch, "backward", 3, *words, "run.name=cut")
    ended = bench("train", *RUN, *words, "run.name=cut", "--resume")
    assert (ended.code, ended.err) == (0, "")
    assert comparable(ended.metrics) == comparable(whole.metrics)
    weights = [(run.folder / "export" / "adapter_model.safetensors").read_bytes() for run in (whole, ended)]
    assert weights[0] == weights[1]
    (state,) = (whole.folder / "checkpoints" / "whole" / "step_00000004").glob("state.json.*")
    module = json.loads(state.read_text())["state"]["modules"]["policy"]
    assert module["model"]
    assert all(".lora_" in name for name in module["model"]), "the base model is in its own folder"
    assert len(module["optimizer"]["rule"]["state"]["dict"]) == len(module["model"])
    refused = bench("train", *RUN, "run.name=whole", "--resume")
    assert refused.code == 2
    assert "model.lora" in refused.err


# ── exports and failures ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_exports_as_training_goes_and_from_a_checkpoint_afterwards(bench):
    ended = bench("train", *RUN, "run.name=exports", "checkpoint.export_every=2")
    exports = ended.folder / "exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step_2", "step_4"]
    assert (exports / "step_4" / "model.safetensors").read_bytes() == files_of(ended.folder)["model"]
    card = (exports / "step_2" / "README.md").read_text()
    assert "# exports, step 2" in card
    assert "| 0 | sampled |" in card
    out = bench.folder / "out"
    done = bench.raw("export", str(ended.folder), "--step", "2", "--out", str(out))
    assert (done.code, done.err) == (0, "")
    assert (out / "model.safetensors").read_bytes() == (exports / "step_2" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (exports / "step_2").iterdir())
    assert bench.raw("export", str(ended.folder), "--step", "9", "--out", str(bench.folder / "x")).err.endswith(
        "has no checkpoint of step 9; it has 2, 3, 4\n"
    )
    assert bench.raw("export", str(bench.folder / "none"), "--out", str(bench.folder / "y")).code == 2


def test_a_disk_that_fails_is_told_and_training_goes_on(bench, monkeypatch):
    def fails(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyturn.checkpoint.writing.write_files", fails)
    ended = bench("train", *RUN, "run.name=full")
    assert ended.code == 0
    assert "the checkpoint of step 2 was not saved: No space left on device" in ended.out
    assert sum(line.get("checkpoint/failures", 0) for line in ended.steps) >= 2
    assert steps_in(ended.folder) == []


@pytest.mark.real
def test_memory_is_a_tier_of_its_own(bench, monkeypatch, tmp_path):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", tmp_path / "shm")
    words = ["run.name=cut", "checkpoint.every.memory=1", "checkpoint.every.disk=3"]
    cut_run(bench, monkeypatch, "backward", 3, *words)
    assert steps_in(bench.runs / "cut") == []
    ended = bench("train", *RUN, *words, "--resume")
    assert "goes on after step 2, from step_00000002 in tier memory" in ended.out
    assert steps_in(ended.folder) == ["step_00000003", "step_00000004"]
    assert not list((tmp_path / "shm").rglob("MANIFEST.json")), "the disk has it, and memory is for others again"
    shutil.rmtree(ended.folder)
    cut_run(bench, monkeypatch, "backward", 3, *words)
    assert list((tmp_path / "shm").rglob("MANIFEST.json"))
    shutil.rmtree(ended.folder)
    fresh = bench("train", *RUN, *words)
    assert [line["step"] for line in fresh.steps] == [1, 2, 3, 4], "memory of a run whose folder was removed is not its own"


@pytest.mark.real
def test_a_mirror_outlives_the_machine_of_the_run(bench, monkeypatch, tmp_path, whole):
    machine = tmp_path / "machine"
    (machine / "shm").mkdir(parents=True)
    monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", machine / "shm")
    monkeypatch.setenv("POLYTURN_MEMORY_TIER_TOKEN", "secret")
    with memory_tier(machine / "daemon") as own, memory_tier(tmp_path / "peer") as peer:
        words = ["run.name=cut", "checkpoint.every.memory=1", "checkpoint.every.disk=4", f"checkpoint.mirrors=[{own},{peer}]"]
        cut_run(bench, monkeypatch, "backward", 3, *words)
        shutil.rmtree(machine)
        shutil.rmtree(bench.runs / "cut")
        monkeypatch.setattr("polyturn.checkpoint.places._SHARED_MEMORY", tmp_path)
        refused = bench("train", *RUN, *words)
        assert refused.code == 2
        assert f"{peer} has checkpoints of a run cut already" in refused.err
        ended = bench("train", *RUN, *words, "--resume")
        assert ended.code == 0
        assert "run cut goes on after step 2, from step_00000002 in tier mirror-2" in ended.out
        assert files_of(ended.folder)["model"] == files_of(whole.folder)["model"]
        assert not list((tmp_path / "peer").rglob("MANIFEST.json")), "the run has ended, and memory is for others again"


@pytest.mark.real
def test_a_run_goes_on_from_what_amazons_library_has_saved(bench, monkeypatch, tmp_path, whole):
    pytest.importorskip("amzn_sagemaker_checkpointing")
    with memory_tier(tmp_path / "daemon", hyperpod=True) as url:
        daemon = f"checkpoint.memory_daemon={url.replace('memory-tier', 'http')}"
        every = ["checkpoint.every.memory=1", "checkpoint.every.disk=4"]
        words = ["run.name=cut", "checkpoint.backend=sagemaker_tiered", daemon, *every]
        cut_run(bench, monkeypatch, "backward", 3, *words)
        shutil.rmtree(bench.runs / "cut")
        assert "has checkpoints of a run cut already" in bench("train", *RUN, *words).err
        ended = bench("train", *RUN, *words, "--resume")
        assert "run cut goes on after step 2, from step_00000002 in tier memory" in ended.out
        assert files_of(ended.folder)["model"] == files_of(whole.folder)["model"]
        assert not list((tmp_path / "daemon").rglob("*.meta")), "the run has ended, and the disk has its last checkpoint"


@pytest.mark.real
def test_a_url_that_holds_another_run_of_that_name_is_refused(bench, tmp_path):
    words = [*RUN, f"checkpoint.url={tmp_path / 'store'}", "run.name=named"]
    assert bench("train", *words).code == 0
    assert steps_in(bench.runs / "named")
    elsewhere = f"run.output_dir={tmp_path / 'elsewhere'}"
    refused = bench("train", *words, elsewhere)
    assert refused.code == 2
    assert "has checkpoints of a run named already" in refused.err
    assert not (tmp_path / "elsewhere" / "named").exists()
    ended = bench("train", *words, "run.steps=5", elsewhere, "--resume")
    assert [line["step"] for line in ended.steps] == [5], "a machine that knows nothing but the recipe goes on"
