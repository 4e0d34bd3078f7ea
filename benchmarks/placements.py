"""Whole runs on one or two GPUs: one copy of the weights for trainer and vLLM servers, or shards that are pushed to a server.

    python benchmarks/placements.py --out benchmarks/results/placements.json [--cases NAME ...] [--limit-s 540]

With one copy there is a server a rank, or ranks train on a server's parts. Shards (FSDP2) are on both GPUs and go over NCCL to
a server on the second, which is not the rank's that sends.

A case is `polyturn train` on the quickstart's tasks, with every push checked by checksums. `tiny` is the quickstart's own
model, `wide` one with random weights in the layers of Qwen2.5-1.5B, which weighs 1.3 billion parameters and gets rewards at
random (`random_rewards.py`). In the result for each case, from the run's own metrics file:

- `mismatch`, `mismatch_max`: of log-probabilities, engine against trainer, over all steps: near zero in float32, and in
  bfloat16 what rounding makes of it. `policy_age` is 0 when nothing was sampled from older weights.
- `push_s`, `train_s`, `rollout_s`: medians over the steps after the first; a push has its checksums with it. Servers compile
  nothing, to be up within a minute, so their rollouts take longer than a user's would. `push_phases_s` are the phases that
  docs/weight_sync.md has, medians too.
- `used_gib`: the most that the driver said was used of each GPU, by whomever, sampled once a second.

`refused` stands where a machine lacks the GPUs. On a CPU (`--small`) two cores do for everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import END_S, ENVIRONMENT, Told, end_on_signal, options_of, python, run_chosen

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart" / "recipe.yaml"
RANDOM = "random_rewards:RandomRewards"
QWEN_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A placement, as words of the command line. `model` is `tiny` or `wide`."""

    gpus: int
    words: tuple[str, ...]
    mode: str = "single_copy"
    engines: tuple[int, ...] | None = None
    """GPUs of the servers; None for those of the trainer."""
    model: str = "tiny"
    dtype: str = "bfloat16"


ONE = ("trainer.num_ranks=1", "engine.num_servers=1")
RANKS = ("trainer.num_ranks=2", "engine.num_servers=2")
PARTS = ("trainer.num_ranks=2", "trainer.tensor_ranks=2", "engine.tensor_parallel_size=2")
SHARDS = ("trainer.num_ranks=2", "trainer.parallel=fsdp2", "engine.num_servers=1")
CASES = {
    "two parts/tiny/float32": Case(gpus=2, words=PARTS, dtype="float32"),
    "two parts/wide": Case(gpus=2, words=PARTS, model="wide"),
    "two shards/tiny/float32": Case(gpus=2, words=SHARDS, mode="nccl", engines=(1,), dtype="float32"),
    "two servers/wide": Case(gpus=2, words=RANKS, model="wide"),
    "one server/wide": Case(gpus=1, words=ONE, model="wide"),
    "two servers/tiny/float32": Case(gpus=2, words=RANKS, dtype="float32"),
    "two shards/wide": Case(gpus=2, words=SHARDS, mode="nccl", engines=(1,), model="wide"),
    "one server/tiny/float32": Case(gpus=1, words=ONE, dtype="float32"),
}
"""In the order of what is wanted most."""


def words_of(case: Case, model: str, folder: Path, *, steps: int, on_gpu: bool) -> list[str]:
    """The overrides of a case."""
    numbers = list(range(case.gpus))
    engines = numbers if case.engines is None else list(case.engines)
    placed = (f"trainer.devices={numbers}", f"engine.devices={engines}", "engine.gpu_memory_utilization=0.4")
    dtype = case.dtype if on_gpu else "float32"
    return [
        f"run.output_dir={folder}",
        f"run.steps={steps}",
        f"model.path={model}",
        f"model.dtype={dtype}",
        "engine.kind=vllm_server",
        "engine.start_deadline_s=420",
        "engine.extra_args={enforce_eager: true}",
        f"weight_sync.mode={case.mode}",
        "weight_sync.verify_every=1",
        "weight_sync.max_mismatch=1.0",
        "evaluation.episodes=0",
        *((f"environment.id={RANDOM}", "trainer.learning_rate=1e-6") if case.model == "wide" else ()),
        *(placed if on_gpu else ()),
        *case.words,
    ]


def wide_model(folder: Path, *, small: bool) -> str:
    """A folder with the quickstart's tokenizer and a model of random weights; made once."""
    import asyncio

    import transformers

    from polyturn.config.load import load_recipe
    from polyturn.loop.build import policy_folder
    from polyturn.loop.check import check

    checked = check(load_recipe(RECIPE))  # the tiny model is trained when the cache doesn't hold it, with the recipe's limits
    tiny = asyncio.run(policy_folder(checked.recipe, checked.environment, print, checked.recipe.model.path))
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    settings = transformers.AutoConfig.from_pretrained(tiny)
    for key, value in (QWEN_1_5B if not small else {"num_hidden_layers": 3}).items():
        setattr(settings, key, value)
    transformers.AutoModelForCausalLM.from_config(settings).bfloat16().save_pretrained(folder)
    return str(folder)


class Watch:
    """The most of each GPU's memory that was used while it was open; nothing without GPUs."""

    def __enter__(self) -> Watch:
        self.most: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(SAMPLE_S):
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            except (OSError, subprocess.SubprocessError):
                return
            used = [float(line) / 1024 for line in said.split()]
            self.most = [max(pair) for pair in zip(used, self.most or used, strict=True)]


def inside(name: str, options: argparse.Namespace) -> None:
    """Be one case."""
    end_on_signal()
    told, case, on_gpu = Told(options.out), CASES[name], options.gpus > 0
    if on_gpu and options.gpus < case.gpus:
        told(refused=f"{case.gpus} GPUs are needed, and there is {options.gpus}")
        return
    model = options.wide if case.model == "wide" else "builtin:tiny"
    with tempfile.TemporaryDirectory(prefix="placements-") as scratch, Watch() as watch:
        words = words_of(case, model, Path(scratch), steps=options.steps, on_gpu=on_gpu)
        log = Path(scratch) / "said.txt"
        with log.open("w") as said:
            child = subprocess.Popen(python("-m", "polyturn", "train", str(RECIPE), *words), stdout=said, stderr=said)
            try:
                code = child.wait()  # until the case's own deadline, which ends the whole group
            finally:
                child.terminate()
                try:
                    child.wait(END_S)
                except subprocess.TimeoutExpired:
                    child.kill()
        print(log.read_text()[-6000:], flush=True)
        told(words=case.words, code=code, used_gib=[round(most, 2) for most in watch.most])
        metrics = next(Path(scratch).glob("*/metrics.jsonl"), None)
        if code == 0 and metrics is not None:
            told(**summary([json.loads(line) for line in metrics.read_text().splitlines()]))
    if code:
        raise SystemExit(code)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the steps of a run come to."""
    steps = [line for line in lines if "mismatch" in line]
    later = steps[1:] or steps
    return {
        "steps": len(steps),
        "reward": [round(step["reward"], 4) for step in steps],
        "mismatch": max(step["mismatch"] for step in steps),
        "mismatch_max": max(step["mismatch_max"] for step in steps),
        "policy_age": max(step["policy_age"] for step in steps),
        "policy_version": steps[-1]["policy_version"],
        "grad_norm": [round(step["grad_norm"], 5) for step in steps],
        **{
            f"{kind}_s": round(statistics.median(step[f"time/{kind}_s"] for step in later), 4)
            for kind in ("push", "train", "rollout")
        },
        "push_phases_s": {
            name.removeprefix("push/").removesuffix("_s"): round(statistics.median(step[name] for step in later), 4)
            for name in later[-1]
            if name.startswith("push/")
        },
    }


def main() -> None:
    """Run the cases that are named, or all."""
    parser = options_of(__doc__, CASES, case_limit_s=240.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="narrow layers, to try everything on a CPU")
    parser.add_argument("--wide", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options)
        return
    from machine import PACKAGES, describe_machine

    from polyturn.engine.vllm_install import find_vllm
    from polyturn.processes.gpus import visible_gpus

    with tempfile.TemporaryDirectory(prefix="wide-") as scratch:
        needs_wide = any(CASES[name].model == "wide" for name in options.cases)
        wide = wide_model(Path(scratch) / "model", small=options.small) if needs_wide else ""

        def command(name: str, file: Path) -> list[str]:
            words = ["--inside", name, "--out", str(file), "--steps", str(options.steps), "--wide", wide]
            return python(__file__, *words, "--gpus", str(len(visible_gpus())))

        about = {**describe_machine(packages=PACKAGES), "vllm": find_vllm().version, "small": options.small}
        # Parts of a server on a CPU have cores of their own, which no variable of a benchmark may take from them.
        unbound = {key: value for key, value in ENVIRONMENT.items() if key != "VLLM_CPU_OMP_THREADS_BIND"}
        folders = (str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        run_chosen(options, command, about, unbound)


if __name__ == "__main__":
    main()
