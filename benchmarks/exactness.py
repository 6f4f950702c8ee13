"""Token equality with and without speculation on a real model, over a file of prompts.

    python benchmarks/exactness.py --model DIR --prompts question.jsonl [--count 64] [--tokens 128]

Greedy, and temperature 0.8 with a seed per prompt, under coupled verification; batch 1 and 16;
float32 with deterministic products. Exit status 1 if a token differs. Prompts come as one JSON
object a line with `turns` (Spec-Bench) or `prompt`; they are taken evenly spread over the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environment import environment

from specdec import LLM, SamplingParams


def read_prompts(path: Path, count: int) -> list[str]:
    """Prompts spread evenly over the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    every = max(1, len(texts) // count)
    return texts[::every][:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--speculative-config", default="ngram")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--fast", action="store_true", help="without deterministic products: differences may occur"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="of the first prompt")
    parser.add_argument("--save-tokens", type=Path, metavar="FILE", help="of every run, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = read_prompts(args.prompts, args.count)
    prompts: list[Any] = [[{"role": "user", "content": t}] for t in texts]
    ways = {
        "greedy": [SamplingParams(temperature=0, max_tokens=args.tokens)] * len(prompts),
        "temperature 0.8": [
            SamplingParams(temperature=0.8, seed=args.first_seed + i, max_tokens=args.tokens)
            for i in range(len(prompts))
        ],
    }
    results: list[dict[str, Any]] = []
    found: dict[tuple[str, int, str], list[list[int]]] = {}
    for batch in args.batch:
        for name, config in (("plain", None), ("speculative", args.speculative_config)):
            with LLM(
                args.model,
                dtype="float32",
                speculative_config=config,
                max_num_seqs=batch,
                deterministic=not args.fast,
            ) as llm:
                for way, params in ways.items():
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - start
                    tokens = [o.outputs[0].token_ids for o in outputs]
                    found[way, batch, name] = tokens
                    results.append(
                        {
                            "way": way,
                            "batch": batch,
                            "decoding": name,
                            "tokens": sum(map(len, tokens)),
                            "seconds": round(seconds, 2),
                            "drafted": sum(
                                o.metrics.speculative_decoding.num_draft_tokens for o in outputs
                            ),
                            "accepted": sum(
                                o.metrics.speculative_decoding.num_accepted_tokens for o in outputs
                            ),
                        }
                    )
                    print(results[-1], flush=True)
    differing = 0
    for way in ways:
        first = found[way, args.batch[0], "plain"]
        for batch in args.batch:
            for name in ("plain", "speculative"):
                different = [
                    i
                    for i, (a, b) in enumerate(zip(first, found[way, batch, name], strict=True))
                    if a != b
                ]
                differing += len(different)
                print(
                    f"{way}, batch {batch}, {name}: {len(different)} of {len(first)} differ "
                    f"from plain decoding at batch {args.batch[0]} {different or ''}"
                )
    report = {
        "environment": environment(),
        "model": Path(args.model).name,
        "deterministic": not args.fast,
        "speculative_config": args.speculative_config,
        "prompts_file": args.prompts.name,
        "prompts_sha256": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
        "prompts": len(prompts),
        "runs": results,
        "completions_that_differ": differing,
    }
    if args.save_tokens:
        named = {f"{way}, {batch}, {name}": t for (way, batch, name), t in found.items()}
        args.save_tokens.write_text(json.dumps(named), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
