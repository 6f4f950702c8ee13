"""Edits of logits in a step: sampling parameters and logits processors, at every draft row.

Core's rules edit what they read, and no edited logits are made. Logits processors, and the rule of
a speculator, have to see them: there, `edit_logits` makes them for the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import Tensor

from specdec.errors import ProcessorError
from specdec.logits_processors import LogitsRows, run_processors
from specdec.runner.batch import Batch
from specdec.runner.commit import Block
from specdec.runner.edit_arrays import EditArrays
from specdec.runner.isolation import Failures
from specdec.runner.sampling import KernelVerdict
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import Verdict
from specdec_kernels import EditInputs, edit_logits, empty_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(eq=False)
class Edited:
    """The logits of a step, and what is still to be done to them.

    inputs: the edits that the kernels make as they read `logits`, which are the target's own; None
        if nobody asked for any, or if `logits` have them all.
    failed: requests whose processors failed on their first row.
    first_only: requests whose processors failed with drafts in view, but not on the first row: the
    row that fails may never be reached, so one token is drawn and the next step sees.
    asking: requests with rows in the step that asked for edits, [n]; empty if none did.
    """

    logits: Tensor
    inputs: EditInputs | None = None
    failed: Failures = attrs.field(factory=dict)
    first_only: list[int] = attrs.field(factory=list)
    asking: NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64))


class Editing:
    """Keeps what every slot wants edited, and does it.

    vocab_size: of the target.
    """

    def __init__(self, slots: Slots, vocab_size: int, device: torch.device) -> None:
        self.slots = slots
        self.arrays = EditArrays(slots.max_num_seqs + 1, vocab_size, device)
        self._processed: dict[int, Sequence] = {}  # by slot, those with logits processors

    def place(self, sequence: Sequence) -> None:
        """Note what the request in a slot wants."""
        slot = sequence.slot
        self.arrays.place(
            slot,
            sequence.params,
            prompt_length=len(sequence.prompt),
            stop_ids=sequence.stop_ids,
            bad_words=sequence.bad_words,
        )
        if sequence.params.logits_processors:
            self._processed[slot] = sequence

    def clear(self, slot: int) -> None:
        """Forget what the slot wanted."""
        self.arrays.clear(slot)
        self._processed.pop(slot, None)

    def apply(self, batch: Batch, logits: Tensor, *, shown: bool = False) -> Edited:
        """Edit the logits of a step where somebody has to see them, else say what is to be done.

        shown: whether they are shown to a speculator. Where they are edited here they may be
        overwritten. Rows of requests that ask for nothing keep their bits.
        """
        if not self.arrays.active:
            return Edited(logits)
        which = batch.schedule.slots
        asking = np.flatnonzero(self.arrays.asks(which) & batch.schedule.samples)
        if not len(asking):
            return Edited(logits)
        self.arrays.upload()
        step, state = batch.step, batch.step.state
        # kernels take scratch for as many tokens as they are handed
        longest = int(self.slots.length[which].max())
        inputs = EditInputs(state.history[:, :longest], state.prompt_length, self.arrays.edits)
        processed = [r for r in asking.tolist() if int(which[r]) in self._processed]
        if not (shown or processed):
            return Edited(logits, inputs, asking=asking)
        logits = edit_logits(
            logits,
            step.logits_start,
            batch.drafts,
            step.predicted,
            step.slots,
            history=inputs.history,
            prompt_length=inputs.prompt_length,
            edits=inputs.edits,
        )
        edited = Edited(logits, asking=asking)
        for request in processed:
            self._process(batch, request, self._processed[int(which[request])], edited)
        return edited

    def _process(self, batch: Batch, request: int, sequence: Sequence, edited: Edited) -> None:
        """Run the processors of one request on its rows, if it has any in this step."""
        first, end = (int(i) for i in batch.step.logits_start[request : request + 2])
        for last in (end, first + 1):
            if first >= last:
                return
            rows = LogitsRows(
                self.slots.history[sequence.slot],
                length=int(self.slots.length[sequence.slot]),
                prompt_length=len(sequence.prompt),
                drafts=self.slots.drafts[sequence.slot, : last - first - 1],
            )
            logits = edited.logits[first:last]
            try:
                logits[:] = run_processors(sequence.params.logits_processors, rows, logits)
            except ProcessorError as error:
                if last == first + 1:
                    edited.failed[request] = str(error)
                    return
                edited.first_only.append(request)
            else:
                return

    def cut_where_empty(self, edited: Edited, verdict: Verdict, block: Block) -> Failures:
        """End blocks before a token whose row excludes every id, and say which requests end so.

        Requests whose processors failed keep nothing of the step.
        """
        for request in edited.failed:
            block.end(request, 0)
        for request in edited.first_only:
            if block.kept[request] > 1:
                block.end(request, 1)
        if not len(edited.asking):
            return {}
        asking = [r for r in edited.asking.tolist() if block.kept[r]]
        if not asking:
            return {}
        which = torch.tensor(asking, device=verdict.rows.device)
        columns = _empty(edited, verdict, which).cpu().numpy()
        failed: Failures = {}
        for request, row in zip(asking, columns, strict=True):
            found = np.flatnonzero(row[: block.kept[request]])
            if len(found):
                block.end(request, int(found[0]))
                failed[request] = (
                    "the sampling parameters and logits processors of the request exclude every "
                    "token"
                )
        return failed


def _empty(edited: Edited, verdict: Verdict, which: Tensor) -> Tensor:
    """Which tokens of these requests are of rows that exclude every id: bool [n, K + 1]."""
    if edited.inputs is not None:
        assert isinstance(verdict, KernelVerdict)
        assert verdict.empty is not None, "the edits went to no kernel"
        return verdict.empty[which]
    rows = verdict.rows[which]
    read = rows >= 0
    empty = torch.zeros_like(read)
    empty[read] = empty_rows(edited.logits.index_select(0, rows[read]))
    return empty
