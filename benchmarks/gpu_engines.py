"""Every engine of vLLM and every way to bring it weights: is it right, is it fast, what does it hold? On one GPU or two.

    python benchmarks/gpu_engines.py --out benchmarks/results/gpu_engines.json [--cases NAME ...] [--limit-s 540]

SmolLM2 in bfloat16 answers sums, 64 tasks x 8 siblings = 512 trajectories at once, at most 256 tokens each. A case is a process
of its own, as there is one engine of vLLM a process; each number is in the file as soon as it is known. `raw` is vLLM's own
`LLM.generate` on the same prompts. What a case looks at:

- `coverage`: share of the engine's numbers that a push reaches, by the tensors that it holds; `checksums_equal` of how many.
- `greedy_equal`: share of greedy tokens that are also the trainer's most probable ones, by its own model with plain attention
  and all that was sampled before; `greedy_worst_nats`: how much more probable the trainer's was, at most, where they differ;
  `greedy_right` when that is no more than twice the largest gap of the first look, when nothing was trained yet.
- `gap`: mean difference of the log-probabilities of sampled tokens, engine against trainer, after a push; `gap_stale`: the same
  against the answers of before the push, to see that it would show (the optimizer's steps in between are large ones).
- `rollout_tokens_per_s`: Polyturn's whole rollout, to natural ends; `fixed_tokens_per_s`: 512 requests of exactly 256 tokens,
  to the engine alone. Beside them `raw_...` in the same engine, where it is in this process, and `.._of_raw` as shares.
- `vllm/rollout_ways` looks at where a rollout's seconds go (`rollout_ways.py`) instead.
- `held_before_push_gib`, `held_after_push_gib`: PyTorch's allocator; with one copy of the weights the second is less.

The model folder is made beforehand, outside all deadlines. On a CPU (`--small`) everything is tried with few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cases import Told, end_on_signal, options_of, python, run_chosen
from engine_measuring import Look, Sizes, measure, named, prompts_of, rate, share, vllm_sampling
from engine_roles import last_words, take_trainers_variables
from rollout_ways import in_turns

from polyturn.config.load import load_recipe
from polyturn.config.schema import Recipe
from polyturn.errors import UserError
from polyturn.loop.check import Checked, check
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.gpus import visible_gpus

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart" / "recipe.yaml"
TRAIN = Path(__file__).parents[1] / "recipes" / "arithmetic-smollm2-1gpu" / "train.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine and a bridge, as sections of a recipe."""

    needs_gpus: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    mode: str = "auto"
    pushes: int | None = None
    """Pushes that are timed, where the usual number would take minutes."""
    look: Look | None = None
    """What is looked at instead."""


SHARED = {"devices": [0], "gpu_memory_utilization": 0.3}
LORA = {"rank": 8, "alpha": 16.0}
CASES = {
    "raw": Case(engine={"kind": "vllm"}),
    "vllm/single_copy": Case(engine={"kind": "vllm"}, mode="single_copy"),
    "vllm_server/nccl": Case(needs_gpus=2, engine={"kind": "vllm_server"}, mode="nccl"),
    "vllm/in_process": Case(engine={"kind": "vllm"}, mode="in_process"),
    "vllm_server/lora": Case(
        model={"lora": LORA}, engine={"kind": "vllm_server", **SHARED}, trainer={"devices": [0]}, mode="lora"
    ),
    "vllm_server/single_copy": Case(engine={"kind": "vllm_server", **SHARED}, trainer={"devices": [0]}, mode="single_copy"),
    "vllm/in_process/second_gpu": Case(needs_gpus=2, engine={"kind": "vllm", "device": "cuda:1"}, mode="in_process"),
    "vllm_server/restart": Case(engine={"kind": "vllm_server", **SHARED}, trainer={"devices": [0]}, mode="restart", pushes=1),
    "vllm/rollout_ways": Case(engine={"kind": "vllm"}, mode="single_copy", look=in_turns),
    "vllm/single_copy/float32": Case(model={"dtype": "float32"}, engine={"kind": "vllm"}, mode="single_copy"),
}
"""In the order of what is wanted most."""


FULL = Sizes()
SMALL = Sizes(tasks=2, siblings=2, most_tokens=12, rounds=1, pushes=2, judged=4, greedy_tokens=6, turns=2)


def recipe_of(case: Case, sizes: Sizes, model: str, folder: Path, *, on_gpu: bool) -> Recipe:
    """The recipe of a case. Raises UserError."""
    lookup, quick = model == "builtin:tiny", load_recipe(QUICKSTART)
    quick_rollout = quick.rollout
    engine = {"max_batch_size": sizes.tasks * sizes.siblings, "start_deadline_s": 420.0, **case.engine}
    trainer = {"compile": "off", "warmup_steps": 0, "learning_rate": 1e-3 if case.model.get("lora") else 1e-4, **case.trainer}
    if not on_gpu:  # numbers of GPUs mean nothing there
        engine = {key: value for key, value in engine.items() if key not in ("devices", "device", "gpu_memory_utilization")}
        trainer.pop("devices", None)
    return Recipe.model_validate(
        {
            "run": {"name": "engines", "steps": 10, "output_dir": str(folder)},
            "model": {"path": model, "dtype": "bfloat16" if on_gpu else "float32", **case.model},
            "environment": quick.model_dump()["environment"] if lookup else {"id": "chat", "args": {"exact": True}},
            **({} if lookup else {"data": {"path": str(TRAIN)}}),
            "rollout": {
                "group_size": sizes.siblings,
                "groups_per_step": sizes.tasks,
                **({"max_turns": quick_rollout.max_turns} if lookup else {"max_turns": 1}),
                "max_turn_tokens": sizes.most_tokens,
                "max_trajectory_tokens": quick_rollout.max_trajectory_tokens if lookup else 512,
                "turn_deadline_s": 300.0,
            },
            "engine": engine,
            "algorithm": {"advantage": "rloo", "loss": "grpo"},
            "trainer": trainer,
            "weight_sync": {"mode": case.mode, "verify_every": 1, "max_mismatch": 1.0},
            "evaluation": {"episodes": 0},
        }
    )


# ── raw vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def raw(checked: Checked, sizes: Sizes, told: Told) -> None:
    """`LLM.generate`, with nothing of Polyturn around it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from polyturn.loop.build import policy_folder
    from polyturn.rendering.renderer import Renderer

    recipe = checked.recipe
    folder = asyncio.run(policy_folder(recipe, checked.environment, print, recipe.model.path))
    renderer = Renderer.load(folder)
    on_gpu = bool(visible_gpus())
    began = time.perf_counter()
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=recipe.model.dtype,
        max_model_len=recipe.rollout.max_trajectory_tokens,
        max_num_seqs=recipe.engine.max_batch_size,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        **({"gpu_memory_utilization": 0.3} if on_gpu else {"enforce_eager": True, "enable_chunked_prefill": False}),
    )
    told(start_s=round(time.perf_counter() - began, 1))
    for prefix, stop_ids in (("fixed", ()), ("rollout", renderer.stop_ids)):
        found = []
        for number in range(sizes.rounds + 1):
            prompts = [{"prompt_token_ids": list(ids)} for ids in prompts_of(checked, renderer, number)]
            began = time.perf_counter()
            outputs = llm.generate(prompts, vllm_sampling(stop_ids, sizes.most_tokens), use_tqdm=False)
            found.append((sum(len(one.outputs[0].token_ids) for one in outputs), time.perf_counter() - began))
            llm.reset_prefix_cache()
        told(**named(prefix, rate(found[1:])))


# ── all of them ────────────────────────────────────────────────────────────────────────────────────────────────────────


def inside(name: str, options: argparse.Namespace) -> None:
    """Be one case."""
    end_on_signal()
    told, case = Told(options.out), CASES[name]
    sizes = SMALL if options.small else FULL
    sizes = replace(sizes, pushes=case.pushes or sizes.pushes)
    gpus = visible_gpus()
    if gpus and len(gpus) < case.needs_gpus:
        told(skipped=f"{case.needs_gpus} GPUs are needed, and there is {len(gpus)}")
        return
    with tempfile.TemporaryDirectory(prefix="engines-") as scratch:
        try:
            checked = check(recipe_of(case, sizes, options.model, Path(scratch), on_gpu=bool(gpus)))
            if name == "raw":
                raw(checked, sizes, told)
                return
            take_trainers_variables(checked)
        except UserError as error:
            told(skipped=str(error))
            return
        folder = RunFolder.create(scratch, "engines")
        try:
            asyncio.run(measure(checked, sizes, folder, gpus, told, case.look))
        except BaseException:
            print(last_words(folder), flush=True)
            raise


def main() -> None:
    """Run the cases that are named, or all."""
    parser = options_of(__doc__, CASES, case_limit_s=240.0)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--small", action="store_true", help="few tokens, to try everything on a CPU")
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options)
        return
    from machine import PACKAGES, describe_machine

    if options.model == "builtin:smollm2":
        from polyturn.models.smollm2 import ensure_smollm2

        ensure_smollm2(print)

    def command(name: str, file: Path) -> list[str]:
        words = ["--inside", name, "--out", str(file), "--model", options.model]
        return python(__file__, *words, *(["--small"] if options.small else []))

    about = {**describe_machine(packages=PACKAGES), "vllm": vllm_version(), "small": options.small}
    record = run_chosen(options, command, about)
    alone = record.of("raw")
    shares = {
        name: {kind: share(found, f"{kind}_tokens_per_s", alone, f"{kind}_tokens_per_s") for kind in ("rollout", "fixed")}
        for name in CASES
        if name != "raw" and "rollout_tokens_per_s" in (found := record.of(name))
    }
    record.add(of_raw=shares)
    print(json.dumps(shares, indent=1))


def vllm_version() -> str:
    from polyturn.engine.vllm_install import _version

    return _version()


if __name__ == "__main__":
    main()
