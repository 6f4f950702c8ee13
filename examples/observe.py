"""Watch a run step by step: an observer is an object with the hook `step_finished`.

python examples/observe.py MODEL PROMPT [SPECULATIVE_CONFIG]
"""

import sys

from specdec import LLM, SamplingParams, Step, Verdict, hookimpl


class Trace:
    """Prints what every step had and gave. Reads on the host, which is fine for an observer."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def step_finished(self, step: Step, verdict: Verdict) -> None:
        """Print one line for every request of the step."""
        self.steps += 1
        for request, slot in enumerate(step.slots.tolist()):
            if slot >= 0:  # the others are padding
                kind = "prompt" if step.is_prefill[request] else "decode"
                drafts, emitted = int(step.num_drafts[request]), int(verdict.count[request])
                print(f"step {self.steps}, slot {slot}: {kind}, {drafts} drafts, {emitted} emitted")


def main(model: str, prompt: str, speculative_config: str = "ngram") -> None:
    """Generate greedily and watch."""
    trace = Trace()
    with LLM(model, speculative_config=speculative_config, observers=[trace]) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
    print(f"{len(output.outputs[0].token_ids)} tokens in {trace.steps} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
