"""Generate for the prompts given, with a speculator, and say what it brought.

python examples/generate.py MODEL [--speculative-config ngram] PROMPT...
"""

import argparse

from specdec import LLM, SamplingParams


def main() -> None:
    """Read the command line, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--speculative-config", default="ngram")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=args.max_tokens)
    with LLM(args.model, speculative_config=args.speculative_config) as llm:
        for output in llm.generate(args.prompts, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
            drafted = output.metrics.speculative_decoding
            print(f"  {drafted.tokens_per_step:.2f} tokens per step, skipped: {drafted.skipped}")


if __name__ == "__main__":
    main()
