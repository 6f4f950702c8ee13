"""The decode loop: forward, verify, commit, extract, propose, plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specdec_kernels
from specdec.errors import SpecdecError, SpeculatorError
from specdec.legality import Agreement
from specdec.length_policy import LengthPolicy
from specdec.outputs import FinishReason, SpeculationMetrics
from specdec.runner.batch import Batch, build, only, only_outputs
from specdec.runner.commit import Commit, commit
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence
from specdec.runner.state import SKIPS, Slots
from specdec.runner.target import TargetModel
from specdec.session import Session
from specdec.speculator import Speculator
from specdec.types import Capabilities, Draft, HostStep, Step, TargetOutputs, Verdict
from specdec_kernels import DenseQ, SparseQ

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ints = NDArray[np.int64]

NOTHING, BUDGET, CONTEXT, POLICY = range(4)  # into SKIPS


@attrs.define(eq=False)
class Drafting:
    """The speculator's side of the loop, as the engine needs it."""

    speculator: Speculator
    capabilities: Capabilities
    agreement: Agreement
    policy: LengthPolicy
    max_context: int  # longest sequence to draft for
    acceptance_rates: Tensor | None = None  # conditional, [K], for synthetic verification


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
        self._k = drafting.agreement.drafts if drafting else 0
        self._q: Draft | None = None  # the last draft: its q is read when its tokens are verified

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

    def _step(self) -> None:
        self._admit()
        schedule = self.scheduler.schedule()
        if not len(schedule.slots):
            return
        self.slots.upload()
        batch = build(schedule, self.slots, pad_rows=self.pad_rows, device=self.target.device)
        outputs = self.target.forward(batch.rows)
        verdict, failed = self._verify(batch, outputs.logits)
        done = commit(batch, verdict, self.slots)
        self._record(batch, done, failed)
        step = self._committed(batch, done)
        left = TargetOutputs(
            captured=outputs.captured, post_norm=outputs.post_norm, pre_head=outputs.pre_head
        )
        drafts, failed = self._propose(step, left)
        self._fail(step, failed)
        self._plan(step, drafts)
        for observer, error in self.session.step_finished(step, verdict):
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
        added, finished = tuple(changes.added), tuple(changes.finished)
        changes.added.clear()
        changes.finished.clear()
        if self.drafting is None:
            return
        try:
            self.drafting.speculator.requests_changed(
                added=added, preempted=(), resumed=(), finished=finished
            )
        except Exception as error:  # whatever a plugin raises
            logger.exception("%s raised in requests_changed", self.session.label)
            reason = SpeculatorError(
                f"{self.session.label} raised {type(error).__name__} in requests_changed: {error}"
            )
            for sequence in admitted:
                self._finish(sequence, "error", str(reason))

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

    # -- verify ------------------------------------------------------------

    def _verify(self, batch: Batch, logits: Tensor) -> tuple[Verdict, dict[int, str]]:
        step = batch.step
        if self.drafting is None or not bool((step.num_drafts > 0).any()):
            return draw(step, batch.predicted, logits, batch.drafts), {}
        q = self._q.q if self._q is not None else None
        draft = Draft(tokens=batch.drafts, q=q)

        def one(request: int) -> Verdict:
            read, end = (int(x) for x in step.logits_start[request : request + 2])
            alone = attrs.evolve(draft, tokens=draft.tokens[request : request + 1])
            found = self.session.verify(only(step, request), alone, logits[read:end])
            return attrs.evolve(found, rows=torch.where(found.rows >= 0, found.rows + read, -1))

        try:
            return self.session.verify(step, draft, logits), {}
        except SpecdecError as error:
            verdicts, failed = self._one_by_one(step, one, error)
        empty = torch.full((1, self._k + 1), -1, dtype=torch.int64, device=self.target.device)
        none = Verdict(tokens=empty, count=empty.new_zeros(1), rows=empty)
        parts = [verdicts.get(b, none) for b in range(step.batch)]
        return Verdict(
            tokens=torch.cat([p.tokens for p in parts]),
            count=torch.cat([p.count for p in parts]),
            rows=torch.cat([p.rows for p in parts]),
        ), failed

    def _one_by_one(
        self, step: Step, call: Callable[[int], T], error: SpecdecError
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Ask for every request alone, after a call for all of them raised.

        Returns the answers and, for requests whose own call raised, the reasons.
        """
        logger.error("%s; asking request by request", error, exc_info=error)
        answers: dict[int, T] = {}
        failed: dict[int, str] = {}
        requests = [b for b, slot in enumerate(step.slots.tolist()) if slot >= 0]
        for request in requests:
            if len(requests) == 1:
                failed[request] = str(error)
                break
            try:
                answers[request] = call(request)
            except SpecdecError as own:
                failed[request] = str(own)
        return answers, failed

    # -- commit ------------------------------------------------------------

    def _record(self, batch: Batch, done: Commit, failed: dict[int, str]) -> None:
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

    def _committed(self, batch: Batch, done: Commit) -> Step:
        """The step with its commit fields, and how many drafts everybody is given next."""
        slots, schedule = self.slots, batch.schedule
        k = self._wanted(schedule.slots, done)
        padding = batch.step.batch - len(k)
        device = self.target.device

        def put(values: Ints) -> Tensor:
            return torch.from_numpy(np.pad(values, (0, padding))).to(device)

        host = None
        if self.drafting is not None and self.drafting.capabilities.host_tokens:
            host = HostStep(
                slots=np.pad(schedule.slots, (0, padding), constant_values=-1),
                k=np.pad(k, (0, padding)),
                history=slots.history,
                length=slots.length,
            )
        slots.upload()
        return attrs.evolve(
            batch.step,
            valid_rows=put(done.valid_rows),
            next_token=put(done.next_token),
            k=put(k),
            host=host,
        )

    def _wanted(self, which: Ints, done: Commit) -> Ints:
        """Drafts that each request of the step is given, [batch]; 0 for those that ended."""
        if self.drafting is None:
            return np.zeros(len(which), dtype=np.int64)
        slots = self.slots
        room = slots.max_length[which] - slots.length[which] - 1  # the last token needs no draft
        reach = self.drafting.max_context - slots.length[which]
        chosen = self.drafting.policy.choose(which, running=len(which))
        k = np.minimum(chosen, np.minimum(room, reach)).clip(0, self._k)
        going = done.samples & ~done.stopped & ~done.full
        going &= np.fromiter(
            (s in self.scheduler.running for s in which.tolist()), bool, len(which)
        )
        slots.skip[which] = np.where(
            chosen <= 0, POLICY, np.where(room <= 0, BUDGET, np.where(reach <= 0, CONTEXT, NOTHING))
        )
        return np.where(going, k, 0)

    # -- propose and plan --------------------------------------------------

    def _propose(self, step: Step, outputs: TargetOutputs) -> tuple[Draft | None, dict[int, str]]:
        if self.drafting is None:
            return None, {}

        def ask(step: Step, outputs: TargetOutputs) -> Draft | None:
            hidden = self.session.extract_hidden_states(step, outputs)
            return self.session.propose(step, hidden, self._k)

        def alone(request: int) -> Draft | None:
            draft = ask(only(step, request), only_outputs(outputs, step, request))
            if draft is None:
                return None
            # copies: the next call may write to the same tensors
            slot = int(step.slots[request])
            return Draft(
                tokens=draft.tokens[0].clone(),
                q=None if draft.q is None else type(draft.q)(*(p[slot].clone() for p in draft.q)),
            )

        try:
            return ask(step, outputs), {}
        except SpecdecError as error:
            answers, failed = self._one_by_one(step, alone, error)
        return join(step, {b: d for b, d in answers.items() if d is not None}, self._k), failed

    def _fail(self, step: Step, failed: dict[int, str]) -> None:
        for request, reason in failed.items():
            sequence = self.scheduler.running.get(int(step.slots[request]))
            if sequence is not None:
                self._finish(sequence, "error", reason)

    def _plan(self, step: Step, draft: Draft | None) -> None:
        """Keep the drafts for the next step, cut to what each request was given.

        A plan only shortens, and never looks at what the drafts are.
        """
        if self.drafting is None:
            return
        self._q = draft
        slots = self.slots
        which = step.slots.cpu().numpy()
        valid = which >= 0
        if draft is None:
            slots.num_drafts[which[valid]] = 0
            return
        tokens = draft.tokens.cpu().numpy()[valid]
        k = step.k.cpu().numpy()[valid]
        given = (tokens >= 0) & (np.arange(tokens.shape[1]) < k[:, None])
        length = np.cumprod(given, axis=1).sum(axis=1)
        slots.drafts[which[valid]] = tokens
        slots.num_drafts[which[valid]] = length


def join(step: Step, drafts: Mapping[int, Draft], k: int) -> Draft:
    """One draft of the whole step from those of single requests, each without its batch axis."""
    tokens = step.next_token.new_full((step.batch, k), -1)
    for request, draft in drafts.items():
        tokens[request] = draft.tokens
    laws = {int(step.slots[b]): d.q for b, d in drafts.items() if d.q is not None}
    shapes = {tuple(part.shape for part in law) for law in laws.values()}
    if len(laws) < len(drafts) or len(shapes) != 1:
        # judged as if they were certain, drafts of any law leave the output exact
        return Draft(tokens=tokens)
    first = next(iter(laws.values()))
    slots = step.state.length.shape[0]
    whole = type(first)(*(part.new_zeros((slots, *part.shape)) for part in first))
    for slot, law in laws.items():
        for into, part in zip(whole, law, strict=True):
            into[slot] = part
    return Draft(tokens=tokens, q=whole)


def draw(step: Step, predicted: Tensor, logits: Tensor, drafts: Tensor) -> Verdict:
    """Draw one token for every request with logits: plain decoding, the same noise with k = 0."""
    return kernel_verify(step, predicted, logits, drafts[:, :0], method="coupled", width=drafts)


def kernel_verify(
    step: Step,
    predicted: Tensor,
    logits: Tensor,
    drafts: Tensor,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
    width: Tensor | None = None,
) -> Verdict:
    """Ask the kernels. width: a tensor whose columns the answer is padded to."""
    state = step.state
    found = specdec_kernels.verify(
        logits,
        step.logits_start,
        drafts,
        predicted,
        step.slots,
        specdec_kernels.Sampling(
            stream=state.stream,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
        ),
        method=method,
        q=q,
        acceptance_rates=acceptance_rates,
    )
    missing = 0 if width is None else width.shape[1] - drafts.shape[1]
    if not missing:
        return Verdict(tokens=found.tokens, count=found.count, rows=found.rows)
    pad = torch.nn.functional.pad
    return Verdict(
        tokens=pad(found.tokens, (0, missing), value=-1),
        count=found.count,
        rows=pad(found.rows, (0, missing), value=-1),
    )
