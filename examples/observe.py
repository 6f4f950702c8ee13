"""Watch a run step by step: an observer is an object with the hook `step_finished`.

python examples/observe.py MODEL PROMPT [SPECULATIVE_CONFIG]
"""

import sys

from specdec import LLM, SamplingParams, hookimpl
from specdec.types import SKIP_REASONS, StepReport


class Trace:
    """Prints what every request of a step had and gave; why, if it verified no drafts."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Print one line for every request of the step."""
        self.steps += 1
        for i, slot in enumerate(report.slots):
            kind = "decode" if report.is_decode[i] else "prompt"
            drafted, kept, skipped = report.drafted[i], report.kept[i], report.skipped[i]
            why = f" ({SKIP_REASONS[skipped]})" if skipped >= 0 else ""
            print(f"step {self.steps}, slot {slot}: {kind}, {drafted} drafts{why}, {kept} emitted")


def main(model: str, prompt: str, speculative_config: str = "ngram") -> None:
    """Generate greedily and watch."""
    trace = Trace()
    with LLM(model, speculative_config=speculative_config, observers=[trace]) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
    print(f"{len(output.outputs[0].token_ids)} tokens in {trace.steps} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
