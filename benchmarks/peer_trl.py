"""A training step of TRL's GRPOTrainer and of Polyturn, side by side on one GPU, and vLLM alone in between.

python benchmarks/peer_trl.py --out benchmarks/results/peer_trl.json

Same GPU, SmolLM2-135M-Instruct, 4,096 sums, chat template, sampling (temperature 1, at most 256 tokens), vLLM in the
trainer's process at 0.3 of the GPU, 64 prompts x 8 completions a step, learning rate 1e-5. Each system runs in a process of its
own, one after the other; the first --warmup steps are left out of medians. TRL as it comes: float32 weights under a bfloat16
autocast, eight micro-batches of 64. Polyturn: bfloat16 weights that vLLM and the trainer share, float32 masters. With
`--parts polyturn trl polyturn/full` also Polyturn with layers computed again and rows four times as long, since a small model
is held up by launching kernels, row by row; `polyturn/shared` in addition computes the question of a group once.

What is compared: seconds a step (rollout, train, push), completion tokens, reward, and the peak of PyTorch's allocator over
the measured steps, in all and without vLLM's pool of keys and values. Polyturn leaves out groups without any advantage, TRL
computes them: `trained_tokens` says how much. `vllm_alone_s`: after the rollout of every step, before its training, the same
engine is asked the same prompts by vLLM's own loop, with the policy of this step, nothing else at work and no prompt kept; the
step's own seconds leave that out. `over_vllm_s` is a step less that, `over_vllm_for_as_many_tokens_s` the same for as many
tokens, since both sample anew, and `rollout_of_vllm` is a rollout's time a token over vLLM's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
PROMPTS, SIBLINGS, MOST_TOKENS, CONTEXT, SHARE = 64, 8, 256, 1024, 0.3
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
}
LONG_ROWS = {"activations": "full", "row_tokens": 32768}
PARTS = {"polyturn": {}, "trl": None, "polyturn/full": LONG_ROWS, "polyturn/shared": LONG_ROWS | {"share_prefixes": "on"}}
"""Of Polyturn, what its trainer is told besides."""


def sums(count: int = 4096) -> list[dict[str, str]]:
    """Questions and answers."""
    chance, rows = random.Random(0), []
    for _ in range(count):
        one, other = chance.randrange(2, 100), chance.randrange(2, 100)
        rows.append({"question": f"What is {one}+{other}? Answer with just the number.", "answer": str(one + other)})
    return rows


def is_right(text: str, answer: str) -> bool:
    """Whether the last word is the number."""
    return text.strip().rstrip(".").split()[-1:] == [answer]


def correct(trajectory: Any, task: Any) -> float:
    """The reward of Polyturn's recipe."""
    return float(is_right(trajectory.text, task.answer))


def pool_bytes(engine: Any) -> int:
    """What an engine of vLLM in this process keeps for keys and values."""
    caches, sizes = [engine.model_executor.driver_worker.worker.model_runner.kv_caches], {}
    while caches:
        one = caches.pop()
        if isinstance(one, list | tuple):
            caches.extend(one)
        else:
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(sizes.values())


def memory(pool: int) -> dict[str, float]:
    """Peak of the allocator since it was last reset."""
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "peak_gib": round(peak / GIB, 2),
        "pool_gib": round(pool / GIB, 2),
        "peak_without_pool_gib": round((peak - pool) / GIB, 2),
    }


def reset_peak() -> None:
    """Count from now on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait for the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def vllm_alone(run: Any, number: int) -> tuple[int, float]:
    """Tokens and seconds of the prompts of step `number`, counted from 0, by vLLM's own loop in the engine of `run`."""
    from engine_measuring import prompts_of, raw_within

    renderer, thread = run.policy.renderer, run.engine._thread
    prompts = prompts_of(run.checked, renderer, number)
    done: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()

    def ask() -> None:
        try:
            thread._core.forget()  # the same prompts were computed a moment ago
            found: Any = raw_within(thread._core, prompts, renderer.stop_ids, MOST_TOKENS)
        except Exception as error:
            done.get_loop().call_soon_threadsafe(done.set_exception, error)
        else:
            done.get_loop().call_soon_threadsafe(done.set_result, found)

    thread.post(ask)
    return await done


def trl(model: Path, steps: int) -> dict[str, Any]:
    """GRPOTrainer with vLLM in its process."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        os.environ.setdefault(name, value)
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in sums()]
    on_gpu = torch.cuda.is_available()

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(is_right(one[0]["content"], wanted)) for one, wanted in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=SHARE,
        vllm_max_model_length=CONTEXT, per_device_train_batch_size=64, gradient_accumulation_steps=PROMPTS * SIBLINGS // 64,
        num_generations=SIBLINGS, max_completion_length=MOST_TOKENS, learning_rate=1e-5, max_steps=steps, bf16=on_gpu,
        logging_steps=1, save_strategy="no", report_to=[], beta=0.0, temperature=1.0, warmup_steps=0,
        lr_scheduler_type="constant", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(str(model), reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows))
    spent = {"rollout_s": 0.0, "push_s": 0.0}

    def timed(name: str, method: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            result = method(*arguments, **keywords)
            synchronize()
            spent[name] += time.perf_counter() - began
            return result

        return run

    vllm = trainer.vllm_generation
    vllm.generate, vllm.sync_weights = timed("rollout_s", vllm.generate), timed("push_s", vllm.sync_weights)
    found: list[dict[str, Any]] = []

    class Watch(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                reset_peak()
            spent.update(rollout_s=0.0, push_s=0.0)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronize()
            whole = time.perf_counter() - self.began
            found.append({"step": state.global_step, "step_s": whole, **spent, "train_s": whole - sum(spent.values())})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in (logs or {}):
                length = logs["completions/mean_length"]
                found[-1] |= {"reward": logs["reward"], "completion_tokens": round(length * PROMPTS * SIBLINGS)}
                print(json.dumps(found[-1]), flush=True)

    trainer.add_callback(Watch())
    trainer.train()
    return {"steps": found, "memory": memory(pool_bytes(vllm.llm.llm_engine))}


def polyturn(model: Path, steps: int, told: dict[str, Any]) -> dict[str, Any]:
    """`polyturn train` with vLLM in its process; its trainer is `told` that besides."""
    import torch

    from polyturn.cli.main import main
    from polyturn.engine.vllm_core import VllmCore
    from polyturn.loop import sync
    from polyturn.weight_sync.single_copy import SingleCopyBridge

    folder = Path(tempfile.mkdtemp())
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()))
    (folder / "recipe.yaml").write_text(json.dumps(_recipe(folder, model, steps, told, on_gpu=torch.cuda.is_available())))
    pool: list[int] = []
    alone: list[dict[str, float]] = []
    close, push, before_training = VllmCore.close, SingleCopyBridge.push, sync.sleep

    def close_and_tell(core: Any) -> None:
        pool.append(pool_bytes(core._engine))
        close(core)

    async def ask_vllm_too(run: Any) -> None:
        """Between rollout and training: the policy that rolled out is still in place, and nothing else runs."""
        began = time.perf_counter()
        tokens, seconds = await vllm_alone(run, len(alone))
        alone.append({"vllm_alone_s": seconds, "vllm_alone_tokens": tokens, "aside_s": time.perf_counter() - began})
        await before_training(run)

    async def push_and_reset(bridge: Any, version: int) -> None:
        await push(bridge, version)
        if version == 1:
            reset_peak()

    VllmCore.close, SingleCopyBridge.push = close_and_tell, push_and_reset  # type: ignore[method-assign]
    sync.sleep = ask_vllm_too
    code = main(["train", str(folder / "recipe.yaml")])
    assert code == 0, f"polyturn train ended with {code}"
    lines = [json.loads(line) for line in (folder / "runs" / "peer" / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if "tokens_per_s" in line]
    found = [of_step(line, beside) for line, beside in zip(done, alone, strict=True)]
    return {"steps": found, "memory": memory(pool[0])}


def of_step(line: dict[str, Any], beside: dict[str, float]) -> dict[str, Any]:
    """A step of Polyturn from its metrics, without the time in which vLLM was asked alone."""
    step_s = line["time/step_s"] - beside["aside_s"]
    tokens = round(line["completion_tokens_per_trajectory"] * PROMPTS * SIBLINGS)
    return {
        "step": line["step"],
        "step_s": step_s,
        "rollout_s": line["time/rollout_s"],
        "train_s": line["time/train_s"],
        "push_s": line["time/push_s"],
        "reward": line["reward"],
        "completion_tokens": tokens,
        "vllm_alone_s": beside["vllm_alone_s"],
        "vllm_alone_tokens": beside["vllm_alone_tokens"],
        "over_vllm_s": step_s - beside["vllm_alone_s"],
        "rollout_of_vllm": line["time/rollout_s"] / tokens * beside["vllm_alone_tokens"] / beside["vllm_alone_s"],
        "over_vllm_for_as_many_tokens_s": step_s - beside["vllm_alone_s"] * tokens / beside["vllm_alone_tokens"],
        "trained_tokens": line["num_trained_tokens"],
        "zero_advantage_groups": line["num_zero_advantage_groups"],
        "mismatch": line.get("mismatch"),
    }


def _recipe(folder: Path, model: Path, steps: int, told: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    return {
        "run": {"name": "peer", "steps": steps, "output_dir": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "bfloat16" if on_gpu else "float32"},
        "data": {"path": str(folder / "sums.jsonl")},
        "environment": {"id": "chat", "rewards": [{"path": "peer_trl:correct", "success_at": 1.0}]},
        "rollout": {
            "group_size": SIBLINGS,
            "groups_per_step": PROMPTS,
            "max_turns": 1,
            "max_turn_tokens": MOST_TOKENS,
            "max_trajectory_tokens": CONTEXT,
        },
        "engine": {
            "kind": "vllm",
            "gpu_memory_utilization": SHARE,
            "max_batch_size": PROMPTS * SIBLINGS,
            "extra_args": {"max_num_batched_tokens": 4096},
        },
        "algorithm": {"advantage": "grpo", "loss": "bnpo"},
        "trainer": {"learning_rate": 1e-5, "warmup_steps": 0, "betas": [0.9, 0.999], **told},
        "evaluation": {"episodes": 0},
        "logging": {"trajectories_every": 0},
    }


def medians(steps: list[dict[str, Any]], warmup: int) -> dict[str, float]:
    """Of every number, over the steps after the warm-up."""
    kept = steps[warmup:]
    return {
        key: round(statistics.median(line[key] for line in kept), 4)
        for key in kept[0]
        if key != "step" and all(isinstance(line.get(key), int | float) for line in kept)
    }


def main() -> None:
    """Run the three parts one after the other, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of the model; SmolLM2 is made where none is named")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["polyturn", "trl"])
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        told = PARTS[options.inside]
        result = trl(options.model, options.steps) if told is None else polyturn(options.model, options.steps, told)
        options.out.write_text(json.dumps(result))
        return
    from machine import PACKAGES, describe_machine

    from polyturn.models.smollm2 import ensure_smollm2

    model = options.model or ensure_smollm2(print)
    record = describe_machine(packages=(*PACKAGES, "vllm", "trl"))
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            began = time.perf_counter()
            ended = subprocess.run(
                [
                    sys.executable,
                    __file__,
                    "--inside",
                    part,
                    "--out",
                    str(out),
                    "--model",
                    str(model),
                    "--steps",
                    str(options.steps),
                ],
                env={**os.environ, **ENVIRONMENT},
                timeout=3600,
                check=False,
            )
            if ended.returncode or not out.exists():
                record[part] = {"failed": ended.returncode}
            else:
                result = json.loads(out.read_text())
                record[part] = {"medians": medians(result["steps"], options.warmup), **result}
            record[part]["whole_s"] = round(time.perf_counter() - began, 1)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(part, json.dumps(record[part].get("medians")), record[part].get("memory"), flush=True)


if __name__ == "__main__":
    main()
