"""A prompt on its way: its completions, its output so far, and what it has to satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from specdec.errors import PromptError
from specdec.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from specdec.runner.sequence import Sequence as Running
from specdec.runner.state import MAX_STOP_IDS
from specdec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.define(eq=False)
class Request:
    """A prompt with its completions.

    prompt: its text; None if it came as token ids. metrics: what its completions share.
    """

    prompt: str | None
    sequences: list[Running]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(s.finish_reason is not None for s in self.sequences)

    def output(self, tokenizer: PreTrainedTokenizerBase | None, *, final: bool) -> RequestOutput:
        """Its output so far."""
        speculation = SpeculationMetrics()
        for sequence in self.sequences:
            speculation.add(sequence.metrics.speculative_decoding)
        own = [s.metrics for s in self.sequences]
        starts = [m.first_scheduled_time for m in own if m.first_scheduled_time is not None]
        firsts = [m.first_token_time for m in own if m.first_token_time is not None]
        ends = [m.finished_time for m in own if m.finished_time is not None]
        errors = [s.error for s in self.sequences if s.error is not None]
        return RequestOutput(
            request_id=self.sequences[0].request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.sequences[0].prompt),
            outputs=[
                CompletionOutput(
                    index=s.index,
                    text=_text(s, tokenizer),
                    token_ids=list(s.emitted),
                    finish_reason=s.finish_reason,
                    stop_reason=s.stop_reason,
                )
                for s in self.sequences
            ],
            finished=final and self.finished,
            metrics=attrs.evolve(
                self.metrics,
                first_scheduled_time=min(starts, default=None),
                first_token_time=min(firsts, default=None),
                finished_time=max(ends, default=None) if self.finished else None,
                num_generated_tokens=sum(len(s.emitted) for s in self.sequences),
                speculative_decoding=speculation,
            ),
            error="; ".join(dict.fromkeys(errors)) or None,
        )


def _text(sequence: Running, tokenizer: PreTrainedTokenizerBase | None) -> str:
    params = sequence.params
    if tokenizer is None or not params.detokenize:
        return ""
    shown = sequence.emitted[:-1] if sequence.finish_reason == "stop" else sequence.emitted
    if not shown:
        return ""
    text = str(tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens))
    # a token can end inside a character: hold that back until the rest of it is there
    return text if sequence.finish_reason is not None else text.rstrip("\ufffd")


def check_prompt(ids: Sequence[int], where: str, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, too long, or holds ids that the target does not have.

    where: names the prompt in messages.
    """
    if not ids:
        raise PromptError(f"{where} is empty; give at least one token")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise PromptError(f"{where} holds the token id {wrong}; ids are 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise PromptError(
            f"{where} has {len(ids)} tokens, but max_model_len is {max_model_len} and at "
            "least one token has to be generated; shorten it, or raise max_model_len"
        )


def check_stops(
    params: SamplingParams, eos: frozenset[int], where: str, *, vocab_size: int
) -> None:
    """Refuse stop tokens that the target does not have, or too many of them."""
    stops = frozenset(params.stop_token_ids or ())
    wrong = [i for i in stops if i >= vocab_size]
    if wrong:
        raise PromptError(
            f"{where}: stop_token_ids holds {wrong[0]}; ids are 0 to {vocab_size - 1}"
        )
    wanted = stops if params.ignore_eos else stops | eos
    if len(wanted) > MAX_STOP_IDS:
        raise PromptError(
            f"{where} has {len(wanted)} stop tokens, {len(stops)} of its own and the others the "
            f"model's; {MAX_STOP_IDS} at most are served"
        )
