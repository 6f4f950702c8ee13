#!/usr/bin/env python3
"""Show speculation on a real model: the gain, what was accepted, and that nothing changed.

    make demo                                    the offline model, with n-gram drafts
    make demo ARGS="--model PATH_OR_HUB_ID"      another model
    make demo ARGS="--speculative-config CONFIG" another method

Exit status 1 if the tokens with and without speculation differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specdec import LLM, RequestOutput, SamplingParams, SpecdecError, SpeculationMetrics
from specdec.cli_options import quiet

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "benchmarks" / "prompts.json"


def offline_model() -> str:
    """The folder of the offline model; fetched and converted the first time."""
    command = [sys.executable, str(ROOT / "models" / "smollm2.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # it said why
    return done.stdout.strip()


def generate(llm: LLM, prompt: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    """One prompt through the chat template, if there is one, and the seconds it took."""
    chat = getattr(llm.tokenizer, "chat_template", None)
    wrapped: Any = [{"role": "user", "content": prompt}] if chat else prompt
    start = time.perf_counter()
    output = llm.generate(wrapped, params, use_tqdm=False)[0]
    return output, time.perf_counter() - start


def same_when_deterministic(args: argparse.Namespace, prompt: str, params: SamplingParams) -> bool:
    """Whether the tokens are equal once products do not depend on how many rows they have."""
    tokens = []
    for config in (None, args.speculative_config):
        with LLM(args.model, speculative_config=config, deterministic=True) as llm:
            tokens.append(generate(llm, prompt, params)[0].outputs[0].token_ids)
    return tokens[0] == tokens[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder or Hub id; by default the offline model")
    parser.add_argument("--speculative-config", default="ngram", metavar="CONFIG")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    args = parser.parse_args()
    # threads that wait for each other on a busy machine are slower than one that does not
    idle = (os.cpu_count() or 1) - round(os.getloadavg()[0])
    torch.set_num_threads(max(1, min(torch.get_num_threads(), idle)))
    args.model = args.model or offline_model()
    quiet()

    kinds: dict[str, list[str]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=args.max_tokens),
        "seeded, T=0.8": SamplingParams(temperature=0.8, seed=1, max_tokens=args.max_tokens),
    }
    print(
        f"loading {args.model}, plain and with {args.speculative_config!r}; "
        f"{torch.get_num_threads()} threads; about three minutes on a quiet laptop",
        flush=True,
    )
    differing = []
    with (
        LLM(args.model) as plain,
        LLM(args.model, speculative_config=args.speculative_config) as ours,
    ):
        for llm in (plain, ours):  # the first call pays for what is set up once
            generate(llm, "Hello", SamplingParams(temperature=0, max_tokens=4))
        warm = SpeculationMetrics()
        warm.add(ours.metrics)
        print(
            f"\n{'prompt':12}{'':16}{'plain':>9}{'ours':>9}{'gain':>7}{'tokens/step':>13}  tokens"
        )
        for name, params in ways.items():
            for kind, prompts in kinds.items():
                reference, plain_seconds = generate(plain, prompts[0], params)
                output, seconds = generate(ours, prompts[0], params)
                count = len(output.outputs[0].token_ids)
                equal = output.outputs[0].token_ids == reference.outputs[0].token_ids
                if not equal:
                    differing.append((kind, name, prompts[0], params))
                plain_count = len(reference.outputs[0].token_ids)
                rate, plain_rate = count / seconds, plain_count / plain_seconds
                print(
                    f"{kind:12}{name:16}{plain_rate:>7.1f}/s{rate:>7.1f}/s"
                    f"{rate / plain_rate:>6.2f}x"
                    f"{output.metrics.speculative_decoding.tokens_per_step:>13.2f}  "
                    f"{'equal' if equal else 'DIFFERENT'}",
                    flush=True,
                )
        metrics, lossless = ours.metrics, ours.lossless
    print("\nEach ran once: on a busy machine rates and gains scatter; specdec bench repeats them.")
    drafts = metrics.num_drafts - warm.num_drafts or 1
    accepted = metrics.num_accepted_tokens - warm.num_accepted_tokens
    print(f"\n{accepted} of {metrics.num_draft_tokens - warm.num_draft_tokens} drafts accepted")
    print("accepted by position (of the steps with drafts):")
    before = [*warm.accepted_per_pos, *[0] * len(metrics.accepted_per_pos)]
    for position, (count, drafted) in enumerate(
        zip(metrics.accepted_per_pos, metrics.drafted_per_pos, strict=True)
    ):
        if not drafted:
            break
        share = (count - before[position]) / drafts
        print(f"  {position + 1}  {share:5.1%}  {'█' * round(40 * share)}")
    if not lossless:
        print("\nthis verification is not lossless: tokens are not expected to be equal")
        return 0
    for kind, name, prompt, params in list(differing):
        # one row and several rows of a product can round a near-tie differently
        if same_when_deterministic(args, prompt, params):
            print(f"\n{kind}, {name}: a near-tie; equal with deterministic=True")
            differing.remove((kind, name, prompt, params))
    print(
        "\nevery token is the one that plain decoding gives"
        if not differing
        else f"\n{len(differing)} outputs differ from plain decoding"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecdecError as error:
        sys.exit(f"demo: {error}")
