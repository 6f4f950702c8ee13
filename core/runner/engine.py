"""The decode loop: forward, verify, commit, extract, propose, plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import SpeculatorError
from specdec.outputs import FinishReason, SpeculationMetrics
from specdec.runner.batch import Batch, build, on_host
from specdec.runner.commit import Commit, commit
from specdec.runner.drafting import Drafting
from specdec.runner.isolation import Failures
from specdec.runner.sampling import draw
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence
from specdec.runner.state import SKIPS, Slots
from specdec.runner.target import TargetModel
from specdec.session import Session
from specdec.types import HostStep, RequestChanges, Step, TargetOutputs

logger = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class Engine:
    """Runs steps over everything that was added.

    pad_rows: rows of a step are rounded up to a multiple of it.
    """

    def __init__(
        self,
        *,
        target: TargetModel,
        slots: Slots,
        scheduler: Scheduler,
        session: Session,
        drafting: Drafting | None,
        pad_rows: int = 1,
    ) -> None:
        self.target = target
        self.slots = slots
        self.scheduler = scheduler
        self.session = session
        self.drafting = drafting
        self.pad_rows = pad_rows
        self.totals = SpeculationMetrics()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length the scheduler's `check` let pass."""
        self.scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences that have not ended, keeping what they emitted."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")

    def step(self) -> None:
        """Run one step; sequences that emitted a token or ended are put into their `news`.

        If anything but a speculator raises, a half-done step cannot be told from a whole one:
        every running sequence ends with an error, those that wait stay.
        """
        try:
            self._step()
        except BaseException as error:
            reason = f"a step was broken off by {type(error).__name__}: {error}".rstrip(": ")
            for sequence in list(self.scheduler.running.values()):
                self._finish(sequence, "error", reason)
            raise

    @torch.inference_mode()
    def _step(self) -> None:
        drafting = self.drafting
        self._admit()
        schedule = self.scheduler.schedule()
        if not len(schedule.slots):
            return
        self.slots.upload()
        batch = build(schedule, self.slots, pad_rows=self.pad_rows, device=self.target.device)
        outputs = self.target.forward(batch.rows)
        failed: Failures = {}
        if drafting is None:
            verdict = draw(batch.step, outputs.logits)
        else:
            verdict, failed = drafting.verify(batch, outputs.logits)
        done = commit(batch, verdict, self.slots)
        self._record(batch, done, failed)
        k = self._wanted(schedule.slots, done)
        step = self._committed(batch, done, k)
        if drafting is not None:
            draft, failed = drafting.propose(
                step, TargetOutputs(outputs.captured, outputs.post_norm, outputs.pre_head), k
            )
            self._fail(schedule.slots, failed)
            drafting.plan(schedule.slots, draft, k)
        for observer, error in self.session.step_finished(*on_host(step, verdict)):
            logger.error("the observer %r raised and was taken off", observer, exc_info=error)

    # -- between steps -----------------------------------------------------

    def _admit(self) -> None:
        now = time.perf_counter()
        admitted = self.scheduler.admit()
        for sequence in admitted:
            sequence.metrics.first_scheduled_time = sequence.metrics.first_scheduled_time or now
            if self.drafting:
                self.drafting.policy.reset(sequence.slot)
        changes = self.scheduler.changes
        if not changes:
            return
        told = RequestChanges(added=tuple(changes.added), finished=tuple(changes.finished))
        changes.added.clear()
        changes.finished.clear()
        if self.drafting is None:
            return
        try:
            self.drafting.tell(told)
        except SpeculatorError as error:
            logger.error("%s; telling request by request", error, exc_info=error)
            self._tell_one_by_one(told)

    def _tell_one_by_one(self, told: RequestChanges) -> None:
        """Tell the speculator of every change alone; requests it does not take end."""
        assert self.drafting is not None
        for slot in told.finished:
            try:
                self.drafting.tell(RequestChanges(finished=(slot,)))
            except SpeculatorError as error:  # its request has ended: nobody is left to end
                logger.error("%s", error, exc_info=error)
        for info in told.added:
            try:
                self.drafting.tell(RequestChanges(added=(info,)))
            except SpeculatorError as error:
                self._finish(self.scheduler.running[info.slot], "error", str(error))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.slot >= 0:
            self._count(sequence)
        self.scheduler.retire(sequence)
        sequence.finish_reason = reason
        sequence.error = error
        sequence.metrics.finished_time = time.perf_counter()
        sequence.news.append(sequence)

    def _count(self, sequence: Sequence) -> None:
        """Move the slot's counters to the sequence."""
        slots, slot = self.slots, sequence.slot
        skips = slots.plain_steps[slot]
        counted = SpeculationMetrics(
            num_drafts=int(slots.spec_steps[slot]),
            num_draft_tokens=int(slots.drafted[slot].sum()),
            num_accepted_tokens=int(slots.accepted[slot].sum()),
            num_plain_steps=int(skips.sum()),
            drafted_per_pos=slots.drafted[slot].tolist(),
            accepted_per_pos=slots.accepted[slot].tolist(),
            skipped={SKIPS[i]: int(n) for i, n in enumerate(skips) if n} if self.drafting else {},
        )
        sequence.metrics.speculative_decoding.add(counted)
        self.totals.add(counted)

    # -- commit ------------------------------------------------------------

    def _record(self, batch: Batch, done: Commit, failed: Failures) -> None:
        """Hand the committed tokens to their sequences and end those that are done."""
        now = time.perf_counter()
        drafted = done.drafted
        if self.drafting is not None:
            decoding = ~batch.schedule.is_prefill
            self.drafting.policy.observe(
                batch.schedule.slots[decoding], drafted[decoding], done.accepted[decoding]
            )
        tokens = done.tokens
        for request, slot in enumerate(batch.schedule.slots.tolist()):
            sequence = self.scheduler.running[slot]
            if request in failed:
                self._finish(sequence, "error", failed[request])
                continue
            count = int(done.kept[request])
            if not count:
                continue
            sequence.emitted.extend(tokens[request, :count].tolist())
            metrics = sequence.metrics
            metrics.first_token_time = metrics.first_token_time or now
            if done.stopped[request]:
                last = sequence.emitted[-1]
                sequence.stop_reason = last if last in sequence.own_stop_ids else None
                self._finish(sequence, "stop")
            elif done.full[request]:
                self._finish(sequence, "length")
            else:
                sequence.news.append(sequence)

    def _wanted(self, which: Ints, done: Commit) -> Ints:
        """Drafts that each request of the step is given next, [batch]; 0 for those that ended."""
        if self.drafting is None:
            return np.zeros(len(which), dtype=np.int64)
        going = done.samples & ~done.stopped & ~done.full
        going &= np.fromiter((s in self.scheduler.running for s in which.tolist()), bool)
        return self.drafting.wanted(which, going)

    def _committed(self, batch: Batch, done: Commit, k: Ints) -> Step:
        """The step with its commit fields."""
        slots, schedule = self.slots, batch.schedule
        padding = batch.step.batch - len(k)
        device = self.target.device

        def put(values: Ints) -> Tensor:
            return torch.from_numpy(np.pad(values, (0, padding))).to(device)

        host = None
        if self.drafting is not None and self.drafting.capabilities.host_tokens:
            host = HostStep(
                slots=np.pad(schedule.slots, (0, padding), constant_values=-1),
                k=np.pad(k, (0, padding)),
                history=slots.history_view,
                length=slots.length_view,
            )
        slots.upload()
        return attrs.evolve(
            batch.step,
            valid_rows=put(done.valid_rows),
            next_token=put(done.next_token),
            k=put(k),
            host=host,
        )

    def _fail(self, which: Ints, failed: Failures) -> None:
        for request, reason in failed.items():
            sequence = self.scheduler.running.get(int(which[request]))
            if sequence is not None:
                self._finish(sequence, "error", reason)
