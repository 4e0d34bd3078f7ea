"""A recipe as roles: names, order, commands and variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polyturn.config.schema import Recipe
from polyturn.engine import vllm_arguments
from polyturn.engine.vllm_install import VllmInstall
from polyturn.errors import ConfigError
from polyturn.launch.roles import described, needs_processes, role_specs

CONFIG = Path("runs/x/recipe.yaml")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def recipe(**sections):
    base = {"model": {"path": "builtin:tiny"}, "environment": {"id": "lookup"}}
    return Recipe.model_validate(base | sections)


def everything(**launch):
    return recipe(
        environment={"id": "lookup", "num_processes": 2, "start_deadline_s": 7.0},
        engine={"kind": "hf_server", "num_servers": 2, "start_deadline_s": 9.0},
        trainer={"num_ranks": 2},
        launch=launch,
    )


def specs(asked, gpus=(), environ=None, cores=8):
    return {spec.name: spec for spec in role_specs(asked, list(gpus), CONFIG, environ=environ or {}, cores=cores)}


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, False),
        ({"engine": {"kind": "hf_server"}}, True),
        ({"trainer": {"num_ranks": 2}}, True),
        ({"environment": {"id": "lookup", "num_processes": 1}}, True),
        ({"engine": {"num_servers": 3}}, False),
    ],
)
def test_when_a_run_has_more_than_one_process(sections, needed):
    assert needs_processes(recipe(**sections)) == needed


def test_roles_in_the_order_they_start():
    found = specs(everything())
    assert list(found) == ["environment-0", "environment-1", "engine-0", "engine-1", "trainer-agent"]
    agent = found["trainer-agent"]
    assert agent.needs == ("environment-0", "environment-1", "engine-0", "engine-1")
    assert agent.members == ("trainer-0", "trainer-1")
    assert [found[name].stage for name in found] == [0, 0, 0, 0, 1]
    assert (found["environment-1"].start_deadline_s, found["environment-1"].deadline_key) == (
        7.0,
        "environment.start_deadline_s",
    )
    assert (found["engine-0"].start_deadline_s, found["engine-0"].deadline_key) == (9.0, "engine.start_deadline_s")
    words = ("-m", "polyturn", "role", "engine-1", "--config", str(CONFIG))
    assert found["engine-1"].argv[0] == sys.executable
    assert found["engine-1"].argv[-6:] == words


def test_a_recipe_of_one_process_is_the_trainer_alone():
    (only,) = specs(recipe()).values()
    assert (only.name, only.members, only.needs, only.stage) == ("trainer-agent", ("trainer-0",), (), 1)


def test_variables_on_the_cpu():
    found = specs(everything(), cores=10)
    assert found["environment-0"].environment == {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("engine-0", "trainer-agent"):
        more = {"GLOO_SOCKET_IFNAME": loopback}
        assert found[name].environment == found["environment-0"].environment | more
    assert "GLOO_SOCKET_IFNAME" not in specs(recipe())["trainer-agent"].environment, "nobody to talk to"


def test_variables_with_gpus():
    found = specs(everything(), ["4", "5", "6", "7"])
    assert [found[name].environment["CUDA_VISIBLE_DEVICES"] for name in found] == ["", "", "6", "7", "4,5"]
    assert [name for name in found if ALLOCATOR in found[name].environment] == ["trainer-agent"]
    assert found["trainer-agent"].environment[ALLOCATOR] == "expandable_segments:True"
    assert [name for name in found if "NCCL_SOCKET_IFNAME" in found[name].environment] == [
        "engine-0",
        "engine-1",
        "trainer-agent",
    ]


def test_threads_are_at_least_one_and_the_users_own_when_set():
    assert specs(everything(), cores=2)["engine-0"].environment["OMP_NUM_THREADS"] == "1"
    assert specs(everything(), environ={"OMP_NUM_THREADS": "3"})["engine-0"].environment["OMP_NUM_THREADS"] == "3"
    assert int(next(iter(role_specs(recipe(), [], CONFIG, environ={}))).environment["OMP_NUM_THREADS"]) >= 1


def test_the_log_level_passes_in_capitals():
    assert specs(recipe(), environ={"LOGLEVEL": "debug"})["trainer-agent"].environment["LOGLEVEL"] == "DEBUG"
    assert "LOGLEVEL" not in specs(recipe())["trainer-agent"].environment


def test_launch_env_wins_over_everything():
    own = {
        "OMP_NUM_THREADS": "5",
        "CUDA_VISIBLE_DEVICES": "9",
        "TOKENIZERS_PARALLELISM": "true",
        "LOGLEVEL": "ERROR",
        "MINE": "x",
    }
    found = specs(everything(env=own), ["0", "1", "2", "3"], environ={"OMP_NUM_THREADS": "3", "LOGLEVEL": "debug"})
    for spec in found.values():
        assert own.items() <= spec.environment.items()


def test_the_line_of_a_role_shows_no_secret():
    own = {"WANDB_API_KEY": "secret-1", "HF_TOKEN": "secret-2", "DB_PASSWORD": "secret-3", "EMPTY": "", "TWO": "a b"}
    lines = [described(spec) for spec in specs(everything(env=own)).values()]
    assert not any("secret" in line or "\n" in line for line in lines)
    assert lines[0].startswith("environment-0: CUDA_VISIBLE_DEVICES='' DB_PASSWORD=(set) EMPTY='' HF_TOKEN=(set) ")
    assert lines[0].endswith(" TOKENIZERS_PARALLELISM=false TWO='a b' WANDB_API_KEY=(set)")
    assert "POLYTURN_RUN_TOKEN=(set)" in lines[0]
    assert lines[-1].startswith("trainer-agent (trainer-0 to trainer-1): ")


# ── vLLM servers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def installed(monkeypatch):
    """A vLLM, for whoever only asks whether there is one."""
    monkeypatch.setattr(vllm_arguments, "find_vllm", lambda: VllmInstall(version="0.32.0", needs_scale_out_flag=True))


def on_vllm(**engine):
    return recipe(engine={"kind": "vllm_server", "num_servers": 2} | engine)


def test_each_vllm_server_is_a_role_with_its_gpus(installed):
    found = specs(on_vllm(tensor_parallel_size=2, start_deadline_s=50.0), gpus="012345")
    assert list(found) == ["engine-0", "engine-1", "trainer-agent"]
    visible = [found[name].environment["CUDA_VISIBLE_DEVICES"] for name in found]
    assert visible == ["2,3", "4,5", "0"]
    assert found["engine-0"].start_deadline_s == 80.0, "its own words about the start come first"
    assert ALLOCATOR not in found["engine-0"].environment


def test_servers_of_others_are_no_roles(installed):
    assert list(specs(on_vllm(urls=["http://h:1"]))) == ["trainer-agent"]


@pytest.mark.parametrize(
    ("engine", "environ", "said"),
    [
        ({}, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "VLLM_WORKER_MULTIPROC_METHOD=fork in the environment"),
        ({"extra_args": {"port": 3}}, {}, r"engine\.extra_args\.port: set engine\.port instead"),
    ],
)
def test_mistakes_about_vllm_are_told_before_anything_starts(installed, engine, environ, said):
    with pytest.raises(ConfigError, match=said):
        specs(on_vllm(**engine), environ=environ)
