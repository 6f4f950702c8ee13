"""A prompt on its way: its completions, and its output so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from specdec.metrics import SpeculationMetrics
from specdec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from specdec.runner.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.define(eq=False)
class Request:
    """A prompt with its completions.

    prompt: its text; None if it came as token ids. metrics: what its completions share.
    """

    request_id: str
    prompt: str | None
    sequences: list[Sequence]
    metrics: RequestMetrics
    tokenizer: PreTrainedTokenizerBase | None
    # one copy for all outputs: the engine goes on reading its own
    prompt_token_ids: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Copy the prompt once."""
        self.prompt_token_ids = list(self.sequences[0].prompt)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(s.finish_reason is not None for s in self.sequences)

    def output(self, *, delta: bool = False) -> RequestOutput:
        """Its output so far, or what is new in it since the last `delta` output.

        Of several completions a delta holds those that have something new, an end included.
        """
        own = [s.metrics for s in self.sequences]
        speculation = SpeculationMetrics()
        for sequence in self.sequences:
            speculation.add(sequence.metrics.speculative_decoding)
            if sequence.counted is not None:
                speculation.add(sequence.counted)
        starts = [m.first_scheduled_time for m in own if m.first_scheduled_time is not None]
        firsts = [m.first_token_time for m in own if m.first_token_time is not None]
        ends = [m.finished_time for m in own if m.finished_time is not None]
        errors = [s.error for s in self.sequences if s.error is not None]
        first = self.sequences[0]
        log = first.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if log is None else log.as_dicts(self.tokenizer),
            outputs=[
                self._completion(s, delta=delta)
                for s in self.sequences
                if not delta or len(own) == 1 or s.num_taken < len(s.emitted) or _ends(s)
            ],
            finished=self.finished,
            metrics=attrs.evolve(
                self.metrics,
                first_scheduled_time=min(starts, default=None),
                first_token_time=min(firsts, default=None),
                finished_time=max(ends, default=None) if self.finished else None,
                num_generated_tokens=sum(len(s.emitted) for s in self.sequences),
                num_preemptions=sum(s.num_preemptions for s in self.sequences),
                speculative_decoding=speculation,
            ),
            error="; ".join(dict.fromkeys(errors)) or None,
        )

    def _completion(self, sequence: Sequence, *, delta: bool) -> CompletionOutput:
        sequence.show()
        start = sequence.num_taken if delta else 0
        log = sequence.logprobs
        output = CompletionOutput(
            index=sequence.index,
            text=sequence.text.take() if delta else sequence.text.text,
            token_ids=sequence.emitted[start:],
            cumulative_logprob=None if log is None else log.cumulative,
            logprobs=None if log is None else log.as_dicts(self.tokenizer, start),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if delta:
            sequence.num_taken = len(sequence.emitted)
            sequence.end_taken = sequence.finish_reason is not None
        return output


def _ends(sequence: Sequence) -> bool:
    """Whether the end of a sequence is to be handed out yet."""
    return sequence.finish_reason is not None and not sequence.end_taken
