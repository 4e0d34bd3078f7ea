"""What a recipe needs installed is said before anything loads; folders of adapters are looked at with their base."""

from __future__ import annotations

import json

import pytest

from parts.environments import Colours
from polyturn.errors import MissingDependencyError, ModelError
from polyturn.loop import check
from polyturn.loop.check import check_model, check_packages
from polyturn.models.folder import adapter_base, base_name, is_adapter
from unit.loop.makers import make_recipe

HALF = {"path": "some/model", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sections", "package", "extra"),
    [
        ({"model": {**HALF, "lora": {}}}, "peft", "lora"),
        ({"model": {**HALF, "lora": {}, "quantize": "8bit"}}, "bitsandbytes", "quantization"),
        ({"trainer": {"optimizer": "adamw_8bit"}}, "bitsandbytes", "quantization"),
    ],
)
def test_a_package_that_is_missing(monkeypatch, sections, package, extra):
    monkeypatch.setattr(check, "has_package", lambda name: name != package)
    with pytest.raises(MissingDependencyError, match=rf"needs the package {package}; pip install 'polyturn\[{extra}\]'"):
        check_packages(make_recipe(**sections))
    monkeypatch.setattr(check, "has_package", lambda name: name == package or "quantize" in sections.get("model", {}))
    check_packages(make_recipe(**sections))


def test_attention_of_a_package_that_is_missing(monkeypatch):
    recipe = make_recipe(model={**HALF, "attention": "flash_attention_2"})
    monkeypatch.setattr(check, "has_package", lambda name: name != "flash_attn")
    with pytest.raises(MissingDependencyError, match=r"needs the package flash_attn; .* or use model\.attention=auto"):
        check_packages(recipe)
    monkeypatch.setattr(check, "has_package", lambda name: name == "flash_attn")
    check_packages(recipe)


def test_a_recipe_without_them_needs_none(monkeypatch):
    monkeypatch.setattr(check, "has_package", lambda name: False)
    check_packages(make_recipe())


@pytest.fixture
def adapters(tmp_path):
    def make(base: object):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return tmp_path

    return make


def test_adapters_are_checked_with_their_base(adapters, colours_model, monkeypatch):
    monkeypatch.setattr(check, "has_package", lambda name: True)
    folder = adapters(str(colours_model))
    assert is_adapter(folder)
    assert not is_adapter(colours_model)
    check_model(make_recipe(), Colours(), str(folder))
    long = make_recipe(rollout={"max_trajectory_tokens": 300}, trainer={"row_tokens": 300})
    with pytest.raises(ModelError, match="exceeds the 256 positions"):
        check_model(long, Colours(), str(folder))
    monkeypatch.setattr(check, "has_package", lambda name: False)
    with pytest.raises(MissingDependencyError, match="holds adapters, which need the package peft"):
        check_model(make_recipe(), Colours(), str(folder))


@pytest.mark.parametrize("base", ["builtin:tiny", "builtin:smollm2", "owner/name"])
def test_bases_that_are_no_folder(adapters, base):
    assert adapter_base(adapters(base)) == base == base_name(base)


@pytest.mark.parametrize(("base", "says"), [(None, "does not say which model"), ("", "does not say"), (3, "does not say")])
def test_adapters_without_a_base(adapters, base, says):
    with pytest.raises(ModelError, match=says):
        adapter_base(adapters(base))


def test_adapters_of_adapters(adapters, tmp_path):
    with pytest.raises(ModelError, match="adapters themselves"):
        adapter_base(adapters(str(tmp_path)))


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        adapter_base(tmp_path)


def test_a_folder_is_found_from_anywhere(colours_model, monkeypatch):
    monkeypatch.chdir(colours_model.parent)
    assert base_name(f"./{colours_model.name}") == str(colours_model.resolve())


@pytest.mark.parametrize("package", ["amzn_sagemaker_checkpointing", "s3torchconnector", "tenacity"])
def test_amazons_library_and_what_it_imports(monkeypatch, package):
    recipe = make_recipe(checkpoint={"backend": "sagemaker_tiered", "every": {"memory": 1}})
    monkeypatch.setattr(check, "has_package", lambda name: name != package)
    with pytest.raises(MissingDependencyError, match=rf"needs the package {package}; .*polyturn\[sagemaker-checkpoints\]"):
        check_packages(recipe)
    monkeypatch.setattr(check, "has_package", lambda name: True)
    check_packages(recipe)
