"""What observers are told of a step."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from specdec.runner.batch import empty_step, on_host
from specdec.runner.commit import Block
from specdec.runner.drafting import Ints
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence
from specdec.session import Session
from specdec.types import EndedRequest, RequestChanges, Step, StepReport, Verdict

logger = logging.getLogger(__name__)


class Reporting:
    """Keeps what happened since the last report, and makes the next one.

    drafts: whether there is a speculator, so that a step without drafts has a reason.
    """

    def __init__(
        self, session: Session, scheduler: Scheduler, device: torch.device, *, drafts: bool
    ) -> None:
        self.session = session
        self.scheduler = scheduler
        self.device = device
        self.drafts = drafts
        self._ended: list[EndedRequest] = []

    @property
    def pending(self) -> bool:
        """Whether a request ended that nobody was told of."""
        return bool(self._ended)

    def ended(self, sequence: Sequence, slot: int) -> None:
        """Note that a sequence ended that had this slot, or -1."""
        self._ended.append(EndedRequest(slot, sequence.name, str(sequence.finish_reason)))

    def step(
        self,
        step: Step,
        verdict: Verdict,
        block: Block,
        *,
        changes: RequestChanges | None,
        skipped: Ints,
        started: float,
    ) -> None:
        """Report a step. skipped: why each request had no drafts, if it had none."""
        plain = block.is_decode & (block.drafted == 0) & self.drafts
        self._report(
            step,
            verdict,
            slots=block.schedule.slots,
            is_decode=block.is_decode,
            drafted=block.drafted,
            accepted=block.accepted,
            emitted=block.count,
            kept=block.kept,
            skipped=np.where(plain, skipped, -1),
            changes=changes,
            prompt_tokens=int(block.schedule.rows[block.schedule.is_prefill].sum()),
            seconds=time.perf_counter() - started,
        )

    @torch.inference_mode()
    def idle(self, changes: RequestChanges | None) -> None:
        """Report what happened although no step follows: one without requests."""
        step, verdict = empty_step(self.scheduler.slots, self.device)
        none = np.empty(0, np.int64)
        self._report(
            step,
            verdict,
            slots=none,
            is_decode=none.astype(bool),
            drafted=none,
            accepted=none,
            emitted=none,
            kept=none,
            skipped=none,
            changes=changes,
            prompt_tokens=0,
            seconds=0.0,
        )

    def _report(self, step: Step, verdict: Verdict, **numbers: Any) -> None:
        report = StepReport(
            ended=tuple(self._ended),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preempted=self.scheduler.num_preemptions,
            free_blocks=self.scheduler.pool.free,
            num_blocks=self.scheduler.num_blocks,
            **numbers,
        )
        self._ended.clear()
        for observer, error in self.session.step_finished(*on_host(step, verdict), report):
            logger.error("the observer %r raised and was taken off", observer, exc_info=error)
