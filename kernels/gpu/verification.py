"""Verification and sampling on a GPU, with the signatures of `specdec_kernels.reference`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec_kernels import reference
from specdec_kernels.gpu.coupled import row_statistics, settle_chains, settle_rows
from specdec_kernels.gpu.rows import CAREFUL, WARPS, largest_of, tile_of
from specdec_kernels.gpu.truncation import first_draws, mass_above, settle_attempts
from specdec_kernels.noise import ATTEMPTS
from specdec_kernels.reference import process_logits, sample_draft
from specdec_kernels.types import DenseQ, Sampling, SparseQ, Verified

__all__ = ["process_logits", "sample", "sample_draft", "verify"]

# Low bits that no float32 converted from the dtype has set.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class _Rows(NamedTuple):
    """The rows of a call: of B requests, K + 1 each at most."""

    logits: Tensor
    logits_start: Tensor | None
    draft_tokens: Tensor | None
    positions: Tensor
    slots: Tensor
    sampling: Sampling
    drafts: int  # K

    @property
    def places(self) -> int:
        return len(self.slots) * (self.drafts + 1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Logits and chains, as the kernels take them."""
        if self.logits_start is None:
            return self.logits, self.logits.stride(0), self.slots, self.slots, 0
        assert self.draft_tokens is not None
        stride = self.draft_tokens.stride(0)
        return self.logits, self.logits.stride(0), self.logits_start, self.draft_tokens, stride

    @property
    def chains(self) -> dict[str, Any]:
        return {
            "CHAINS": self.logits_start is not None,
            "KP": triton.next_power_of_2(self.drafts + 1),
        }


class _Partials(NamedTuple):
    """What the tiles of the rows leave."""

    tops: Tensor  # [rows, tiles]
    totals: Tensor  # [rows, tiles]
    scores: Tensor  # [rows, tiles, attempts]
    choices: Tensor  # [rows, tiles, attempts]


def verify(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
    truncate: bool = True,
) -> Verified:
    """Accept a prefix of every request's drafts and add one token of the target's."""
    if method != "coupled" or logits.dtype not in _UNUSED_BITS:
        return reference.verify(
            logits, logits_start, draft_tokens, positions, slots, sampling,
            method=method, q=q, acceptance_rates=acceptance_rates, truncate=truncate,
        )  # fmt: skip
    batch, drafts = draft_tokens.shape
    tokens = torch.empty((batch, drafts + 1), dtype=torch.int64, device=logits.device)
    decided = torch.empty_like(tokens)
    count = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if not batch:
        return Verified(tokens, count, decided)
    rows = _Rows(logits, logits_start, draft_tokens, positions, slots, sampling, drafts)
    partials = _Partials(*[tokens] * 4) if truncate else _statistics(rows, 1)
    drawn = _truncated(rows) if truncate else tokens
    tiles = triton.cdiv(logits.shape[1], tile_of(logits.shape[1]))
    settle_chains[(batch,)](
        *rows.arguments, positions, slots, sampling.stream, sampling.temperature,
        *partials, drawn,
        tokens, count, decided, logits.shape[1], drafts, tiles,
        DRAWN=truncate, KP=rows.chains["KP"], TP=triton.next_power_of_2(tiles), TILE=CAREFUL,
        num_warps=4,
    )  # fmt: skip
    return Verified(tokens, count, decided)


def sample(
    logits: Tensor, positions: Tensor, slots: Tensor, sampling: Sampling, *, truncate: bool = True
) -> Tensor:
    """Plain decoding: one token per row."""
    if logits.dtype not in _UNUSED_BITS:
        return reference.sample(logits, positions, slots, sampling, truncate=truncate)
    rows = _Rows(logits, None, None, positions, slots, sampling, 0)
    if not rows.places:
        return torch.empty_like(slots)
    if truncate:
        return _truncated(rows)
    partials = _statistics(rows, 1)
    tokens = torch.empty(rows.places, dtype=torch.int64, device=logits.device)
    tiles = partials.tops.shape[1]
    settle_rows[(rows.places,)](
        logits, logits.stride(0), positions, slots, sampling.stream, sampling.temperature,
        *partials, tokens, logits.shape[1], tiles,
        TP=triton.next_power_of_2(tiles), TILE=CAREFUL, num_warps=4,
    )  # fmt: skip
    return tokens


def _statistics(rows: _Rows, attempts: int) -> _Partials:
    vocab = rows.logits.shape[1]
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    device = rows.logits.device
    floats = torch.empty((2 + attempts, rows.places, tiles), dtype=torch.float32, device=device)
    choices = torch.empty((rows.places, tiles, attempts), dtype=torch.int32, device=device)
    partials = _Partials(floats[0], floats[1], floats[2:], choices)
    row_statistics[(tiles, rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, rows.sampling.stream,
        rows.sampling.temperature, partials.tops, partials.scores, choices, partials.totals,
        vocab, rows.drafts, tiles,
        **rows.chains, TILE=tile, ATTEMPTS=attempts,
        LARGEST_RAW=largest_of(rows.logits.dtype), num_warps=WARPS,
    )  # fmt: skip
    return partials


def _truncated(rows: _Rows) -> Tensor:
    """The token of every row where a request may truncate: int64 [rows]."""
    sampling, device = rows.sampling, rows.logits.device
    vocab = rows.logits.shape[1]
    partials = _statistics(rows, ATTEMPTS)
    tile, tiles = tile_of(vocab), partials.tops.shape[1]
    places, last = rows.places, triton.next_power_of_2(tiles)
    drawn = torch.empty(places, dtype=torch.int64, device=device)
    attempts = torch.empty((places, ATTEMPTS), dtype=torch.int64, device=device)
    levels = torch.empty((places, ATTEMPTS), dtype=torch.float32, device=device)
    row_tops = torch.empty(places, dtype=torch.float32, device=device)
    states = torch.empty(places, dtype=torch.int32, device=device)
    kept = torch.empty((places, tiles), dtype=torch.float32, device=device)
    above = torch.empty((places, tiles, ATTEMPTS), dtype=torch.float32, device=device)
    counts = torch.empty((places, tiles, ATTEMPTS), dtype=torch.int32, device=device)
    truncation = sampling.top_k, sampling.top_p, sampling.min_p
    first_draws[(rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, sampling.stream, sampling.temperature,
        *truncation, partials.tops, partials.totals, partials.scores, partials.choices,
        drawn, attempts, levels, row_tops, states, vocab, rows.drafts, tiles,
        **rows.chains, TP=last, ATTEMPTS=ATTEMPTS, num_warps=1,
    )  # fmt: skip
    mass_above[(tiles, rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.slots, sampling.temperature, sampling.min_p, levels, row_tops,
        states, above, counts, kept, vocab, rows.drafts, tiles,
        **rows.chains, TILE=tile, ATTEMPTS=ATTEMPTS, num_warps=WARPS,
    )  # fmt: skip
    settle_attempts[(rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, sampling.stream, sampling.temperature,
        *truncation, drawn, attempts, levels, row_tops, states, above, counts, kept,
        vocab, rows.drafts, tiles,
        **rows.chains, TP=last, TILE=CAREFUL, ATTEMPTS=ATTEMPTS,
        SHIFT=_UNUSED_BITS[rows.logits.dtype], LARGEST_RAW=largest_of(rows.logits.dtype),
        num_warps=8,
    )  # fmt: skip
    return drawn
