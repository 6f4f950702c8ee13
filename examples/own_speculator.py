"""A speculator in one class, used without installing it: the last token, again and again.

python examples/own_speculator.py MODEL PROMPT
"""

import sys

from torch import Tensor

from specdec import LLM, Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl


class EchoSpeculator(Speculator):
    """Right wherever the model repeats one token; wrong drafts only cost time."""

    def capabilities(self) -> Capabilities:
        return Capabilities(drawn="deterministic")

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        again: Tensor = step.next_token[:, None].repeat(1, k)
        return Draft(tokens=again)


def main(model: str, prompt: str) -> None:
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
