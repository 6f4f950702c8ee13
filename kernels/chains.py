"""The batch as verification sees it: one chain of drafts per request, and tools to index it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import noise
from specdec_kernels.types import DenseQ, Sampling, SparseQ


class Given(NamedTuple):
    """What all requests of a call share."""

    logits: Tensor  # [R, V]
    positions: Tensor  # [R]
    sampling: Sampling
    q: DenseQ | SparseQ | None
    rates: Tensor | None  # [K]


class Chains(NamedTuple):
    """The requests to decide: n of them."""

    row: Tensor  # [n, K + 1]: tests draft i, or gives the token that follows i drafts
    draft: Tensor  # [n, K]
    length: Tensor  # [n]: drafts before the first placeholder; columns past it mean nothing
    slot: Tensor  # [n]

    @property
    def column(self) -> Tensor:
        """0 to K: int64 [K + 1]."""
        return torch.arange(self.row.shape[1], device=self.row.device)

    @property
    def tested(self) -> Tensor:
        """Which drafts there are: bool [n, K]."""
        return self.column[:-1] < self.length[:, None]


Rule = Callable[[Given, Chains], tuple[Tensor, Tensor]]  # -> accepted [n], next token [n]


def chains_of(vocab: int, logits_start: Tensor, draft_tokens: Tensor, slots: Tensor) -> Chains:
    """The requests of a call; `length` ends a chain before whatever is not a draft."""
    column = torch.arange(draft_tokens.shape[1] + 1, device=slots.device)
    real = (draft_tokens >= 0) & (draft_tokens < vocab)
    real &= column[:-1] < logits_start.diff()[:, None] - 1  # the last row has no draft to test
    # nothing was proposed where there is a placeholder, so its row is as good as the bonus row
    return Chains(logits_start[:-1, None] + column, draft_tokens, prefix(real), slots)


def uniforms(given: Given, chains: Chains) -> Tensor:
    """One number in (0, 1) per draft: float32 [n, K]."""
    # Keyed by the column too: block looks at a position's number in every step that drafts the
    # position, and would otherwise meet numbers that are known to have failed.
    rows = chains.row[:, :-1].clamp(max=len(given.positions) - 1)
    stream = given.sampling.stream[chains.slot, None].expand_as(rows)
    return noise.uniform(stream, given.positions[rows], noise.ACCEPT, chains.column[:-1])


def take(logits: Tensor, rows: Tensor) -> Tensor:
    """`logits[rows]`. Rows ascend strictly, so as many as there are are all of them: no copy."""
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def first_largest(logits: Tensor) -> Tensor:
    """The lowest id with the largest logit of every row, NaN excluded; 0 if all are excluded."""
    return torch.nan_to_num(logits, nan=-inf, neginf=-inf).argmax(-1)


def prefix(passed: Tensor) -> Tensor:
    """The number of leading Trues of every row."""
    return passed.cumprod(1).sum(1)


def at(table: Tensor, column: Tensor) -> Tensor:
    """One entry of every row."""
    return table.gather(1, column[:, None]).squeeze(1)
