"""The speculator's side of the loop: drafts are proposed, planned, and verified a step later."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import PLUGIN_ERRORS, SpecdecError, SpeculatorError, blame
from specdec.legality import Agreement
from specdec.length_policy import LengthPolicy
from specdec.runner.batch import Batch
from specdec.runner.isolation import Failures, join, one_by_one, only, only_outputs, parts
from specdec.runner.sampling import draw
from specdec.runner.state import Slots
from specdec.session import Session
from specdec.speculator import Speculator
from specdec.types import Capabilities, Draft, RequestChanges, Step, TargetOutputs, Verdict
from specdec_kernels import EditInputs

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOTHING, BUDGET, CONTEXT, POLICY = range(4)  # why nothing is drafted: into `SKIP_REASONS`


@attrs.define(eq=False)
class Drafting:
    """A speculator at work in an engine.

    max_context: longest sequence to draft for.
    """

    speculator: Speculator
    capabilities: Capabilities
    session: Session
    slots: Slots
    agreement: Agreement
    policy: LengthPolicy
    max_context: int
    # the last answer of `propose`: its q is read when its tokens are verified
    _last: Draft | None = None

    @property
    def k(self) -> int:
        """Columns of every draft."""
        return self.agreement.drafts

    def tell(self, changes: RequestChanges) -> None:
        """Tell the speculator which requests came and went.

        Raises:
            SpeculatorError: it raised.
        """
        try:
            self.speculator.requests_changed(changes)
        except PLUGIN_ERRORS as error:
            raise SpeculatorError(blame(self.session.label, error, "requests_changed")) from error

    def reads_logits(self, batch: Batch) -> bool:
        """Whether the speculator's own rule judges this step: it is given edited logits."""
        return self.session.own_rule and batch.drafts.shape[1] > 0

    def verify(
        self, batch: Batch, logits: Tensor, edits: EditInputs | None
    ) -> tuple[Verdict, Failures]:
        """Judge the drafts under test; requests without any are given a plain draw.

        edits: what is still to be done to the logits; None where `reads_logits`.
        """
        step = batch.step
        if not batch.drafts.shape[1]:
            return draw(step, logits, edits), {}
        draft = Draft(tokens=batch.drafts, q=self._last.q if self._last is not None else None)

        if not self.session.own_rule:
            return self.session.verify(step, draft, logits, edits), {}

        def alone(request: int) -> Verdict:
            read, end = (int(x) for x in step.logits_start[request : request + 2])
            one = attrs.evolve(draft, tokens=draft.tokens[request : request + 1])
            found = self.session.verify(only(step, request), one, logits[read:end])
            return attrs.evolve(found, rows=torch.where(found.rows >= 0, found.rows + read, -1))

        try:
            return self.session.verify(step, draft, logits), {}
        except SpecdecError as error:
            # whoever has nothing under test is not asked about: core draws for it
            tested = step.num_drafts > 0
            verdicts, failed = one_by_one(step, alone, error, among=tested)
            plain = draw(step, logits)
            for request in (~tested).nonzero()[:, 0].tolist():
                verdicts[request] = _widened(plain, request, batch.drafts.shape[1] + 1)
        empty = batch.drafts.new_full((1, batch.drafts.shape[1] + 1), -1)
        none = Verdict(tokens=empty, count=empty.new_zeros(1), rows=empty)
        parts = [verdicts.get(b, none) for b in range(step.batch)]
        return Verdict(
            tokens=torch.cat([p.tokens for p in parts]),
            count=torch.cat([p.count for p in parts]),
            rows=torch.cat([p.rows for p in parts]),
        ), failed

    def wanted(self, which: Ints, going: Flags) -> Ints:
        """Drafts that each of the step's requests is given next, [batch]; 0 if it is not going."""
        slots = self.slots
        room = slots.max_length[which] - slots.length[which] - 1  # the last token needs no draft
        reach = self.max_context - slots.length[which]
        chosen = self.policy.choose(which, running=len(which))
        k = np.minimum(chosen, np.minimum(room, reach)).clip(0, self.k)
        slots.skip[which] = np.where(
            chosen <= 0, POLICY, np.where(room <= 0, BUDGET, np.where(reach <= 0, CONTEXT, NOTHING))
        )
        return np.where(going, k, 0)

    def propose(self, step: Step, outputs: TargetOutputs, k: Ints) -> tuple[Draft | None, Failures]:
        """Extract hidden states and draft from them, as many as anybody wants.

        k: drafts that each request wants, on the host.
        """
        most = int(k.max(initial=0))

        def ask(step: Step, outputs: TargetOutputs) -> Draft | None:
            hidden = self.session.extract_hidden_states(step, outputs)
            return self.session.propose(step, hidden, most)

        def alone(request: int) -> Draft | None:
            draft = ask(only(step, request), only_outputs(outputs, step, request))
            if draft is None:
                return None
            # copies: the next call may write to the same tensors
            slot = int(step.slots[request])
            return Draft(
                tokens=draft.tokens[0].clone(),
                q=None if draft.q is None else parts(draft.q, lambda part: part[slot].clone()),
            )

        try:
            return ask(step, outputs), {}
        except SpecdecError as error:
            answers, failed = one_by_one(step, alone, error)
        return join(step, {b: d for b, d in answers.items() if d is not None}, most), failed

    def plan(self, which: Ints, draft: Draft | None, k: Ints) -> None:
        """Keep the drafts of these slots for the next step, cut to what each request was given.

        A plan only shortens, and never looks at what the drafts are.
        """
        self._last = draft
        if draft is None:
            self.slots.num_drafts[which] = 0
            return
        tokens = draft.tokens[: len(which)].cpu().numpy()
        given = (tokens >= 0) & (np.arange(tokens.shape[1]) < k[:, None])
        self.slots.drafts[which, : tokens.shape[1]] = tokens
        self.slots.num_drafts[which] = np.cumprod(given, axis=1).sum(axis=1)


def _widened(verdict: Verdict, request: int, columns: int) -> Verdict:
    """The verdict of one request, in so many columns."""
    one, wide = slice(request, request + 1), (0, columns - verdict.tokens.shape[1])
    return Verdict(
        tokens=torch.nn.functional.pad(verdict.tokens[one], wide, value=-1),
        count=verdict.count[one],
        rows=torch.nn.functional.pad(verdict.rows[one], wide, value=-1),
    )
