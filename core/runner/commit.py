"""Commit a verdict to the slot arrays: cut at stops and budgets, append, count."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.runner.batch import Batch
from specdec.runner.state import Slots
from specdec.types import Verdict

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@attrs.frozen(eq=False)
class Commit:
    """What a step did to each of its requests, [batch] without padding.

    tokens: [batch, K + 1] emitted; the first `kept` of each stand. stopped: the last of them is a
    stop token. full: its length limit is reached. drafted, accepted: before any cut.
    valid_rows, next_token, samples: see `Step`.
    """

    tokens: Ints
    kept: Ints
    stopped: Flags
    full: Flags
    drafted: Ints
    accepted: Ints
    valid_rows: Ints
    next_token: Ints
    samples: Flags


def commit(batch: Batch, verdict: Verdict, slots: Slots) -> Commit:
    """Append what was emitted, up to the first stop token or limit, and count the drafts."""
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

    owner = np.repeat(np.arange(requests), kept)
    local = np.arange(len(owner)) - np.repeat(np.cumsum(kept) - kept, kept)
    slots.history[which[owner], slots.length[which[owner]] + local] = tokens[owner, local]
    slots.length[which] += kept
    valid_rows = np.where(schedule.is_prefill, schedule.rows, kept)
    slots.computed[which] += valid_rows
    # what follows the last valid row: the token drawn, or the next one of the prompt
    following = np.minimum(slots.computed[which], slots.length[which] - 1)
    next_token = slots.history[which, following]

    decode = ~schedule.is_prefill & (count > 0)
    drafted = np.where(decode, schedule.rows - 1, 0)
    accepted = np.where(decode, count - 1, 0)
    _count(slots, which, drafted, accepted, decode)
    return Commit(
        tokens=tokens,
        kept=kept,
        stopped=stopped,
        full=full,
        drafted=drafted,
        accepted=accepted,
        valid_rows=valid_rows,
        next_token=next_token,
        samples=schedule.samples,
    )


def _count(slots: Slots, which: Ints, drafted: Ints, accepted: Ints, decode: Flags) -> None:
    """Add the step to the counters of its slots."""
    speculated, plain = which[drafted > 0], which[decode & (drafted == 0)]
    slots.spec_steps[speculated] += 1
    slots.plain_steps[plain, slots.skip[plain]] += 1
    columns = np.arange(slots.drafted.shape[1])
    slots.drafted[which] += columns < drafted[:, None]
    slots.accepted[which] += columns < accepted[:, None]
