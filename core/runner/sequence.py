"""One completion on its way through the engine."""

from __future__ import annotations

import attrs

from specdec.outputs import FinishReason, RequestMetrics
from specdec.sampling_params import SamplingParams


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One completion of one prompt: what the host keeps beside the slot arrays.

    emitted: tokens after the prompt. stop_ids: every token that ends it; own_stop_ids: those
    of them that the request named itself. news: where the engine puts it whenever it emitted
    something or ended; its owner empties the list.
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
    news: list[Sequence] = attrs.field(factory=list)
    emitted: list[int] = attrs.field(factory=list)
    slot: int = -1
    blocks: list[int] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Its name in messages and for speculators: the request, and the completion's index."""
        return self.request_id if self.params.n == 1 else f"{self.request_id}/{self.index}"
