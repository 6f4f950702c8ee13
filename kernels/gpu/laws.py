"""The laws that a draft is judged by: p and q of its row, as pairs of numbers.

log2 p(x) = (z(x) - largest) / ln 2 - log_sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import row_top, tiles_of
from specdec_kernels.gpu.edit_values import edited_ids, row_edits
from specdec_kernels.gpu.rows import NOTHING, cleaned, reference_of, relative
from specdec_kernels.gpu.truncation import log_weight

# How the drafts' law is known: nothing to read, its rows, or their log-sum-exp.
NO_SUMS = tl.constexpr(0)
ROWS = tl.constexpr(1)
GIVEN = tl.constexpr(2)

# What q is: all on the draft, over the whole vocabulary, or over a few candidates.
NO_Q = tl.constexpr(0)
DENSE = tl.constexpr(1)
SPARSE = tl.constexpr(2)


@triton.jit
def log_sums(at, active, tops, totals, TILES, TP: tl.constexpr):
    """Of rows [N]: (largest, log2 of the sum relative to it), and which rows are wild."""
    place, there = tiles_of(at, active, TILES, TP)
    top = tl.load(tops + place, mask=there, other=NOTHING)
    total = tl.load(totals + place, mask=there, other=0.0)
    wild = tl.max((total != total).to(tl.int32), axis=1) > 0
    row_largest = tl.max(tl.where(top == top, top, NOTHING), axis=1)
    above = tl.where(total > 0, reference_of(top) - reference_of(row_largest)[:, None], 0.0)
    sums = tl.sum(tl.where(total > 0, total, 0.0) * tl.exp2(above), axis=1)
    return row_largest, safe_log2(sums), wild


@triton.jit
def safe_log2(x):
    """The logarithm, -inf of 0, without a warning where one is given."""
    return tl.where(x > 0, tl.log2(tl.where(x > 0, x, 1.0)), NOTHING)


@triton.jit
def careful_log_sum(here, temperature, cut, vocab, mine, TILE: tl.constexpr):
    """The same of one row, NaN excluded and +inf the largest, by one program."""
    top = row_top(here, temperature, vocab, mine, TILE)
    sums = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        z = cleaned(here, ids, ids < vocab, temperature, mine)
        sums += tl.where(z < cut, 0.0, tl.exp2(relative(z, top)))
    return top, safe_log2(tl.sum(sums))


@triton.jit
def tamed(
    here, stride, wild, length, temperature, cut, top, total, vocab, tables, request,
    N: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(largest, log_sum) of rows [N] from `here` on, `stride` apart, those of wild rows mended."""
    column = tl.arange(0, N)
    if tl.max(wild.to(tl.int32)) > 0:
        for i in range(0, length):
            if tl.max((wild & (column == i)).to(tl.int32)) > 0:
                mine = row_edits(tables, request, i)
                lowest = tl.min(tl.where(column == i, cut, float("inf")))
                one, other = careful_log_sum(
                    here + i * stride, temperature, lowest, vocab, mine, TILE
                )
                top = tl.where(column == i, one, top)
                total = tl.where(column == i, other, total)
    return top, total


@triton.jit
def tested_laws(
    logits, row_stride, first, length, at, slot, temperature, cuts, draft,
    q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
    tops, totals, q_tops, q_totals, vocab, q_vocab, TILES, tables, request,
    CUT: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
    CP: tl.constexpr,
):  # fmt: skip
    """Of the tested rows of a request, [N]: the law of p, that of q, and log2 of p(d) / q(d).

    A law is (largest, log_sum); a log_sum of -inf for q means that q is all on the draft.
    """
    column = tl.arange(0, N)
    active = column < length
    place = at + column
    p_top, p_sum, wild = log_sums(place, active, tops, totals, TILES, TP)
    cut = tl.full((N,), NOTHING, tl.float32)
    if CUT:
        cut = tl.load(cuts + place, mask=active, other=NOTHING)
    p_top, p_sum = tamed(
        logits + first * row_stride, row_stride, wild & active, length, temperature, cut,
        p_top, p_sum, vocab, tables, request, N, TILE,
    )  # fmt: skip
    rows = logits + tl.where(active, first + column, 0) * row_stride
    known = tl.where(active, draft, 0)
    x = tl.load(rows + known, mask=active, other=NOTHING).to(tl.float32)
    if tables is not None:
        mine = row_edits(tables, request, tl.where(active, column, 0)[:, None])
        x = tl.reshape(edited_ids(x[:, None], known[:, None], mine), (N,))
    z = log_weight(x, temperature)
    z = tl.where(z < cut, NOTHING, z)
    log_p = relative(z, p_top) - p_sum
    q_top = tl.zeros((N,), tl.float32)
    q_sum = tl.full((N,), NOTHING, tl.float32)
    log_q = tl.zeros((N,), tl.float32)
    if Q == DENSE:
        q_top, q_sum, q_wild = log_sums(place, active, q_tops, q_totals, TILES, TP)
        q_top, q_sum = tamed(
            q_logits + slot * q_slot, q_column, q_wild & active, length, temperature,
            tl.full((N,), NOTHING, tl.float32), q_top, q_sum, q_vocab, None, request, N, TILE,
        )  # fmt: skip
        rows = q_logits + slot * q_slot + tl.where(active, column, 0) * q_column
        shared = active & (draft < q_vocab)
        y = cleaned(rows, tl.where(shared, draft, 0), shared, temperature, None)
        log_q = relative(y, q_top) - q_sum
    elif Q == SPARSE:
        candidate = tl.arange(0, CP)
        there = active[:, None] & (candidate < candidates)[None, :]
        base = tl.where(active, column, 0)[:, None]
        ids = tl.load(
            q_ids + slot * ids_slot + base * ids_column + candidate[None, :], mask=there, other=-1
        )
        y = cleaned(
            q_logits + slot * q_slot + base * q_column, candidate[None, :],
            there & (ids >= 0) & (ids < vocab), temperature, None,
        )  # fmt: skip
        q_top = tl.max(y, axis=1)
        q_sum = safe_log2(tl.sum(tl.exp2(relative(y, q_top[:, None])), axis=1))
        of_draft = tl.max(tl.where(ids == draft[:, None], y, NOTHING), axis=1)
        log_q = relative(of_draft, q_top) - q_sum
    log_q = tl.where(q_sum == NOTHING, 0.0, log_q)
    ratio = log_p - log_q
    ratio = tl.where((ratio == ratio) & active, ratio, NOTHING)
    return p_top, p_sum, q_top, q_sum, cut, ratio
