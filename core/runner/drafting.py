"""The speculator's side of the loop: drafts are proposed, planned, and verified a step later."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.legality import Agreement
from specdec.length_policy import LengthPolicy
from specdec.runner.batch import Batch
from specdec.runner.isolation import Failures, join, one_by_one, only, only_outputs
from specdec.runner.sampling import draw
from specdec.runner.state import Slots
from specdec.session import Session
from specdec.speculator import Speculator
from specdec.types import Capabilities, Draft, Step, TargetOutputs, Verdict

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOTHING, BUDGET, CONTEXT, POLICY = range(4)  # why nothing is drafted: into `state.SKIPS`


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

    def verify(self, batch: Batch, logits: Tensor) -> tuple[Verdict, Failures]:
        """Judge the drafts under test; requests without any are given a plain draw."""
        step = batch.step
        if not bool((step.num_drafts > 0).any()):
            return draw(step, batch.predicted, logits, columns=self.k + 1), {}
        draft = Draft(tokens=batch.drafts, q=self._last.q if self._last is not None else None)

        def alone(request: int) -> Verdict:
            read, end = (int(x) for x in step.logits_start[request : request + 2])
            one = attrs.evolve(draft, tokens=draft.tokens[request : request + 1])
            found = self.session.verify(only(step, request), one, logits[read:end])
            return attrs.evolve(found, rows=torch.where(found.rows >= 0, found.rows + read, -1))

        try:
            return self.session.verify(step, draft, logits), {}
        except SpecdecError as error:
            verdicts, failed = one_by_one(step, alone, error)
        empty = batch.drafts.new_full((1, self.k + 1), -1)
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

    def propose(self, step: Step, outputs: TargetOutputs) -> tuple[Draft | None, Failures]:
        """Extract hidden states and draft from them."""

        def ask(step: Step, outputs: TargetOutputs) -> Draft | None:
            hidden = self.session.extract_hidden_states(step, outputs)
            return self.session.propose(step, hidden, self.k)

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
            answers, failed = one_by_one(step, alone, error)
        return join(step, {b: d for b, d in answers.items() if d is not None}, self.k), failed

    def plan(self, step: Step, draft: Draft | None) -> None:
        """Keep the drafts for the next step, cut to what each request was given.

        A plan only shortens, and never looks at what the drafts are.
        """
        self._last = draft
        slots = self.slots
        which = step.slots.cpu().numpy()
        valid = which >= 0
        which = which[valid]
        if draft is None:
            slots.num_drafts[which] = 0
            return
        tokens = draft.tokens.cpu().numpy()[valid]
        k = step.k.cpu().numpy()[valid]
        given = (tokens >= 0) & (np.arange(tokens.shape[1]) < k[:, None])
        slots.drafts[which] = tokens
        slots.num_drafts[which] = np.cumprod(given, axis=1).sum(axis=1)
