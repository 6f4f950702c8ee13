"""Build the `Step` of a schedule: rows of all requests, packed and padded."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.runner.scheduler import Schedule
from specdec.runner.state import Slots
from specdec.runner.target import Rows
from specdec.types import Step, Verdict

Ints = NDArray[np.int64]


@attrs.frozen(eq=False)
class Batch:
    """A step with what only the host needs: the schedule, unpadded, and the target's view.

    drafts: [batch, K] drafts under test, -1 = none, padded like the step; K is the most that a
    request has, 0 if there are none.
    """

    schedule: Schedule
    step: Step
    rows: Rows
    drafts: Tensor


def padded_batch(requests: int) -> int:
    """The bucket a number of requests falls into: the next power of two."""
    return 1 << max(requests - 1, 0).bit_length()


def build(
    schedule: Schedule,
    slots: Slots,
    *,
    least_rows: int = 1,
    device: torch.device,
    also_read: tuple[Ints, Ints] | None = None,
) -> Batch:
    """Lay out the rows that the schedule asks for.

    least_rows: fewer rows are padded to this many; the target computes them at no less cost.
    also_read: (requests, rows of each) whose logits are wanted without being sampled from; they
        come after those that are.
    """
    requests = len(schedule.slots)
    batch = padded_batch(requests)
    counts = schedule.rows
    start = np.zeros(batch + 1, dtype=np.int64)
    start[1 : requests + 1] = np.cumsum(counts)
    start[requests + 1 :] = start[requests]
    total = int(start[-1])
    padded = max(total, least_rows)

    owner = np.repeat(np.arange(requests), counts)
    local = np.arange(total) - start[owner]
    slot = schedule.slots[owner]
    position = slots.computed[slot] + local
    # a decoding request's first row is its last token; the others are its drafts
    is_draft = ~schedule.is_prefill[owner] & (local > 0)
    token = slots.history[slot, position]
    token[is_draft] = slots.drafts[slot[is_draft], local[is_draft] - 1]

    # every row of a decoding request is read, the last row of a final chunk, none of the others
    wanted = np.where(schedule.is_prefill, schedule.samples.astype(np.int64), counts)
    logits_start = np.zeros(batch + 1, dtype=np.int64)
    logits_start[1 : requests + 1] = np.cumsum(wanted)
    logits_start[requests + 1 :] = logits_start[requests]
    reader = np.repeat(np.arange(requests), wanted)
    back = logits_start[reader + 1] - np.arange(int(logits_start[-1]))
    logits_rows = start[reader + 1] - back
    if also_read is not None:
        logits_rows = np.concatenate([logits_rows, start[also_read[0]] + also_read[1]])
    padded_position = _pad(position, padded, 0)

    padded_slots = _pad(schedule.slots, batch, -1)
    num_drafts = np.where(schedule.is_prefill, 0, counts - 1)
    columns = np.arange(int(num_drafts.max()))
    drafts = np.full((batch, len(columns)), -1, dtype=np.int64)
    under_test = slots.drafts[schedule.slots, : len(columns)]
    drafts[:requests] = np.where(columns < num_drafts[:, None], under_test, -1)

    def put(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    unset = torch.zeros(batch, dtype=torch.int64, device=device)
    step = Step(
        tokens=put(_pad(token, padded, 0)),
        positions=put(padded_position),
        query_start=put(start),
        slots=put(padded_slots),
        num_drafts=put(_pad(num_drafts, batch, 0)),
        is_prefill=put(_pad(schedule.is_prefill, batch, False)),
        samples=put(_pad(schedule.samples, batch, False)),
        logits_rows=put(logits_rows),
        predicted=put(padded_position[logits_rows] + 1),
        logits_start=put(logits_start),
        valid_rows=unset,
        next_token=unset,
        k=unset,
        state=slots.device,
        truncates=bool(slots.truncates[schedule.slots].any()),
    )
    rows = Rows(
        tokens=step.tokens,
        positions=step.positions,
        query_start=start[: requests + 1].tolist(),
        context=(slots.computed[schedule.slots] + counts).tolist(),
        block_tables=put(slots.block_tables[schedule.slots]),
        logits_rows=step.logits_rows,
        is_prefill=schedule.is_chunk.tolist(),
    )
    return Batch(schedule=schedule, step=step, rows=rows, drafts=put(drafts))


def empty_step(slots: Slots, device: torch.device) -> tuple[Step, Verdict]:
    """A step in which nobody takes part, and its verdict: one request of padding, no rows."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    step = Step(
        tokens=zeros(0),
        positions=zeros(0),
        query_start=zeros(2),
        slots=zeros(1) - 1,
        num_drafts=zeros(1),
        is_prefill=zeros(1, dtype=torch.bool),
        samples=zeros(1, dtype=torch.bool),
        logits_rows=zeros(0),
        predicted=zeros(0),
        logits_start=zeros(2),
        valid_rows=zeros(1),
        next_token=zeros(1),
        k=zeros(1),
        state=slots.device,
    )
    return step, Verdict(tokens=zeros(1, 1) - 1, count=zeros(1), rows=zeros(1, 1) - 1)


def on_host(step: Step, verdict: Verdict) -> tuple[Step, Verdict]:
    """Copies whose tensors are on the host; the same objects where they are there already."""
    if step.tokens.device.type == "cpu":
        return step, verdict

    def copied(values: Step | Verdict) -> dict[str, Any]:
        return {
            field.name: value.cpu()
            for field in attrs.fields(type(values))
            if isinstance(value := getattr(values, field.name), Tensor)
        }

    return attrs.evolve(step, **copied(step)), attrs.evolve(verdict, **copied(verdict))


def _pad(values: NDArray[np.generic], size: int, filler: int | bool) -> NDArray[np.generic]:
    padded = np.full(size, filler, dtype=values.dtype)
    padded[: len(values)] = values
    return padded
