"""A speculator in one class, used without installing it: the last token, again and again.

python examples/own_speculator.py MODEL PROMPT
"""

import sys

from specdec import LLM, Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl


class EchoSpeculator(Speculator):
    """Right wherever the model repeats one token; wrong drafts only cost time."""

    def capabilities(self) -> Capabilities:
        """No randomness, nothing of the target."""
        return Capabilities(drawn="deterministic")

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        """[batch, k] drafts."""
        return Draft(tokens=step.next_token[:, None].repeat(1, k))


def main(model: str, prompt: str) -> None:
    """Generate with and without, and compare."""
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with LLM(model) as llm:
        (plain,) = llm.generate(prompt, greedy)
    with LLM(model, speculative_config={"method": EchoSpeculator}) as llm:
        (output,) = llm.generate(prompt, greedy)
    print(output.outputs[0].text)
    print(f"{output.metrics.speculative_decoding.tokens_per_step:.2f} tokens per step")
    print(f"same tokens as without: {output.outputs[0].token_ids == plain.outputs[0].token_ids}")


if __name__ == "__main__":
    main(*sys.argv[1:])
