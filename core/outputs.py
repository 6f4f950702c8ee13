"""What a request gives back. vLLM's names and shapes."""

from __future__ import annotations

from typing import Any, Literal

import attrs

FinishReason = Literal["stop", "length", "abort", "error"]


@attrs.define(eq=False, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    token_ids: every emitted token, the one that stopped it included. text: without that one.
    finish_reason: "stop" (end-of-sequence or a stop token), "length" (max_tokens or the context
        is used up), "abort", "error"; None while it runs.
    stop_reason: the stop token of the request's own that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # logprobs are not served yet
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@attrs.define(eq=False, kw_only=True)
class SpeculationMetrics:
    """Speculation in numbers, over a request or a whole run. Counted before stops cut a block.

    num_drafts: steps in which drafts were verified; num_draft_tokens, num_accepted_tokens: drafts
        verified and accepted in them. drafted_per_pos, accepted_per_pos: the same by column:
        accepted_per_pos[i] counts the steps whose first i + 1 drafts were all accepted.
    num_plain_steps: decode steps that drew a token without any draft; skipped says why:
        "nothing_proposed", "budget" (no room for a draft before the end), "context" (the drafter
        reaches no further), "policy" (the length policy chose none).
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    drafted_per_pos: list[int] = attrs.field(factory=list)
    accepted_per_pos: list[int] = attrs.field(factory=list)
    skipped: dict[str, int] = attrs.field(factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified step, the target's own included; 1 if nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of verified drafts that were accepted; None if there were none."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the target, steps without drafts included."""
        steps = self.num_drafts + self.num_plain_steps
        return 1 + self.num_accepted_tokens / steps if steps else 1.0

    def add(self, other: SpeculationMetrics) -> None:
        """Add another request's numbers to these."""
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_per_pos", "accepted_per_pos"):
            mine, theirs = getattr(self, name), getattr(other, name)
            longest = max(len(mine), len(theirs))
            padded = [x + [0] * (longest - len(x)) for x in (mine, theirs)]
            setattr(self, name, [a + b for a, b in zip(*padded, strict=True)])
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """The numbers and the ratios, ready for JSON."""
        return {
            **attrs.asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
        }


@attrs.define(eq=False, kw_only=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.perf_counter`, and its speculation.

    arrival_time: added to the engine. first_scheduled_time: given a slot. first_token_time:
    first token emitted. finished_time: ended. None for what has not happened.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    speculative_decoding: SpeculationMetrics = attrs.field(factory=SpeculationMetrics)


@attrs.define(eq=False, kw_only=True)
class RequestOutput:
    """What became of one prompt.

    prompt: its text; None if it came as token ids. error: why it ended with "error", else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None = None  # logprobs are not served yet
    num_cached_tokens: int = 0  # there is no prefix cache yet
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
