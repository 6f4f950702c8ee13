"""Ask the kernels for tokens: plain draws, and core's verification methods."""

from __future__ import annotations

import attrs
from torch import Tensor

import specdec_kernels
from specdec.types import Step, Verdict
from specdec_kernels import DenseQ, EditInputs, SparseQ


@attrs.frozen(eq=False)
class KernelVerdict(Verdict):
    """A verdict of the kernels.

    empty: [batch, K + 1] bool, see `specdec_kernels.Verified`; None if they were given no edits.
    """

    empty: Tensor | None = None


def draw(step: Step, logits: Tensor, edits: EditInputs | None = None) -> KernelVerdict:
    """Draw one token for every request with logits: plain decoding, the same noise with k = 0."""
    nothing = step.slots.new_empty((step.batch, 0))
    return kernel_verify(step, logits, nothing, method="coupled", edits=edits)


def kernel_verify(
    step: Step,
    logits: Tensor,
    drafts: Tensor,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
    edits: EditInputs | None = None,
) -> KernelVerdict:
    """Judge drafts by one of core's methods; see `specdec_kernels.verify`."""
    found = specdec_kernels.verify(
        logits,
        step.logits_start,
        drafts,
        step.predicted,
        step.slots,
        step.state.sampling,
        method=method,
        q=q,
        acceptance_rates=acceptance_rates,
        truncate=step.truncates,
        edits=edits,
    )
    return KernelVerdict(tokens=found.tokens, count=found.count, rows=found.rows, empty=found.empty)
