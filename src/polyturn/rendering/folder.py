"""What a model folder says about its tokenizer, in files that grew over the years.

    tokenizer.json                  vocabulary, rules, added tokens                                   required
    tokenizer_config.json           names of special tokens; older folders: the chat template too     optional
    special_tokens_map.json         names of special tokens, where the file above has none            optional
    generation_config.json          eos_token_id, one id or several                                   optional
    config.json                     eos_token_id, one id or several                                   optional
    chat_template.jinja             the chat template                                                 optional
    chat_template.json              the chat template of some multimodal folders                      optional

Only the first must be there, and one of the others must name the end of a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from polyturn.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A model folder's tokenizer, read and checked."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Read `folder`. Raises ModelError where something is missing or contradicts the vocabulary."""
        backend = _backend(folder)
        config = {**_json(folder / "special_tokens_map.json"), **_present(_json(folder / "tokenizer_config.json"))}
        names = {role: _token(config.get(role), backend) for role in ("bos_token", "eos_token", "pad_token")}
        return cls(
            backend=backend,
            eos_ids=_eos_ids(folder, backend, config),
            chat_template=_chat_template(folder, config),
            **names,
        )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json, which every model needs here; save the tokenizer with save_pretrained of a "
            "fast tokenizer, or name another folder"
        )
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} is not a tokenizer: {error}; download it again, or upgrade the tokenizers package") from error


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, it must hold an object; download it again")
    return value


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _name(value: object) -> str | None:
    """A token's name, written as a string or as an object with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token(value: object, backend: tokenizers.Tokenizer) -> str | None:
    """A token's name where the vocabulary has it: other names (a padding token nobody added) can't be used."""
    name = _name(value)
    return name if name is not None and backend.token_to_id(name) is not None else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[int, ...]:
    """Every id that a file of the folder calls the end of a text, the tokenizer's own first."""
    ids: list[int] = []
    name = _name(config.get("eos_token"))
    if name is not None:
        token_id = backend.token_to_id(name)
        if token_id is None:
            raise ModelError(
                f"{folder} names eos_token {name!r}, which tokenizer.json doesn't have; name a token of its vocabulary"
            )
        ids.append(token_id)
    for path in (folder / "generation_config.json", folder / "config.json"):
        content = _json(path)
        value, text_config = content.get("eos_token_id"), content.get("text_config")
        if value is None and isinstance(text_config, dict):
            value = text_config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or backend.id_to_token(token_id) is None:
                raise ModelError(
                    f"{path} has eos_token_id {token_id!r}, which tokenizer.json doesn't have; the model and the tokenizer "
                    "of a folder must belong together"
                )
            ids.append(token_id)
    if not ids:
        raise ModelError(f"{folder} names no end of text; set eos_token in tokenizer_config.json to the token that ends a turn")
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template; of several named ones, the default."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    value = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
        if value is None:
            raise ModelError(
                f"{folder} has chat templates {sorted(map(str, named))} and none is named default; "
                "set model.chat_template to the file of the one to use"
            )
    return value if isinstance(value, str) else None
