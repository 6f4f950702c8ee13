"""The hooks. Each is a contract: when, how often, shapes, ownership, what None means.

Hooks run in the order of the algorithm, once per step of the whole batch:

    forward → verify → commit → extract_hidden_states → propose → plan → step_finished

An implementation names only the arguments it needs, in any order, without defaults. Hooks run
under `torch.inference_mode`. Every tensor is on the target's device unless a host mirror is
named.

If an implementation raises for a step, core asks it again with the requests of the step one by
one, each as a step of its own and not padded; a request whose call raises ends with an error that
names the speculator, the others go on. So no call must be spoiled by having been made before for
the same rows: write state by position and length, do not count calls. See `specdec.types` for the
fields, shapes and dtypes of `Step`, `Draft` and `Verdict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.types import Draft, Step, StepReport, TargetOutputs, Verdict

PROJECT = "specdec"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The hook specifications of specdec."""

    @hookspec(firstresult=True)
    def extract_hidden_states(self, step: Step, outputs: TargetOutputs) -> Tensor | None:
        """Turn what the target left behind into the features that `propose` reads.

        Called once per step, after the commit and before `propose`, prefill chunks included.
        If nobody answers, core concatenates the captured layers in ascending order of id, then
        the post-norm and the pre-head states if asked for; one that asked for none gets None.

        step: the step just verified; its commit fields are set. Read only.
        outputs: captured layers, each [rows, hidden] in the target's dtype. Read only, and gone
            with the next step: clone what has to live longer.
        Return features [rows, width] on the same device, or None to leave it to core.
        The first answer that is not None counts.
        Do not run the target again, and do not read a tensor on the host. Since 0.1.

        Example:
            @hookimpl
            def extract_hidden_states(self, outputs):
                return self.fc(outputs.captured[2])
        """

    @hookspec(firstresult=True)
    def propose(self, step: Step, hidden: Tensor | None, k: int) -> Draft | None:
        """Draft tokens for every request of the step that wants some.

        Called once per step, after every forward of the target: prefill chunks and steps in
        which no request wants drafts (`step.k` all 0) included, because a drafter with a cache
        has to see every committed row. If nobody answers, nothing is drafted.

        step: the committed step. `valid_rows` leading rows of each request carry committed
            tokens, `next_token` follows them; rows after those were rejected. `step.k` drafts
            are wanted per request: 0 for chunks that are not final, for finished requests and
            padding. Read only.
        hidden: [rows, width] from `extract_hidden_states`; None if no features were asked for.
        k: columns of the answer: the most that a request wants, 0 if none does. A loop that
            captures may ask for more than that.
        Return a `Draft` with tokens [batch, k], -1 where nothing is proposed. None means no
        drafts for anybody in this step. Its tensors stay yours; they must keep their values
        until the next call of `propose`. The first answer that is not None counts.
        Do not read a device tensor on the host (`.item()`, `.tolist()`) if you declared
        `graph_safe`; use `step.host` if you declared `host_tokens`. Since 0.1.

        Example:
            @hookimpl
            def propose(self, step, k):
                again = step.next_token[:, None].expand(-1, k)
                return Draft(tokens=again.clone())
        """

    @hookspec(firstresult=True)
    def verify(self, step: Step, draft: Draft, logits: Tensor) -> Verdict | None:
        """Decide which drafts stand, and draw one token of the target's own after them.

        Called in every step in which a request has drafts under test; steps without drafts are
        drawn by core with the same noise. Core answers for `coupled`, `standard`, `block` and
        `synthetic`; an implementation is called only if `rejection_sample_method` names a rule
        that its capabilities declare.

        step: the step just computed. Its commit fields are not set yet. Read only.
        draft: the drafts under test, [batch, K]; row i of a request's logits tests column i,
            the row after its last draft is the bonus row. A request without drafts has one row.
            K is the most that a request has under test.
        logits: [logit_rows, vocab], before temperature and truncation
            (`specdec_kernels.process_logits`), after biases, penalties, masks and logits
            processors, each row with the context it really has. In the head's dtype, or float32
            if any request of the step has such edits. Read only.
        Return a `Verdict`: a request with logits emits at least one token and at most one more
        than its drafts, the tokens before the last being its drafts; one without logits has
        count 0. None is an error: nobody else knows the rule. The first answer
        that is not None counts.
        Do not look at the order of the batch: key randomness by `step.state.stream` and
        position. Since 0.1.

        Example:
            @hookimpl
            def verify(self, step, draft, logits):
                return self.accept_while_likely(step, draft, logits)
        """

    @hookspec
    def step_finished(self, step: Step, verdict: Verdict, report: StepReport) -> None:
        """Observe a finished step: metrics, tracing, recording.

        Called once per step on the host, after the plan of the next one; every implementation
        is called, the last registered first. Nothing is expected back. If the last requests end
        between steps, by an abort, it is called with a step of padding alone, so that nobody
        waits for news of them.

        step: the committed step, its tensors on the host. Read only; `state` is that of the
            device, which may be a step ahead: leave it alone.
        verdict: what was emitted, on the host, before stop tokens and budgets cut it.
        report: the same in numbers, with what the scheduler did: which requests came, were set
            aside and ended, drafts by request, why some had none, queues and pages.
        An observer that raises is reported and called no more; the requests are unharmed.
        Do not change any tensor, and do not call the engine. Since 0.1.

        Example:
            @hookimpl
            def step_finished(self, verdict):
                self.emitted += int(verdict.count.sum())
        """
