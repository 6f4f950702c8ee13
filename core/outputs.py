"""What a request gives back. vLLM's names and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from specdec.metrics import SpeculationMetrics

if TYPE_CHECKING:
    from specdec.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@attrs.define(eq=False, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Under `output_kind="delta"` text, token_ids and logprobs are what came since the last output,
    and of several completions only those with something new are there: look at `index`.

    token_ids: every emitted token, the one that stopped it included. text: without what stopped
        it, unless `include_stop_str_in_output`; whole characters, and never what may turn out to
        be the beginning of a stop string.
    cumulative_logprob, logprobs: if asked for: the sum over all tokens so far, and one dict per
        token; raw log-probabilities, before any sampling parameter.
    finish_reason: "stop" (end-of-sequence, a stop token or a stop string), "length" (max_tokens
        or the context is used up), "abort", "error"; None while it runs.
    stop_reason: the stop string or the stop token of the request's own that ended it; None for
        end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@attrs.define(eq=False, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.perf_counter`, and its speculation.

    arrival_time: added to the engine. first_scheduled_time: given a slot. first_token_time:
    first token emitted. finished_time: ended. None for what has not happened.
    num_preemptions: times it was set aside for lack of memory, or for one that goes first.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    speculative_decoding: SpeculationMetrics = attrs.field(factory=SpeculationMetrics)


@attrs.define(eq=False, kw_only=True)
class RequestOutput:
    """What became of one prompt.

    prompt: its text; None if it came as token ids. prompt_logprobs: if asked for, one entry per
    token that is there so far, None for the first. error: why it ended with "error", else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0  # there is no prefix cache yet
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
