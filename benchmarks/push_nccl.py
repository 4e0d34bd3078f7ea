"""Seconds of a weight push over a process group, from pause to resume, by phase: NCCL from one GPU to another.

    python benchmarks/push_nccl.py --out benchmarks/results/push_nccl.json [--cases 1.5B 7B] [--pushes 9] [--limit-s 300]

Two GPUs: on the first a trainer's model of the shape (random bfloat16 weights), on the second a vLLM server that started with
dummy weights of the same shape, as a run starts it. Every push brings other values, so that one which did nothing would show:
checksums of all tensors are compared in the first push and after the last. Both sides wait for their GPU: the trainer before
the clock starts and after it stops, the server before it says that a push is finished.

`pause_to_resume_s` is for how long nothing is sampled, the sum of the phases from `pause` to `resume`; `whole_s` is the call.
Medians over the pushes after the first, which also meets. Phases: `pause`, `start`, `update` (in it `gather` and `wait` of the
trainer, `sent` until it had sent everything, `received` from then until the servers said that they have it), `finish`,
`confirm`, `reset the prefix cache`, `resume`. `gb_per_s` is the model's bytes over `update`.

A case is a process of its own with a deadline. On a CPU (`--cases tiny`) the same goes over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import Told, end_on_signal, options_of, python, run_chosen
from engine_roles import engine_roles, last_words, take_trainers_variables

from polyturn.config.schema import Recipe
from polyturn.errors import UserError
from polyturn.loop.check import Checked, check
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.gpus import visible_gpus

TARGETS_S = {"1.5B": 0.10, "7B": 0.25}
MODELS = ("1.5B", "7B", "0.5B", "135M", "deep", "tiny")
PAUSED = ("pause", "start", "update", "finish", "confirm", "reset the prefix cache", "resume")


def write_config(model: str, folder: Path) -> None:
    """What a server with dummy weights needs of a model folder; the tokenizer is nobody's business here."""
    from trainer_throughput import config_of

    from polyturn.rendering.words import save_word_tokenizer

    config_of(model).save_pretrained(folder)
    save_word_tokenizer(folder, ["a", "b"], "[ab]")


def recipe_of(folder: Path, model: Path, *, on_gpu: bool) -> Recipe:
    """One trainer rank, one server."""
    return Recipe.model_validate(
        {
            "run": {"name": "push", "steps": 1, "output_dir": str(folder)},
            "model": {"path": str(model), "dtype": "bfloat16" if on_gpu else "float32"},
            "environment": {"id": "lookup"},
            "engine": {
                "kind": "vllm_server",
                "max_batch_size": 64,
                "max_model_len": 1024,
                "start_deadline_s": 400.0,
                # What a push takes does not depend on how fast it samples.
                "extra_args": {"load_format": "dummy", "enforce_eager": True},
            },
            "rollout": {"max_trajectory_tokens": 1024},
            "weight_sync": {"mode": "nccl"},
            "evaluation": {"episodes": 0},
        }
    )


async def measure(checked: Checked, model_name: str, pushes: int, folder: RunFolder, gpus: list[str], told: Told) -> None:
    """Start, push, say what the pushes took."""
    began = time.perf_counter()
    async with engine_roles(checked, gpus, folder) as place:
        told(server_start_s=round(time.perf_counter() - began, 1))
        import torch
        from trainer_throughput import make_model, synchronize

        from polyturn.weight_sync.base import WholeWeights
        from polyturn.weight_sync.nccl import NcclBridge

        device = torch.device("cuda" if gpus else "cpu")
        model = make_model(model_name, device)
        if not gpus:
            model = model.float()
        held = {one.data_ptr(): one.numel() * one.element_size() for one in model.parameters()}
        urls, token = place.role.peers["engine"], place.role.token
        # Checksums at the first push and at the last.
        source = WholeWeights(model.state_dict)
        bridge = NcclBridge(urls, source, verify_every=pushes, deadline_s=120.0, token=token)
        told(bytes=sum(held.values()), tensors=len(source.weights()))
        found = []
        try:
            for version in range(pushes + 1):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1e-3)
                synchronize(device)
                began = time.perf_counter()
                await bridge.push(version)
                synchronize(device)
                whole = time.perf_counter() - began
                found.append(of_push(bridge.seconds, whole))
                told(pushes=found, **(summary(found[1:pushes], sum(held.values())) if len(found) > 1 else {}))
        finally:
            await bridge.close()
        # The bridge compared all tensors in its first and its last push, and raises for one that differs.
        told(checksums_compared=2, backend="nccl" if gpus else "gloo", bucket_bytes=bridge.bucket_bytes)
        if model_name in TARGETS_S and gpus:
            seconds = summary(found[1:pushes], 1)["median"]["pause_to_resume_s"]
            told(target_s=TARGETS_S[model_name], reached=seconds <= TARGETS_S[model_name])


def of_push(phases: dict[str, float], whole: float) -> dict[str, float]:
    """The numbers of one push."""
    found = {name: round(seconds, 5) for name, seconds in phases.items()}
    found["received"] = round(phases["update"] - phases["sent"], 5)
    found["pause_to_resume_s"] = round(sum(phases[name] for name in PAUSED), 5)
    found["whole_s"] = round(whole, 5)
    return found


def summary(pushes: list[dict[str, float]], size: int) -> dict[str, Any]:
    """Medians of the phases, and bytes a second while tensors travel."""
    middle = {
        name: round(statistics.median(one[name] for one in pushes), 5)
        for name in pushes[0]
        if all(name in one for one in pushes)
    }
    return {"median": middle, "gb_per_s": round(size / middle["update"] / 1e9, 1)}


def inside(options: argparse.Namespace) -> None:
    """Be one case."""
    end_on_signal()
    told, gpus = Told(options.out), visible_gpus()
    with tempfile.TemporaryDirectory(prefix="push-") as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        write_config(options.inside, model)
        try:
            checked = check(recipe_of(Path(scratch), model, on_gpu=bool(gpus)))
            take_trainers_variables(checked)
        except UserError as error:
            told(skipped=str(error))
            return
        folder = RunFolder.create(scratch, "push")
        try:
            asyncio.run(measure(checked, options.inside, options.pushes, folder, gpus, told))
        except BaseException:
            print(last_words(folder), flush=True)
            raise


def main() -> None:
    """Run the shapes that are named, one after the other."""
    parser = options_of(__doc__, MODELS, case_limit_s=260.0, wanted=["1.5B", "7B"])
    parser.add_argument("--pushes", type=int, default=9)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    from machine import PACKAGES, describe_machine

    from polyturn.engine.vllm_install import find_vllm

    def command(name: str, file: Path) -> list[str]:
        return python(__file__, "--inside", name, "--out", str(file), "--pushes", str(options.pushes))

    run_chosen(options, command, {**describe_machine(packages=PACKAGES), "vllm": find_vllm().version})


if __name__ == "__main__":
    main()
