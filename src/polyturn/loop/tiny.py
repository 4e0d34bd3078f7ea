"""`builtin:tiny`: built for an environment's words, warm-started on its demonstrations, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from polyturn.config.schema import Recipe
from polyturn.environments.base import Environment
from polyturn.errors import ModelError
from polyturn.loop.warmstart import Accuracy, WarmstartSettings, warmstart
from polyturn.models.folder import TINY
from polyturn.models.load import export_model
from polyturn.models.tiny import build_tiny
from polyturn.rendering.renderer import Renderer
from polyturn.rendering.words import save_word_tokenizer

FORMAT = 1
"""Part of the cache key: raised when the model, its start or the demonstrations change."""

START = WarmstartSettings(
    max_steps=1000, cooldown_steps=20, learning_rate=1e-3, target_accuracy=0.93, target_worst=0.5, check_every=5
)
"""Far enough to copy, not to persist: reinforcement has something to start from and everything to gain."""


def cache_folder() -> Path:
    """`POLYTURN_CACHE`, else `polyturn` in the user's cache folder."""
    named = os.environ.get("POLYTURN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyturn"


async def ensure_tiny(recipe: Recipe, environment: Environment, say: Callable[[str], None]) -> Path:
    """The folder of `builtin:tiny` for this environment and seed, made when the cache doesn't hold it.

    Raises:
        EnvironmentSetupError: the environment has no closed vocabulary.
        ModelError: the warm start did not reach its accuracy, or the cache can't be written to.
    """
    vocabulary = environment.vocabulary()
    key = {
        "format": FORMAT,
        "environment": recipe.environment.id,
        "args": recipe.environment.args,
        "seed": recipe.run.seed,
        "words": vocabulary.words,
        "pattern": vocabulary.pattern,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = cache_folder() / "models" / f"tiny-{environment.name}-{digest}"
    if (folder / "config.json").is_file():
        say(f"model: {TINY} from the cache, {folder}")
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"{TINY} is kept in {folder.parent}, which can't be written to ({error.strerror}); set POLYTURN_CACHE to a folder "
            "of yours"
        ) from error
    try:
        await _make(recipe, environment, draft, say)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another run made the same one meanwhile
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


async def _make(recipe: Recipe, environment: Environment, folder: Path, say: Callable[[str], None]) -> None:
    vocabulary = environment.vocabulary()
    save_word_tokenizer(folder, vocabulary.words, vocabulary.pattern)
    renderer = Renderer.load(folder)
    tokenizer, end = renderer.tokenizer, renderer.stop_ids[0]
    model = build_tiny(vocab_size=tokenizer.vocab_size, eos_id=end, pad_id=end, seed=recipe.run.seed)
    size = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {tokenizer.vocab_size} words"
    say(f"model: {TINY}, {size}; warm start on the demonstrations of {environment.name}")
    copied = frozenset(tokenizer.encode(word)[0] for word in vocabulary.copied)

    def report(step: int, nll: float, accuracy: Accuracy | None) -> None:
        if accuracy is not None and step % (10 * START.check_every) == 0:
            say(f"warmstart step={step} nll={nll:.4g} copy_accuracy={accuracy.mean:.3f} worst_word={accuracy.worst:.3f}")

    result = await warmstart(recipe, environment, renderer, model, START, counted_ids=copied, on_step=report)
    assert START.target_accuracy is not None
    reached = f"copy_accuracy={result.accuracy.mean:.3f} worst_word={result.accuracy.worst:.3f}"
    if result.accuracy.mean < START.target_accuracy or result.accuracy.worst < START.target_worst:
        raise ModelError(
            f"{TINY} reaches {reached} in {result.steps} steps on the demonstrations of {environment.name}, and reinforcement "
            f"starts from {START.target_accuracy} and {START.target_worst}; use a larger model, or simpler environment.args"
        )
    say(f"warmstart done after {result.steps} steps, {reached}")
    export_model(model, folder, folder)
    assert torch.isfinite(next(model.parameters())).all(), "a warm start that diverged can't reach its accuracy"
