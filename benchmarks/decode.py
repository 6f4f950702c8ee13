"""Tokens per second at batch 1, by kind of prompt: ours, plain and speculative, and transformers.

    python benchmarks/decode.py --model DIR [--tokens 128] [--repeat 3] [--threads 1] [--json FILE]

One process; contenders take turns within a repetition, so a busy machine slows all of them;
medians over prompts and repetitions. A ratio is the median of the ratios within a repetition, whose
runs stand next to each other. Nothing is measured before every contender has run once.
Greedy, stopped by end-of-sequence; tokens of the four are compared, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environment import environment

from specdec import LLM, SamplingParams

HERE = Path(__file__).resolve().parent


class Run:
    """What one generation took and gave."""

    def __init__(self, tokens: list[int], seconds: float, per_step: float | None = None) -> None:
        self.tokens = tokens
        self.rate = len(tokens) / seconds
        self.per_step = per_step


def with_transformers(model: Any, ids: list[int], tokens: int, **options: Any) -> Run:
    """Transformers' own generate."""
    inputs = torch.tensor([ids])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=tokens,
            do_sample=False,
            **options,
        )
    return Run(out[0, len(ids) :].tolist(), time.perf_counter() - start)


def with_ours(llm: LLM, ids: list[int], tokens: int) -> Run:
    """Our generate."""
    params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False)
    start = time.perf_counter()
    output = llm.generate([ids], params, use_tqdm=False)[0]
    seconds = time.perf_counter() - start
    per_step = output.metrics.speculative_decoding.tokens_per_step
    return Run(output.outputs[0].token_ids, seconds, per_step)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the report."""
    kinds: dict[str, list[str]] = json.loads(args.prompts.read_text(encoding="utf-8"))
    if unknown := set(args.kinds or kinds) - set(kinds):
        sys.exit(f"no prompts of kind {sorted(unknown)}; there are {sorted(kinds)}")
    kinds = {kind: kinds[kind] for kind in args.kinds or kinds}
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    reference: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reference.eval()
    plain = LLM(args.model, dtype="float32")
    ours = LLM(args.model, dtype="float32", speculative_config=args.speculative_config)
    contenders: dict[str, Callable[[list[int]], Run]] = {
        "transformers": lambda ids: with_transformers(reference, ids, args.tokens),
        "transformers, prompt lookup": lambda ids: with_transformers(
            reference, ids, args.tokens, prompt_lookup_num_tokens=args.lookup
        ),
        "specdec, plain": lambda ids: with_ours(plain, ids, args.tokens),
        f"specdec, {args.speculative_config}": lambda ids: with_ours(ours, ids, args.tokens),
    }
    names = list(contenders)
    rows: list[dict[str, Any]] = []
    warm = True
    for kind, prompts in kinds.items():
        runs: dict[str, list[Run]] = {name: [] for name in names}
        equal = True
        for prompt in prompts:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True
            )["input_ids"]
            if warm:
                for run in contenders.values():
                    run(ids)
                warm = False
            for repetition in range(args.repeat):
                order = names[repetition % len(names) :] + names[: repetition % len(names)]
                for name in order:
                    runs[name].append(contenders[name](ids))
                last = [runs[name][-1].tokens for name in names]
                equal &= all(tokens == last[0] for tokens in last)
        medians = {name: statistics.median(r.rate for r in runs[name]) for name in names}
        spread = {
            name: [min(r.rate for r in runs[name]), max(r.rate for r in runs[name])]
            for name in names
        }
        ratios = {
            f"{above} / {below}": statistics.median(
                a.rate / b.rate for a, b in zip(runs[above], runs[below], strict=True)
            )
            for above, below in [(names[3], names[2]), (names[3], names[1]), (names[2], names[0])]
        }
        steps = [r.per_step for r in runs[names[3]] if r.per_step is not None]
        rows.append(
            {
                "kind": kind,
                "tokens_per_second": medians,
                "ratios": ratios,
                "spread": spread,
                "tokens_per_step": statistics.mean(steps),
                "all_tokens_equal": equal,
            }
        )
        print(table(rows[-1:], names, header=len(rows) == 1), flush=True)
    plain.close()
    ours.close()
    return {
        "environment": environment(),
        "model": Path(args.model).name,
        "dtype": "float32",
        "speculative_config": args.speculative_config,
        "prompt_lookup_num_tokens": args.lookup,
        "tokens": args.tokens,
        "repeat": args.repeat,
        "contenders": names,
        "kinds": rows,
    }


def table(rows: list[dict[str, Any]], names: list[str], *, header: bool) -> str:
    """Markdown rows: tokens per second, then the ratios that matter."""
    lines = []
    if header:
        lines.append(
            "| kind | " + " | ".join(names) + " | ours / plain | ours / lookup | "
            "plain / transformers | tokens per step | equal |"
        )
        lines.append("|" + "---|" * (len(names) + 6))
    for row in rows:
        rate = [row["tokens_per_second"][n] for n in names]
        lines.append(
            f"| {row['kind']} | "
            + " | ".join(f"{r:.1f}" for r in rate)
            + "".join(f" | {ratio:.2f}" for ratio in row["ratios"].values())
            + f" | {row['tokens_per_step']:.2f} | {'yes' if row['all_tokens_equal'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json")
    parser.add_argument("--kinds", nargs="+", help="kinds of prompts; without it, all")
    parser.add_argument("--speculative-config", default="ngram:num_speculative_tokens=5")
    parser.add_argument("--lookup", type=int, default=5, help="transformers' prompt lookup tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = measure(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
