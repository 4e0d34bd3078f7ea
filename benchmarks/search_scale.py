"""What a BM25 index costs: build time, peak memory, disk, load time and queries a second, by the number of passages.

python benchmarks/search_scale.py --data DIR --out benchmarks/results/search_scale.json

DIR holds `qa_*/corpus.jsonl.gz` and `qa_*/test.jsonl`, which give the first size and the queries. Larger corpora are made up:
words by Zipf's law over a vocabulary that grows with the corpus by Heaps' law, 100 words a passage. Each size runs in a process
of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from polyturn.environments.search.bm25 import Bm25

NUM_QUERIES = 300
WORDS_PER_PASSAGE = 100
LIMIT_S = 3000


def real_rows(data: Path) -> Iterator[dict[str, str]]:
    for path in sorted(data.glob("qa_*/corpus.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as rows:
            yield from map(json.loads, rows)


def made_rows(count: int, real_words: list[str]) -> Iterator[dict[str, str]]:
    """Common words are real ones by rank, so that real queries find their postings; rare ones are numbered."""
    rng = np.random.default_rng(0)
    vocabulary = int(20 * (count * WORDS_PER_PASSAGE) ** 0.6)  # Heaps: 5 million words for 10 million passages
    names = [real_words[rank] if rank < len(real_words) else f"w{rank}" for rank in range(vocabulary)]
    for start in range(0, count, 1000):
        # Zipf with exponent 1 is uniform in the logarithm of the rank.
        ranks = np.exp(rng.random((1000, WORDS_PER_PASSAGE)) * np.log(vocabulary)).astype(np.int64) - 1
        for offset, row in enumerate(ranks[: count - start].tolist()):
            words = [names[rank] for rank in row]
            yield {"id": str(start + offset), "title": f"{words[0]} {words[-1]}", "text": " ".join(words)}


def words_by_rank(data: Path) -> list[str]:
    counts: dict[str, int] = {}
    for row in real_rows(data):
        for word in row["text"].lower().split():
            if word.isalnum():
                counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: (-counts[word], word))


def measure(corpus: Path, cache: Path, queries: list[str], results: Any) -> None:
    """Build, then open and search; runs in a process of its own."""
    backend = Bm25(corpus, cache=cache)
    before_mib = _peak_mib()
    start = time.perf_counter()
    folder = backend.build()
    build_s = time.perf_counter() - start
    build_peak_mib = _peak_mib()
    start = time.perf_counter()
    asyncio.run(backend.start())
    load_s = time.perf_counter() - start  # with the hash of the corpus file
    for query in queries[:50]:
        backend.search_now(query, 3)
    start = time.perf_counter()
    for query in queries:
        backend.search_now(query, 3)
    seconds = time.perf_counter() - start
    postings = len(np.load(folder / "indices.csc.index.npy", mmap_mode="r"))
    vocabulary = len(np.load(folder / "indptr.csc.index.npy", mmap_mode="r")) - 1
    results.put(
        {
            "passages": backend.num_passages,
            "postings": postings,
            "vocabulary": vocabulary,
            "corpus_mib": round(corpus.stat().st_size / 2**20, 1),
            "build_s": round(build_s, 2),
            "build_peak_mib": round(build_peak_mib),
            "start_mib": round(before_mib),
            "index_mib": round(sum(file.stat().st_size for file in folder.iterdir()) / 2**20, 1),
            "load_s": round(load_s, 3),
            "queries_per_s": round(len(queries) / seconds, 1),
            "query_ms": round(1000 * seconds / len(queries), 3),
        }
    )


def extrapolated(row: dict[str, Any], passages: int) -> dict[str, Any]:
    """Everything in proportion to the passages, but the vocabulary and the memory that goes with it, by Heaps' law."""
    times = passages / row["passages"]
    return {
        "passages": passages,
        "assumption": "in proportion to the largest size measured; vocabulary as its 0.6th power",
        "build_s": round(row["build_s"] * times),
        "index_mib": round(row["index_mib"] * times),
        "load_s": round(row["load_s"] * times, 1),
        "query_ms": round(row["query_ms"] * times, 1),
        "build_peak_mib_at_most": round(row["build_peak_mib"] * times),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each size and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    questions = [json.loads(line)["question"] for path in sorted(args.data.glob("qa_*/test.jsonl")) for line in path.open()]
    queries = random.Random(0).sample(questions, NUM_QUERIES)
    words = words_by_rank(args.data)
    context = multiprocessing.get_context("spawn")
    rows = []
    for size in [0, *args.sizes]:
        folder = Path(tempfile.mkdtemp())
        try:
            corpus = folder / "corpus.jsonl"
            with corpus.open("w", encoding="utf-8") as file:
                for row in made_rows(size, words) if size else real_rows(args.data):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            results = context.Queue()
            process = context.Process(target=measure, args=(corpus, folder / "cache", queries, results))
            process.start()
            rows.append({"corpus": "generated" if size else "real", **results.get(timeout=LIMIT_S)})
            process.join(60)
        finally:
            shutil.rmtree(folder)
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "benchmark": "search_scale",
        **describe_machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "rows": rows,
        "extrapolated": extrapolated(rows[-1], 10_000_000),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
