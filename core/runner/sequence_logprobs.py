"""Log-probabilities of a step, for the sequences that want them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.runner.batch import Batch
from specdec.runner.commit import Block
from specdec.runner.row_logprobs import PromptChunk, RowLogprobs, prompt_logprobs, prompt_rows
from specdec.runner.scheduler import Schedule
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import Verdict

Ints = NDArray[np.int64]


class SequenceLogprobs:
    """Reads rows of logits for the sequences in slots; per step `rows`, `keep`, `record`.

    running: sequences by slot, as the scheduler has them.
    """

    def __init__(self, slots: Slots, running: Mapping[int, Sequence]) -> None:
        self.slots = slots
        self.running = running
        self._tokens = RowLogprobs()
        self._chunks: list[PromptChunk] = []

    def rows(self, schedule: Schedule) -> tuple[Ints, Ints] | None:
        """Rows of prompts whose logits are wanted besides, as `build` takes them."""
        slots = self.slots
        wanted = schedule.is_prefill & (slots.prompt_logprobs[schedule.slots] >= 0)
        self._chunks = []
        for request in np.flatnonzero(wanted).tolist():
            slot = int(schedule.slots[request])
            log = self.running[slot].prompt_logprobs
            assert log is not None
            self._chunks.append(
                PromptChunk(
                    request=request,
                    prompt=slots.history[slot, : slots.prompt_length[slot]],
                    first=int(slots.computed[slot]),
                    rows=int(schedule.rows[request]),
                    have=len(log),
                    n=log.n,
                )
            )
        return prompt_rows(self._chunks) if self._chunks else None

    def keep(self, batch: Batch, logits: Tensor) -> None:
        """Note the prompts' entries and copy the rows to come, before anything edits them."""
        which = batch.schedule.slots
        if self._chunks:
            read = logits[int(batch.step.logits_start[-1]) :]
            for request, entries in prompt_logprobs(self._chunks, read).items():
                log = self.running[int(which[request])].prompt_logprobs
                assert log is not None
                log.append(entries)
        self._tokens.keep(batch.step, logits, self.slots.logprobs[which])

    def record(self, block: Block, verdict: Verdict) -> None:
        """Note the entries of the tokens that stand."""
        taken = self._tokens.take(block.tokens, block.kept, verdict.rows)
        for request, entries in taken.items():
            log = self.running[int(block.schedule.slots[request])].logprobs
            assert log is not None
            log.append(entries)
