"""What the command line runs besides training: measure a model, warm-start one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from polyturn.errors import ConfigError
from polyturn.loop.build import build_engine, load_policy
from polyturn.loop.check import Checked, chat_template
from polyturn.loop.evaluate import Evaluation, evaluate
from polyturn.loop.tasks import held_out_tasks
from polyturn.loop.warmstart import Accuracy, WarmstartResult, WarmstartSettings, warmstart
from polyturn.models.load import export_model
from polyturn.processes.threads import in_thread


async def evaluate_model(
    checked: Checked, *, model: str | None, episodes: int | None, samples: int | None, say: Callable[[str], None]
) -> dict[str, Evaluation]:
    """Evaluate `model` (the recipe's when None) in the recipe's modes. Raises ConfigError without held-out tasks."""
    recipe, environment = checked.recipe, checked.environment
    tasks = held_out_tasks(recipe, environment, episodes)
    if not tasks:
        raise ConfigError(
            "there are no held-out tasks; give --episodes 1 or more, and data.eval_path when tasks come from a file"
        )
    policy = await load_policy(recipe, environment, say, path=model)
    engine = build_engine(recipe, policy.model)
    await engine.start()
    try:
        return {
            mode: await evaluate(
                recipe,
                environment,
                policy.renderer,
                engine,
                tasks,
                mode=mode,
                samples_per_task=samples or recipe.evaluation.samples_per_task,
            )
            for mode in recipe.evaluation.modes
        }
    finally:
        await engine.stop()


async def warmstart_model(
    checked: Checked, settings: WarmstartSettings, out: Path, *, say: Callable[[str], None]
) -> WarmstartResult:
    """Warm-start the recipe's model and write it to `out`. Raises UserError for a model that can't be loaded."""
    recipe, environment = checked.recipe, checked.environment
    policy = await load_policy(recipe, environment, say)

    def report(step: int, nll: float, accuracy: Accuracy | None) -> None:
        if accuracy is not None:
            say(f"warmstart step={step} nll={nll:.4g} token_accuracy={accuracy.mean:.3f}")

    result = await warmstart(
        recipe, environment, policy.renderer, policy.model, settings, source=checked.train_tasks, on_step=report
    )
    await in_thread(partial(export_model, chat_template=chat_template(recipe)), policy.model, policy.folder, out)
    return result
