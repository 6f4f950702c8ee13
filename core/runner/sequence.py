"""One completion on its way through the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from specdec.metrics import SpeculationMetrics
from specdec.output_text import OutputText
from specdec.outputs import FinishReason, RequestMetrics
from specdec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.logprobs import LogprobLog, PromptLogprobLog


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One completion of one prompt: what the host keeps beside the slot arrays.

    While it has a slot its tokens are in the slot arrays; `emitted` is brought up to date when
    somebody looks at it, and when it leaves the slot.

    stop_ids: every token that ends it; own_stop_ids: those of them that the request named itself.
    bad_words: token sequences that it may not emit. priority: lower goes first; then the earlier
    `arrival`. text: its text, which also knows its stop strings. num_taken, end_taken: tokens, and
    whether the end, were handed out as deltas. news: where the engine puts it, once, whenever it
    emitted something (if `watched`) or ended; its owner empties it.
    """

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    stream: int
    stop_ids: tuple[int, ...]
    own_stop_ids: frozenset[int]
    max_length: int
    metrics: RequestMetrics
    text: OutputText
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: LogprobLog | None = None
    prompt_logprobs: PromptLogprobLog | None = None
    priority: int = 0
    arrival: int = 0
    watched: bool = False
    news: dict[Sequence, None] = attrs.field(factory=dict)
    emitted: list[int] = attrs.field(factory=list)
    slot: int = -1
    blocks: list[int] = attrs.field(factory=list)
    num_taken: int = 0
    end_taken: bool = False
    num_preemptions: int = 0
    counted: SpeculationMetrics | None = None  # in its slot so far, and not in its metrics yet
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    _shown: int = 0  # tokens that its text was fed with; stop strings are fed by the engine

    @property
    def name(self) -> str:
        """Its name in messages and for speculators: the request, and the completion's index."""
        return self.request_id if self.params.n == 1 else f"{self.request_id}/{self.index}"

    @property
    def known(self) -> list[int]:
        """Its prompt, and what it emitted before it lost its slot."""
        return self.prompt + self.emitted

    @property
    def num_known(self) -> int:
        """How many tokens these are."""
        return len(self.prompt) + len(self.emitted)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in every queue."""
        return self.priority, self.arrival

    def give_up_text(self, reason: str) -> None:
        """Go on without text: it could not be made, which is an error of its own."""
        self.finish_reason, self.stop_reason, self.error = "error", None, reason
        self.text = OutputText.none()

    def show(self) -> None:
        """Bring its text up to date with the tokens that it has."""
        if not self.params.stop:
            new = self.emitted[self._shown :]
            self._shown += len(new)
            if new:
                self.text.append(new, self.finish_reason)
        if self.finish_reason is not None:
            self.text.end()
