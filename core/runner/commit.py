"""Commit a verdict to the slot arrays: cut at the first stop token or limit, append."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.runner.batch import Batch
from specdec.runner.scheduler import Schedule
from specdec.runner.state import Slots
from specdec.types import Verdict

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@attrs.frozen(eq=False)
class Block:
    """What a step emitted, on the host, [batch] without padding, and how much of it stands.

    tokens: [batch, K + 1]; the first `kept` of each stand, of `count`. stopped: the last of them
    is a stop token. full: the length limit is reached with it. Whoever finds an earlier end
    lowers `kept` before the commit.
    """

    schedule: Schedule
    tokens: Ints
    count: Ints
    kept: Ints
    stopped: Flags
    full: Flags

    @property
    def is_decode(self) -> Flags:
        """Whether a token was drawn, and not after the last chunk of a prompt."""
        return ~self.schedule.is_prefill & (self.count > 0)

    @property
    def drafted(self) -> Ints:
        """Drafts verified, before any cut."""
        return np.where(self.is_decode, self.schedule.rows - 1, 0)

    @property
    def accepted(self) -> Ints:
        """Drafts accepted, before any cut."""
        return np.where(self.is_decode, self.count - 1, 0)

    def end(self, request: int, kept: int) -> None:
        """Let only the first `kept` tokens of a request stand, for a reason not known here."""
        self.kept[request] = kept
        self.stopped[request] = self.full[request] = False


@attrs.frozen(eq=False)
class Commit:
    """What a speculator is told of the committed step, [batch] without padding; see `Step`."""

    valid_rows: Ints
    next_token: Ints


def cut(batch: Batch, verdict: Verdict, slots: Slots) -> Block:
    """Bring the verdict to the host and find the first stop token or limit of every request."""
    schedule = batch.schedule
    which, requests = schedule.slots, len(schedule.slots)
    # the one copy to the host in a step
    tokens = verdict.tokens[:requests].cpu().numpy()
    count = verdict.count[:requests].cpu().numpy()
    columns = np.arange(tokens.shape[1])

    stop_ids = slots.stop_ids[which, : slots.stop_width]
    stops = (tokens[:, :, None] == stop_ids[:, None, :]) & (tokens >= 0)[:, :, None]
    is_stop = stops.any(axis=2) & (columns < count[:, None])
    first_stop = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), tokens.shape[1])
    room = slots.max_length[which] - slots.length[which]
    kept = np.minimum(np.minimum(count, first_stop + 1), room)
    stopped = first_stop < kept
    full = ~stopped & (kept > 0) & (kept == room)
    return Block(
        schedule=schedule, tokens=tokens, count=count, kept=kept, stopped=stopped, full=full
    )


def commit(block: Block, slots: Slots) -> Commit:
    """Append what stands; the cache is valid up to it, whatever was computed past it."""
    schedule, tokens, kept = block.schedule, block.tokens, block.kept
    which, requests = schedule.slots, len(schedule.slots)
    owner = np.repeat(np.arange(requests), kept)
    local = np.arange(len(owner)) - np.repeat(np.cumsum(kept) - kept, kept)
    slots.history[which[owner], slots.length[which[owner]] + local] = tokens[owner, local]
    slots.length[which] += kept
    valid_rows = np.where(schedule.is_prefill, schedule.rows, kept)
    slots.computed[which] += valid_rows
    # what follows the last valid row: the token drawn, or the next one of the prompt
    following = np.minimum(slots.computed[which], slots.length[which] - 1)
    return Commit(valid_rows=valid_rows, next_token=slots.history[which, following])
