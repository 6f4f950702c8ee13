"""Ask the kernels for tokens: plain draws, and core's verification methods."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels
from specdec.types import Step, Verdict
from specdec_kernels import DenseQ, SparseQ


def draw(step: Step, predicted: Tensor, logits: Tensor, *, columns: int) -> Verdict:
    """Draw one token for every request with logits: plain decoding, the same noise with k = 0.

    columns: what the answer is padded to.
    """
    nothing = step.slots.new_empty((step.batch, 0))
    one = kernel_verify(step, predicted, logits, nothing, method="coupled")
    wide = (0, columns - 1)
    return Verdict(
        tokens=torch.nn.functional.pad(one.tokens, wide, value=-1),
        count=one.count,
        rows=torch.nn.functional.pad(one.rows, wide, value=-1),
    )


def kernel_verify(
    step: Step,
    predicted: Tensor,
    logits: Tensor,
    drafts: Tensor,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
) -> Verdict:
    """Judge drafts by one of core's methods; see `specdec_kernels.verify`.

    predicted: [logit_rows] sequence index of the token that each row of logits predicts.
    """
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
    return Verdict(tokens=found.tokens, count=found.count, rows=found.rows)
