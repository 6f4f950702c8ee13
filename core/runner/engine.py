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

from specdec.errors import SpecdecError, SpeculatorError, blame
from specdec.metrics import SpeculationMetrics
from specdec.outputs import FinishReason
from specdec.runner.batch import Batch, build
from specdec.runner.collection import no_collection
from specdec.runner.commit import Block, Commit, commit, cut
from specdec.runner.drafting import Drafting
from specdec.runner.editing import Editing
from specdec.runner.isolation import Failures
from specdec.runner.reporting import Reporting
from specdec.runner.sampling import draw
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence
from specdec.runner.sequence_logprobs import SequenceLogprobs
from specdec.runner.state import Slots
from specdec.runner.target import TargetModel
from specdec.session import Session
from specdec.step_counter import StepCounter
from specdec.types import (
    HostStep,
    RequestChanges,
    Step,
    TargetOutputs,
    Verdict,
)

logger = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class Engine:
    """Runs steps over everything that was added. Used by one thread at a time.

    counter: the observer that counts speculation; one of the session's.
    """

    def __init__(
        self,
        *,
        target: TargetModel,
        slots: Slots,
        scheduler: Scheduler,
        session: Session,
        drafting: Drafting | None,
        counter: StepCounter,
        editing: Editing,
    ) -> None:
        self.target = target
        self.slots = slots
        self.scheduler = scheduler
        self.session = session
        self.drafting = drafting
        self.counter = counter
        self.editing = editing
        self.logprobs = SequenceLogprobs(slots, scheduler.running)
        self.stepping = False
        self._to_abort: list[Sequence] = []  # once the step that runs is over
        self._ended: list[tuple[Sequence, int]] = []  # with the slot that each had
        self.reporting = Reporting(session, scheduler, target.device, drafts=drafting is not None)
        scheduler.leaving = self._leaving

    @property
    def totals(self) -> SpeculationMetrics:
        """Speculation over every request so far, those that run included."""
        return self.counter.totals

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length the scheduler's `check` let pass."""
        self.scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences that have not ended, keeping what they emitted."""
        if self.stepping:
            # a processor or an observer asks, or a stream that nobody reads is collected: a step
            # does not lose requests on its way
            self._to_abort.extend(sequences)
        else:
            self._end(sequences, "abort")

    def fail(self, sequences: Iterable[Sequence], error: str) -> None:
        """End sequences that have not ended with an error."""
        self._end(sequences, "error", error)

    def _end(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None
    ) -> None:
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, reason, error)
        self._deliver()

    def abort_all(self) -> None:
        """End everything."""
        self.abort([*self.scheduler.running.values(), *self.scheduler.waiting])

    def step(self) -> None:
        """Run one step; watched sequences that emitted, and those that ended, go to their `news`.

        If anything but a speculator or a logits processor raises, a half-done step cannot be told
        from a whole one: every running sequence ends with an error, those that wait stay.

        Raises:
            SpecdecError: a step runs already.
        """
        if self.stepping:
            raise SpecdecError(
                "a step of this LLM runs already: no step can be run from a logits processor, an "
                "observer or another thread meanwhile"
            )
        self.stepping = True
        try:
            with no_collection():
                self._step()
        except BaseException as error:
            reason = f"a step was broken off by {type(error).__name__}: {error}".rstrip(": ")
            for sequence in list(self.scheduler.running.values()):
                self._finish(sequence, "error", reason)
            raise
        finally:
            self.stepping = False
            late, self._to_abort = self._to_abort, []
            self.abort(late)

    @torch.inference_mode()
    def _step(self) -> None:
        started, drafting = time.perf_counter(), self.drafting
        changes = self._admit()
        schedule = self.scheduler.choose()
        if not len(schedule.slots):
            if changes is not None or self.reporting.pending:
                self.reporting.idle(changes)
            return
        self.slots.upload()
        batch = build(
            schedule,
            self.slots,
            least_rows=self.target.least_rows,
            device=self.target.device,
            also_read=self.logprobs.rows(schedule),
        )
        outputs = self.target.forward(batch.rows)
        self.logprobs.keep(batch, outputs.logits)
        shown = drafting is not None and drafting.reads_logits(batch)
        edited = self.editing.apply(batch, outputs.logits, shown=shown)
        failed: Failures = {}
        verdict: Verdict
        if drafting is None:
            verdict = draw(batch.step, edited.logits, edited.inputs)
        else:
            verdict, failed = drafting.verify(batch, edited.logits, edited.inputs)
        block = cut(batch, verdict, self.slots)
        empty = self.editing.cut_where_empty(edited, verdict, block)
        failed |= edited.failed
        stopped = self._cut_at_stop_strings(block, failed)
        # a stop string in what is left came first
        failed |= {r: why for r, why in empty.items() if r not in stopped}
        done = commit(block, self.slots)
        self._record(block, verdict, failed, stopped)
        skipped = self.slots.skip[schedule.slots]  # why this step verified nothing, not the next
        going = schedule.samples & self.slots.running[schedule.slots]
        k = drafting.wanted(schedule.slots, going) if drafting else np.zeros_like(schedule.slots)
        step = self._committed(batch, done, k)
        if drafting is not None:
            draft, failed = drafting.propose(
                step, TargetOutputs(outputs.captured, outputs.post_norm, outputs.pre_head), k
            )
            self._fail(schedule.slots, failed)
            drafting.plan(schedule.slots, draft, k)
        self.reporting.step(step, verdict, block, changes=changes, skipped=skipped, started=started)

    # -- between steps -----------------------------------------------------

    def _admit(self) -> RequestChanges | None:
        """Give out slots and pages; tell the speculator what changed."""
        now = time.perf_counter()
        for sequence in self.scheduler.admit():
            sequence.metrics.first_scheduled_time = sequence.metrics.first_scheduled_time or now
            self.editing.place(sequence)
            if self.drafting:
                self.drafting.policy.reset(sequence.slot)
        return self._tell()

    def _tell(self) -> RequestChanges | None:
        """Tell the speculator what changed, and return it."""
        told = self.scheduler.changes.take()
        if told is None or self.drafting is None:
            return told
        try:
            self.drafting.tell(told)
        except SpeculatorError as error:
            logger.error("%s; telling request by request", error, exc_info=error)
            self._tell_one_by_one(told)
        return told

    def _tell_one_by_one(self, told: RequestChanges) -> None:
        """Tell the speculator of every change alone; requests it does not take end."""
        assert self.drafting is not None
        one_each = [RequestChanges(finished=(slot,)) for slot in told.finished]
        one_each += [RequestChanges(preempted=(slot,)) for slot in told.preempted]
        one_each += [RequestChanges(added=(info,)) for info in told.added]
        one_each += [RequestChanges(resumed=(info,)) for info in told.resumed]
        for one in one_each:
            try:
                self.drafting.tell(one)
            except SpeculatorError as error:
                if one.arrived:
                    self._finish(self.scheduler.running[one.arrived[0].slot], "error", str(error))
                else:  # its request has left: nobody is there to end
                    logger.error("%s", error, exc_info=error)

    def _leaving(self, sequence: Sequence) -> None:
        """Keep what a sequence needs when it loses its slot."""
        self._sync_tokens(sequence)
        self.editing.clear(sequence.slot)
        if sequence.finish_reason is None:  # set aside: everything of it was counted
            self._count(sequence, sequence.slot)

    def sync(self, sequence: Sequence) -> None:
        """Bring a sequence's tokens, times and numbers up to date with its slot."""
        if sequence.slot >= 0:
            self._sync_tokens(sequence)
            sequence.counted = self.counter.peek(sequence.slot)

    def _sync_tokens(self, sequence: Sequence) -> None:
        slot = sequence.slot
        new = self.slots.history[slot, sequence.num_known : self.slots.length[slot]]
        sequence.emitted += new.tolist()
        sequence.metrics.first_token_time = float(self.slots.first_time[slot]) or None

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        slot = sequence.slot
        sequence.finish_reason = reason
        sequence.error = error
        self.scheduler.retire(sequence)
        sequence.metrics.finished_time = time.perf_counter()
        self._ended.append((sequence, slot))
        self.reporting.ended(sequence, slot)

    def _count(self, sequence: Sequence, slot: int) -> None:
        """Move the numbers of a slot to the sequence that had it."""
        sequence.metrics.speculative_decoding.add(self.counter.take(slot))
        sequence.counted = None

    def _deliver(self) -> None:
        """Hand over the sequences that ended, once all of their last step is counted."""
        for sequence, slot in self._ended:
            if slot >= 0:
                self._count(sequence, slot)
            sequence.news[sequence] = None
        self._ended.clear()
        if self.reporting.pending and not self.busy:
            self.reporting.idle(self._tell())  # no step may come for long

    # -- commit ------------------------------------------------------------

    def _cut_at_stop_strings(self, block: Block, failed: Failures) -> dict[int, str]:
        """Feed the texts that look for stop strings; which string ended which request.

        A request whose text cannot be made is added to `failed`.
        """
        which = block.schedule.slots
        found = {}
        for request in np.flatnonzero(self.slots.has_stop_strings[which] & (block.kept > 0)):
            if request in failed:
                continue
            kept = int(block.kept[request])
            reason: FinishReason | None = None
            if block.stopped[request]:
                reason = "stop"
            elif block.full[request]:
                reason = "length"
            text = self.scheduler.running[int(which[request])].text
            try:
                match = text.append(block.tokens[request, :kept].tolist(), reason)
            except Exception as error:  # whatever a tokenizer raises
                failed[int(request)] = blame("the tokenizer", error, "decode")
                block.end(int(request), 0)
                continue
            if match is not None:
                block.end(int(request), match.kept)
                found[int(request)] = match.stop
        return found

    def _record(
        self, block: Block, verdict: Verdict, failed: Failures, strings: dict[int, str]
    ) -> None:
        """Note what was committed, and end the requests that are done."""
        which, kept = block.schedule.slots, block.kept
        if self.drafting is not None:
            decoding = ~block.schedule.is_prefill
            self.drafting.policy.observe(
                which[decoding], block.drafted[decoding], block.accepted[decoding]
            )
        first = which[(kept > 0) & (self.slots.first_time[which] == 0)]
        self.slots.first_time[first] = time.perf_counter()
        self.logprobs.record(block, verdict)
        self._fail(which, failed)
        for request, string in strings.items():
            sequence = self.scheduler.running[int(which[request])]
            sequence.stop_reason = string
            self._finish(sequence, "stop")
        for request in np.flatnonzero(block.stopped | block.full).tolist():
            maybe = self.scheduler.running.get(int(which[request]))
            if maybe is None:  # it failed
                continue
            if block.stopped[request]:
                last = int(block.tokens[request, kept[request] - 1])
                maybe.stop_reason = last if last in maybe.own_stop_ids else None
            self._finish(maybe, "stop" if block.stopped[request] else "length")
        moved = self.slots.watched[which] & (kept > 0) & self.slots.running[which]
        for slot in which[moved].tolist():
            sequence = self.scheduler.running[slot]
            sequence.news[sequence] = None

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
