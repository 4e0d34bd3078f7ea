"""Opening messages as a recipe's tokenizer cuts them: how long they are, and whether they leave room for a reply."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from polyturn.config.schema import Recipe
from polyturn.data.cache import Encode, TokenCache, Tokenised, file_hash, tokenise
from polyturn.data.hub import PREFIX
from polyturn.data.transform import Transform
from polyturn.environments.base import Environment
from polyturn.errors import DataError, ModelError
from polyturn.loop.check import chat_template
from polyturn.loop.tasks import authors_code
from polyturn.models.folder import SMOLLM2, TINY, model_folder
from polyturn.rendering.renderer import Renderer
from polyturn.rendering.words import save_word_tokenizer
from polyturn.types import Message, Task, TaskSource


def recipe_renderer(recipe: Recipe, environment: Environment) -> Renderer:
    """Tokenizer and chat template of the recipe's model, without its weights. A hub id may be fetched.

    Raises:
        ModelError, EnvironmentSetupError: no usable tokenizer, or `builtin:tiny` for words that are open.
    """
    if recipe.model.path != TINY:
        return Renderer.load(tokenizer_folder(recipe.model.path), chat_template=chat_template(recipe))
    vocabulary = environment.vocabulary()
    with tempfile.TemporaryDirectory(prefix="polyturn-words-") as folder:
        save_word_tokenizer(folder, vocabulary.words, vocabulary.pattern)
        return Renderer.load(folder, chat_template=chat_template(recipe))


def tokenizer_folder(path: str) -> Path:
    """The folder of any model but `builtin:tiny`; `builtin:smollm2` is made when the cache doesn't hold it."""
    if path == SMOLLM2:
        from polyturn.models.smollm2 import ensure_smollm2  # brings torch, which no other model needs here

        return ensure_smollm2(lambda _: None)
    return model_folder(path)


def refuse_long_openings(recipe: Recipe, tasks: TaskSource, renderer: Renderer) -> None:
    """Raise DataError with every row whose opening leaves no room for a reply: its rollouts would all be lost.

    Only rows of the user's files are looked at, all of them; tasks that an environment makes are its own business.
    """
    limit, data = recipe.rollout.max_trajectory_tokens, recipe.data
    if data.path is None or tasks.size is None:
        return
    rows = [tasks[index] for index in range(tasks.size)]
    transform = None if data.transform is None else Transform(data.transform)
    tokenised = encode_all(recipe, renderer, data.path, transform)([row.messages for row in rows])
    problems = [f"{rows[index].id}: {reason}" for index, reason in sorted(tokenised.problems.items())]
    problems += [
        f"{row.id}: the opening takes {length:,} tokens, which leaves no room for a reply in "
        f"rollout.max_trajectory_tokens={limit:,}; leave the row out, or raise the limit"
        for row, length in zip(rows, tokenised.lengths.tolist(), strict=True)
        if length >= limit
    ]
    if problems:
        raise DataError("\n".join(problems))


def refuse_hidden_tools(environment: Environment, tasks: TaskSource | Sequence[Task], renderer: Renderer) -> None:
    """Raise ModelError when the first of `tasks` has tools that the chat template would not tell the model of."""
    with authors_code(f"{environment.name}.tool_specs"):
        specs = environment.tool_specs(tasks[0])
    if specs and not renderer.shows_tools:
        raise ModelError(
            f"the chat template does not announce tools, and environment {environment.name} leaves {specs[0].name} to it; "
            "have the environment announce them in a system message, or set model.chat_template to a template that does"
        )


def encoder_of(folder: Path, template: Path | None) -> Encode:
    """The encoder of a model folder, made in a process of its own."""
    return encoder(Renderer.load(folder, chat_template=template))


def encoder(renderer: Renderer) -> Encode:
    """Opening messages to the ids of the first prompt."""

    def encode(messages: Sequence[Message]) -> Sequence[int]:
        return renderer.open(messages).prompt().ids

    return encode


def tokenizer_key(renderer: Renderer) -> str:
    """Changes when the tokenizer or the template does, or what the template writes of itself, such as a date."""
    digest = hashlib.sha256(renderer.tokenizer.backend.to_str().encode())
    digest.update(renderer.template.source.encode())
    digest.update(renderer.text([{"role": "user", "content": "x"}]).encode())
    return digest.hexdigest()


def encode_all(
    recipe: Recipe, renderer: Renderer, path: str, transform: Transform | None, *, use_cache: bool = True
) -> Callable[[Sequence[Sequence[Message]]], Tokenised]:
    """Tokenises the openings of a file, in `data.num_workers` processes, through `data.cache_dir` where the recipe has one."""
    encode, data = encoder(renderer), recipe.data
    again = None  # the words of builtin:tiny are cut faster than a process starts
    if recipe.model.path != TINY:
        again = partial(encoder_of, tokenizer_folder(recipe.model.path), chat_template(recipe))

    def encode_openings(openings: Sequence[Sequence[Message]]) -> Tokenised:
        # A hub data set has a cache of its own, and no bytes here to know it by.
        if data.cache_dir is None or not use_cache or path.startswith(PREFIX):
            return tokenise(openings, encode, num_workers=data.num_workers, again=again)
        cache = TokenCache(data.cache_dir)
        entry = cache.entry(
            file=file_hash(path),
            transform="" if transform is None else transform.key,
            tokenizer=tokenizer_key(renderer),
        )
        return cache.tokenised(entry, openings, encode, num_workers=data.num_workers, again=again)

    return encode_openings
