"""Tokens per second by the number of requests that run together, plain and speculative.

    python benchmarks/batch.py --model DIR [--batch 1 4 8 16] [--tokens 128] [--json FILE]

One process; batch sizes and configurations take turns within a repetition; medians and spread.
Every batch takes the first so many of the prompts, repeated in order; greedy, end-of-sequence
ignored, so that all requests run to the end together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environment import environment

from specdec import LLM, SamplingParams

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json")
    parser.add_argument("--speculative-config", default="ngram:num_speculative_tokens=5")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds: dict[str, list[str]] = json.loads(args.prompts.read_text(encoding="utf-8"))
    texts = [prompts[i] for i in range(2) for prompts in kinds.values() if i < len(prompts)]
    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    configurations = {"plain": None, args.speculative_config: args.speculative_config}
    llms = {
        name: LLM(args.model, dtype="float32", speculative_config=config)
        for name, config in configurations.items()
    }
    rates: dict[tuple[str, int], list[float]] = {}

    def run(name: str, batch: int) -> float:
        prompts: list[Any] = [
            [{"role": "user", "content": texts[i % len(texts)]}] for i in range(batch)
        ]
        start = time.perf_counter()
        outputs = llms[name].generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds

    for name in llms:
        run(name, 2)  # the first call pays for what is set up once
    for repetition in range(args.repeat):
        for batch in args.batch:
            order = list(llms)[:: 1 if repetition % 2 else -1]
            for name in order:
                rates.setdefault((name, batch), []).append(run(name, batch))
                print(f"{name}, batch {batch}: {rates[name, batch][-1]:.1f} tokens/s", flush=True)
    rows = [
        {
            "configuration": name,
            "batch": batch,
            "tokens_per_second": statistics.median(found),
            "spread": [min(found), max(found)],
            "over_batch_1": statistics.median(found)
            / statistics.median(rates[name, args.batch[0]]),
        }
        for (name, batch), found in rates.items()
    ]
    print("\n| configuration | batch | tokens/s | over the first batch |\n|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['configuration']} | {row['batch']} | {row['tokens_per_second']:.1f} "
            f"| {row['over_batch_1']:.2f} |"
        )
    for llm in llms.values():
        llm.close()
    if args.json:
        report = {
            "environment": environment(),
            "model": Path(args.model).name,
            "dtype": "float32",
            "tokens": args.tokens,
            "repeat": args.repeat,
            "runs": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
