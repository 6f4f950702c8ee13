"""Who runs in the next step, with how many rows. First come, first served.

A request is admitted when a slot is free and the cache has room for the longest it can get, so
nothing has to be taken back from it later.
"""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.errors import OutOfMemoryError
from specdec.runner.kv_cache import BlockPool
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import RequestInfo

Ints = NDArray[np.int64]


@attrs.frozen(eq=False)
class Schedule:
    """The requests of a step, those that decode first.

    rows: query rows of each. samples: a token is drawn after them.
    """

    slots: Ints  # [batch]
    rows: Ints  # [batch]
    is_prefill: NDArray[np.bool_]  # [batch]
    samples: NDArray[np.bool_]  # [batch]


@attrs.define(eq=False)
class Changes:
    """What happened to slots since the speculator was told last."""

    added: list[RequestInfo] = attrs.field(factory=list)
    finished: list[int] = attrs.field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.finished)


class Scheduler:
    """Admits, schedules and retires sequences.

    lookahead: cache places past its end that a sequence may write drafts to.
    chunk: prompt tokens at most that a step computes. A request's chunks start at multiples of
        it, whatever else runs.
    """

    def __init__(
        self, slots: Slots, pool: BlockPool, block_size: int, chunk: int, lookahead: int
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.block_size = block_size
        self.chunk = chunk
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.changes = Changes()
        self._free = list(range(slots.max_num_seqs - 1, -1, -1))
        self._capacity = pool.free

    def blocks_needed(self, max_length: int) -> int:
        """Pages for a sequence that can grow to so many tokens."""
        return -(-(max_length + self.lookahead) // self.block_size)

    def check(self, max_length: int, what: str) -> None:
        """Raise `OutOfMemoryError` if the cache could not hold so much even if nothing else ran.

        what: names the request.
        """
        if self.blocks_needed(max_length) > self._capacity:
            holds = max(self._capacity * self.block_size - self.lookahead, 0)
            raise OutOfMemoryError(
                f"{what} can grow to {max_length} tokens, but the key-value cache holds {holds}; "
                "lower max_tokens or max_model_len, or raise kv_cache_memory"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length `check` let pass."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give slots and pages to those that wait, in order, while both last."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting[0]
            needed = self.blocks_needed(sequence.max_length)
            if needed > self.pool.free:
                break
            self.waiting.popleft()
            sequence.slot = self._free.pop()
            sequence.blocks = self.pool.allocate(needed)
            self.running[sequence.slot] = sequence
            params = sequence.params
            self.slots.place(
                sequence.slot,
                sequence.prompt,
                prompt_length=len(sequence.prompt),
                max_length=sequence.max_length,
                stream=sequence.stream,
                temperature=params.effective_temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                stop_ids=sequence.stop_ids,
                blocks=sequence.blocks,
            )
            self.changes.added.append(
                RequestInfo(
                    slot=sequence.slot,
                    request_id=sequence.name,
                    tokens=tuple(sequence.prompt),
                    prompt_length=len(sequence.prompt),
                )
            )
            admitted.append(sequence)
        return admitted

    def retire(self, sequence: Sequence) -> None:
        """Take back slot and pages of a sequence that ended, or drop it from the queue."""
        if sequence.slot < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        del self.running[sequence.slot]
        self.pool.release(sequence.blocks)
        self._free.append(sequence.slot)
        self._free.sort(reverse=True)  # the lowest slot goes first: deterministic
        self.changes.finished.append(sequence.slot)
        sequence.slot, sequence.blocks = -1, []

    def schedule(self) -> Schedule:
        """Choose the rows of the next step from the running sequences."""
        running = np.fromiter(self.running, dtype=np.int64, count=len(self.running))
        state = self.slots
        left = state.length[running] - state.computed[running]
        decoding = (left == 1) & (state.computed[running] >= state.prompt_length[running])
        decode = np.sort(running[decoding])
        # prompts come in order of arrival, each with the whole of its next chunk or not at all
        prefill, left = running[~decoding], left[~decoding]
        chunks = np.minimum(left, self.chunk)
        fits = np.cumsum(chunks) <= self.chunk
        prefill, left, chunks = prefill[fits], left[fits], chunks[fits]
        ones = np.ones(len(decode), dtype=bool)
        return Schedule(
            slots=np.concatenate([decode, prefill]),
            rows=np.concatenate([1 + state.num_drafts[decode], chunks]),
            is_prefill=np.concatenate([~ones, np.ones(len(prefill), dtype=bool)]),
            samples=np.concatenate([ones, chunks == left]),
        )
