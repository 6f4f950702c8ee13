"""Verification and sampling on a GPU, with the signatures of `specdec_kernels.reference`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec_kernels import reference
from specdec_kernels.gpu.chains import UNUSED_BITS, Partials, Rows, draws, statistics
from specdec_kernels.gpu.comparison import compare
from specdec_kernels.gpu.coupled import settle_chains, settle_rows
from specdec_kernels.gpu.draft import sample_draft
from specdec_kernels.gpu.edits import prepare_edits
from specdec_kernels.gpu.rows import CAREFUL, tile_of
from specdec_kernels.reference import process_logits
from specdec_kernels.types import DenseQ, EditInputs, Sampling, SparseQ, Verified

MOST = 65535  # requests of a launch: what CUDA allows along the axes that count them

__all__ = ["process_logits", "sample", "sample_draft", "verify"]


def _edits_of(edits: EditInputs | None, start: Tensor, begin: int) -> EditInputs | None:
    """Those of the MOST requests from `begin` on; `start` [B] has the first row of every one."""
    if edits is None or edits.grammar is None:
        return edits
    first = start if edits.grammar_start is None else edits.grammar_start
    return edits._replace(grammar_start=first[begin : begin + MOST])


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
    edits: EditInputs | None = None,
) -> Verified:
    """Accept a prefix of every request's drafts and add one token of the target's."""
    if logits.dtype not in UNUSED_BITS:
        return reference.verify(
            logits, logits_start, draft_tokens, positions, slots, sampling,
            method=method, q=q, acceptance_rates=acceptance_rates, truncate=truncate,
            edits=edits,
        )  # fmt: skip
    batch, drafts = draft_tokens.shape
    if batch > MOST:
        parts = [
            verify(
                logits, logits_start[i : i + MOST + 1], draft_tokens[i : i + MOST], positions,
                slots[i : i + MOST], sampling,
                method=method, q=q, acceptance_rates=acceptance_rates, truncate=truncate,
                edits=_edits_of(edits, logits_start[:-1], i),
            )
            for i in range(0, batch, MOST)
        ]  # fmt: skip
        joined = [torch.cat(part) for part in zip(*(x[:3] for x in parts), strict=True)]
        flags = [x.empty for x in parts if x.empty is not None]
        return Verified(*joined)._replace(empty=torch.cat(flags) if flags else None)
    tokens = torch.empty((batch, drafts + 1), dtype=torch.int64, device=logits.device)
    decided = torch.empty_like(tokens)
    count = torch.empty(batch, dtype=torch.int64, device=logits.device)
    empty = None if edits is None else torch.empty_like(tokens, dtype=torch.bool)
    verified = Verified(tokens, count, decided, empty)
    if not batch:
        return verified
    chains = logits, logits_start, draft_tokens, positions, slots
    tables = None if edits is None else prepare_edits(*chains, **edits._asdict())
    rows = Rows(*chains, sampling, drafts, tables)
    if method != "coupled":
        compare(
            rows, q, verified,
            method=method, acceptance_rates=acceptance_rates, truncate=truncate,
        )  # fmt: skip
        return verified
    if truncate:
        drawn, tops, _cuts = draws(rows)
        partials = Partials(tops, tokens, tokens)
    else:
        drawn, partials = tokens, statistics(rows)
    tiles = triton.cdiv(logits.shape[1], tile_of(logits.shape[1]))
    settle_chains[(batch,)](
        *rows.arguments, positions, slots, sampling.stream, sampling.temperature,
        *partials, drawn,
        *verified, logits.shape[1], drafts, tiles, tables,
        DRAWN=truncate, KP=rows.chains["KP"], TP=triton.next_power_of_2(tiles), TILE=CAREFUL,
        num_warps=4,
    )  # fmt: skip
    return verified


def sample(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    truncate: bool = True,
    edits: EditInputs | None = None,
) -> Tensor:
    """Plain decoding: one token per row."""
    if logits.dtype not in UNUSED_BITS:
        return reference.sample(logits, positions, slots, sampling, truncate=truncate, edits=edits)
    if len(slots) > MOST:
        start = torch.arange(len(slots), device=slots.device)
        parts = [
            sample(
                logits[i : i + MOST], positions[i : i + MOST], slots[i : i + MOST], sampling,
                truncate=truncate, edits=_edits_of(edits, start, i),
            )
            for i in range(0, len(slots), MOST)
        ]  # fmt: skip
        return torch.cat(parts)
    if not len(slots):
        return torch.empty_like(slots)
    chains = logits, None, None, positions, slots
    tables = None if edits is None else prepare_edits(*chains, **edits._asdict())
    rows = Rows(*chains, sampling, 0, tables)
    if truncate:
        return draws(rows).tokens
    partials = statistics(rows)
    tokens = torch.empty(rows.places, dtype=torch.int64, device=logits.device)
    tiles = partials.tops.shape[1]
    settle_rows[(rows.places,)](
        logits, logits.stride(0), positions, slots, sampling.stream, sampling.temperature,
        *partials, tokens, logits.shape[1], tiles, tables,
        TP=triton.next_power_of_2(tiles), TILE=CAREFUL, num_warps=4,
    )  # fmt: skip
    return tokens
