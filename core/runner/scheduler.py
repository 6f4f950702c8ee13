"""Who runs in the next step, with how many rows.

Requests are ranked by priority and then by arrival. Pages are given as sequences grow; when they
run out, the request of the lowest rank is set aside, and later computed again from its tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.errors import OutOfMemoryError
from specdec.runner.kv_cache import BlockPool
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import SKIP_REASONS, RequestChanges, RequestInfo

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MEMORY, BATCH = SKIP_REASONS.index("memory"), SKIP_REASONS.index("batch")


@attrs.frozen(eq=False)
class Schedule:
    """The requests of a step, those that decode first.

    rows: query rows of each. samples: a token is drawn after them. is_chunk: the target computes
    the rows as a chunk of a prompt.
    """

    slots: Ints  # [batch]
    rows: Ints  # [batch]
    is_prefill: Flags  # [batch]
    samples: Flags  # [batch]
    is_chunk: Flags  # [batch]


@attrs.define(eq=False)
class Changes:
    """What happened to slots since the speculator was told last."""

    added: list[RequestInfo] = attrs.field(factory=list)
    preempted: list[int] = attrs.field(factory=list)
    resumed: list[RequestInfo] = attrs.field(factory=list)
    finished: list[int] = attrs.field(factory=list)

    def take(self) -> RequestChanges | None:
        """All of it, to be told once; None if nothing happened."""
        if not (self.added or self.preempted or self.resumed or self.finished):
            return None
        told = RequestChanges(
            added=tuple(self.added),
            preempted=tuple(self.preempted),
            resumed=tuple(self.resumed),
            finished=tuple(self.finished),
        )
        for events in (self.added, self.preempted, self.resumed, self.finished):
            events.clear()
        return told


class Scheduler:
    """Admits, schedules, sets aside and retires sequences.

    budget: rows of a step at most, of prompts and of decoding requests together.
    lookahead: cache places past its end that a sequence may write drafts to.
    fixed_chunks: a prompt is cut at multiples of half the budget, whatever else runs, so that
        its states do not depend on company. Otherwise chunks take what the step has left.
    preempts_for_priority: a waiting request sets aside running ones with a higher number.
    leaving: called with a sequence that is about to lose its slot.
    """

    def __init__(
        self,
        slots: Slots,
        pool: BlockPool,
        block_size: int,
        budget: int,
        lookahead: int,
        *,
        fixed_chunks: bool = False,
        preempts_for_priority: bool = False,
        leaving: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.block_size = block_size
        self.budget = budget
        self.lookahead = lookahead
        self.fixed_chunks = fixed_chunks
        self.preempts_for_priority = preempts_for_priority
        self.leaving = leaving
        self.reserve = max(budget // 2, 1)  # rows that drafts leave to prompts
        self.waiting: list[Sequence] = []  # by rank
        self.running: dict[int, Sequence] = {}
        self.changes = Changes()
        self.num_preemptions = 0
        # a step has a row for everybody who decodes, and for prompts those that they are promised
        places = budget - self.reserve if fixed_chunks else budget
        self.max_running = min(slots.max_num_seqs, max(places, 1))
        self._free = list(range(slots.max_num_seqs - 1, -1, -1))
        self._capacity = pool.free

    def blocks_needed(self, length: int) -> int:
        """Pages for a sequence of so many tokens."""
        return -(-(length + self.lookahead) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Pages that requests can have, all together."""
        return self._capacity

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
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def retire(self, sequence: Sequence) -> None:
        """Take back slot and pages of a sequence that ended, or drop it from the queue."""
        if sequence.slot >= 0:
            self.changes.finished.append(self._vacate(sequence))
            return
        place = bisect_left(self.waiting, sequence.rank, key=lambda s: s.rank)
        if place < len(self.waiting) and self.waiting[place] is sequence:
            del self.waiting[place]

    def preempt(self, sequence: Sequence) -> None:
        """Set a running sequence aside: it waits with its tokens, and is computed again."""
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.changes.preempted.append(self._vacate(sequence))
        self.add(sequence)

    def _vacate(self, sequence: Sequence) -> int:
        self.leaving(sequence)
        slot = sequence.slot
        del self.running[slot]
        self.slots.free(slot)
        self.pool.release(sequence.blocks)
        self._free.append(slot)
        self._free.sort(reverse=True)  # the lowest slot goes first: deterministic
        sequence.slot, sequence.blocks = -1, []
        return slot

    def admit(self) -> list[Sequence]:
        """Find pages for everybody who runs, then slots and pages for those that wait, by rank."""
        self._grow()
        admitted = []
        while self._has_room():
            sequence = self.waiting.pop(0)
            known = sequence.known
            sequence.slot = self._free.pop()
            self.running[sequence.slot] = sequence
            self.slots.place(sequence.slot, sequence)
            self._give(sequence.slot, self.blocks_needed(min(len(known) + 1, sequence.max_length)))
            info = RequestInfo(
                slot=sequence.slot,
                request_id=sequence.name,
                tokens=tuple(known),
                prompt_length=len(sequence.prompt),
            )
            came = self.changes.resumed if sequence.num_preemptions else self.changes.added
            came.append(info)
            admitted.append(sequence)
        return admitted

    # -- pages -------------------------------------------------------------

    def _decoding(self) -> Ints:
        """Slots of running requests that have one token to compute, by rank."""
        state = self.slots
        slots = np.flatnonzero(state.running)
        decoding = (state.length[slots] - state.computed[slots] == 1) & (
            state.computed[slots] >= state.prompt_length[slots]
        )
        return self._by_rank(slots[decoding])

    def _by_rank(self, slots: Ints) -> Ints:
        return slots[np.lexsort((self.slots.arrival[slots], self.slots.priority[slots]))]

    def _lacking(self, slots: Ints, drafts: Ints | int) -> Ints:
        """Pages that the slots lack for their tokens and so many drafts."""
        tokens = self.slots.length[slots] + drafts + self.lookahead
        return -(-tokens // self.block_size) - self.slots.num_blocks[slots]

    def _grow(self) -> None:
        """Give pages to everybody who decodes; drafts give way first, then the lowest rank."""
        state = self.slots
        which = self._decoding()
        for slot, needed in _positive(which, self._lacking(which, 0)):
            if needed > self.pool.free:
                self._take_spare(which)
            while state.running[slot] and needed > self.pool.free:
                self.preempt(max(self.running.values(), key=lambda s: s.rank))
            if state.running[slot]:
                self._give(slot, needed)
        which = which[state.running[which]]
        for slot, needed in _positive(which, self._lacking(which, state.num_drafts[which])):
            if needed <= self.pool.free:
                self._give(slot, needed)
                continue
            places = int(state.num_blocks[slot]) * self.block_size - self.lookahead
            self._shorten(np.array([slot]), places - int(state.length[slot]), MEMORY)

    def _give(self, slot: int, count: int) -> None:
        sequence = self.running[slot]
        blocks = self.pool.allocate(count, after=sequence.blocks[-1] if sequence.blocks else None)
        sequence.blocks += blocks
        self.slots.give_blocks(slot, blocks)

    def _take_spare(self, which: Ints) -> None:
        """Take back pages that were given for drafts and hold no token."""
        for slot, spare in _positive(which, -self._lacking(which, 0)):
            if self.slots.running[slot]:
                sequence = self.running[slot]
                self.pool.release(sequence.blocks[-spare:])
                del sequence.blocks[-spare:]
                self.slots.take_blocks(slot, spare)

    def _shorten(self, slots: Ints, most: int, reason: int) -> None:
        """Drop drafts past the first `most`; a verification method may not see more of them."""
        state = self.slots
        cut = slots[state.num_drafts[slots] > most]
        state.num_drafts[cut] = most
        if not most:
            state.skip[cut] = reason

    # -- admission ---------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether the first that waits fits; those with a higher number may have to make way."""
        if not self.waiting:
            return False
        first = self.waiting[0]
        if not self._fits(first) and self.preempts_for_priority:
            later = [s for s in self.running.values() if s.priority > first.priority]
            if self._fits(first, without=later):
                for sequence in sorted(later, key=lambda s: s.rank, reverse=True):
                    if not self._fits(first):
                        self.preempt(sequence)
        return self._fits(first)

    def _fits(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether there is a slot, and room for its tokens, a new one and everybody's next page.

        Without that margin a request that was just set aside would be back at once, to be set
        aside again. without: running sequences that would be set aside.
        """
        stay = len(self.running) - len(without)
        if stay >= self.max_running:
            return False
        needed = self.blocks_needed(min(sequence.num_known + 1, sequence.max_length))
        return needed + stay <= self.pool.free + sum(len(s.blocks) for s in without)

    # -- rows --------------------------------------------------------------

    def choose(self) -> Schedule:
        """Rows of the next step: everybody who decodes, then prompts by rank."""
        state = self.slots
        slots = np.flatnonzero(state.running)
        decode = np.sort(self._decoding())
        prefill = self._by_rank(np.setdiff1d(slots, decode, assume_unique=True))
        left = state.length[prefill] - state.computed[prefill]
        self._leave_room(decode, int(left.sum()))
        rows = 1 + state.num_drafts[decode]

        room = self.budget - int(rows.sum())
        in_prompt = state.prompt_length[prefill] - state.computed[prefill]
        is_chunk = np.ones(len(prefill), dtype=bool)
        if self.fixed_chunks:
            # tokens that were emitted before are computed as they were then: not as a chunk
            is_chunk = in_prompt > 0
            chunks = np.minimum(np.where(is_chunk, in_prompt, left), self.reserve)
            chosen = np.cumsum(chunks) <= room
        else:
            before = np.cumsum(left) - left
            chunks = np.clip(room - before, 0, left)
            chosen = chunks > 0
        prefill, chunks, left = prefill[chosen], chunks[chosen], left[chosen]
        ones = np.ones(len(decode), dtype=bool)
        return Schedule(
            slots=np.concatenate([decode, prefill]),
            rows=np.concatenate([rows, chunks]),
            is_prefill=np.concatenate([~ones, np.ones(len(prefill), dtype=bool)]),
            samples=np.concatenate([ones, chunks == left]),
            is_chunk=np.concatenate([~ones, is_chunk[chosen]]),
        )

    def _leave_room(self, decode: Ints, pending: int) -> None:
        """Shorten the drafts so that the step keeps to its budget and prompts get their share."""
        drafts = self.slots.num_drafts[decode]
        room = max(self.budget - len(decode) - min(pending, self.reserve), 0)
        most = int(drafts.max(initial=0))
        while most and int(np.minimum(drafts, most).sum()) > room:
            most -= 1
        if most < drafts.max(initial=0):
            self._shorten(decode, most, BATCH)


def _positive(slots: Ints, numbers: Ints) -> list[tuple[int, int]]:
    """The slots whose number is above 0, each with it."""
    chosen = numbers > 0
    return list(zip(slots[chosen].tolist(), numbers[chosen].tolist(), strict=True))
