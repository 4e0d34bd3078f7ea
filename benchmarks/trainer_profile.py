"""Where the time of a training step goes on the GPU: kernels by kind and by name, and how long it waits for the CPU.

python benchmarks/trainer_profile.py 1.5B/64x1k/compiled

Cases are those of `trainer_throughput.py`. The profiler watches the GPU only, so that launching costs what it costs without it.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from trainer_throughput import CASES, SHAPES, make_batch, make_trainer

KINDS = {
    "attention": "flash|fmha",
    "products": "gemm|nvjet|cutlass|splitk",
    "compiled passes": "triton_",
    "optimizer and clipping": "multi_tensor",
    "copies and fills": "memcpy|memset",
}
"""Of kernels, by what stands in their names; the first that fits."""


class Span(NamedTuple):
    """A kernel that ran, in nanoseconds."""

    start: int
    end: int
    name: str


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other passes")


def profile(name: str, steps: int) -> tuple[list[Span], float]:
    """The kernels of some steps, in order, and how many seconds they took together."""
    case = next(case for case in CASES if case.name == name)
    trainer, _, _ = make_trainer(case, torch.device("cuda"))
    batches = [make_batch(case, SHAPES[case.model].vocabulary, number) for number in range(2 + steps)]
    for batch in batches[:2]:
        trainer.train([batch])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        began = time.perf_counter()
        for batch in batches[2:]:
            trainer.train([batch])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    events = watched.profiler.kineto_results.events()
    spans = [Span(one.start_ns(), one.start_ns() + one.duration_ns(), one.name()) for one in events if one.duration_ns() > 0]
    return sorted(spans), seconds


def report(spans: Sequence[Span], seconds: float, steps: int, num_names: int) -> None:
    """Print milliseconds and kernels of one step."""
    names, kinds, launches = Counter[str](), Counter[str](), Counter[str]()
    idle, end = 0, spans[0].start
    for span in spans:
        for counted, key in ((names, span.name), (kinds, kind_of(span.name))):
            counted[key] += span.end - span.start
            launches[key] += 1
        idle += max(0, span.start - end)
        end = max(end, span.end)
    print(f"one step: {1e3 * seconds / steps:.1f} ms, of which the GPU waits {idle / steps / 1e6:.1f} ms")
    for counted, most in ((kinds, None), (names, num_names)):
        print("\n       ms  kernels")
        for key, spent in counted.most_common(most):
            print(f"{spent / steps / 1e6:9.2f} {launches[key] / steps:8.0f}  {key[:140]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--names", type=int, default=40, help="how many kernels to name")
    options = parser.parse_args()
    spans, seconds = profile(options.case, options.steps)
    report(spans, seconds, options.steps, options.names)


if __name__ == "__main__":
    main()
