"""Log-probabilities and ranks of tokens, and the n likeliest ids, in one read of the logits.

A tile leaves its sum, its count and its own n best; the n best of a row are among those of its
tiles. Values and ids are joined in 64-bit keys, so that one maximum settles ties as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu.rows import LOG2E, NOTHING, WARPS, finite, largest_of, raw, tile_of
from specdec_kernels.gpu.truncation import order, value_of
from specdec_kernels.logprobs import TokenLogprobs

# Most ids per row that tiles look for by themselves. Beyond, rows are sorted.
MOST = 32

_NO_KEY = tl.constexpr(-(2**63))
_LOW = tl.constexpr(2**32 - 1)


@triton.jit
def _key(x, ids):
    """Larger for larger x, of equal ones for lower ids: int64."""
    return (order(x, 0).to(tl.int64) << 32) | (ids.to(tl.int64) ^ _LOW)


@triton.jit
def tile_bests(
    logits, row_stride, tokens, tops, totals, counts, keys, tails, vocab, n, TILES,
    FIND: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One tile of one row, into [R, TILES]: its largest, its sum of weights relative to that, and
    how many ids are no smaller than the token.

    With FIND, `keys` [..., n] gets its n best, _NO_KEY past its last id, and `tails` how many are
    no smaller than the n-th.
    """  # noqa: D205
    # along one axis, the only one with room for any number of rows
    tile, row = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    here = logits + row * row_stride
    out = row * TILES + tile
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = raw(here, ids, inside, None, LARGEST_RAW)
    top = tl.max(x)
    tl.store(tops + out, top)
    # weights relative to the logit, not to its multiple: the largest float times 1.4 is infinite
    tl.store(totals + out, tl.sum(tl.exp2((x - finite(top)) * LOG2E)))
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab)
    value = raw(here, tl.where(known, token, 0), known, None, LARGEST_RAW)
    tl.store(counts + out, tl.sum((inside & (x >= value)).to(tl.int32)))
    if FIND:
        key = tl.where(inside, _key(x, ids), _NO_KEY)
        best = tl.max(key)
        tl.store(keys + out * n, best)
        for i in range(1, n):
            best = tl.max(tl.where(key < best, key, _NO_KEY))
            tl.store(keys + out * n + i, best)
        tl.store(tails + out, tl.sum(((key >> 32) >= (best >> 32)).to(tl.int32)))


@triton.jit
def join_tiles(
    logits, row_stride, tokens, tops, totals, counts, keys, tails,
    out_logprob, out_rank, out_ids, out_logprobs, out_ranks, norms, vocab, n, TILES,
    FIND: tl.constexpr, TP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One row: what its token and its n best ids are worth.

    norms: [R, 2], the largest logit and the log of the sum of weights relative to it.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TP)
    there = tile < TILES
    tile_top = tl.load(tops + row * TILES + tile, mask=there, other=NOTHING)
    top = finite(tl.max(tile_top))
    total = tl.load(totals + row * TILES + tile, mask=there, other=0.0)
    total = tl.sum(total * tl.exp2((finite(tile_top) - top) * LOG2E))
    norm = tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(norms + row * 2, top)
    tl.store(norms + row * 2 + 1, norm)
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab)
    x = raw(logits + row * row_stride, tl.where(known, token, 0), known, None, LARGEST_RAW)
    tl.store(out_logprob + row, (x - top) - norm)
    count = tl.load(counts + row * TILES + tile, mask=there, other=0)
    tl.store(out_rank + row, tl.where(known, tl.sum(count), 0).to(tl.int64))
    if FIND:
        candidate = tl.arange(0, CP)
        some = candidate < TILES * n
        place = row * TILES * n + candidate
        key = tl.load(keys + place, mask=some, other=_NO_KEY)
        column = tl.arange(0, NP)
        bests = tl.full((NP,), _NO_KEY, tl.int64)
        ranks = tl.zeros((NP,), tl.int32)
        best = tl.full((), 2**63 - 1, tl.int64)
        for i in range(n):
            best = tl.max(tl.where(key < best, key, _NO_KEY))
            bests = tl.where(column == i, best, bests)
            rank = tl.sum(((key >> 32) >= (best >> 32)).to(tl.int32))
            ranks = tl.where(column == i, rank, ranks)
        # Equals of the last may lie past the n best of a tile, but only where its n-th is one.
        last = best >> 32
        end = tl.load(keys + (row * TILES + tile) * n + (n - 1), mask=there, other=_NO_KEY)
        tail = tl.load(tails + row * TILES + tile, mask=there, other=0)
        whole = tl.sum(tl.where((end >> 32) == last, tail, 0))
        end = tl.load(keys + place // n * n + (n - 1), mask=some, other=_NO_KEY)
        whole += tl.sum(((end >> 32) < last) & ((key >> 32) >= last) & some).to(tl.int32)
        ranks = tl.where((bests >> 32) == last, whole, ranks)
        out = row * n + column
        x = value_of((bests >> 32).to(tl.int32), 0)
        tl.store(out_ids + out, (bests & _LOW) ^ _LOW, mask=column < n)
        tl.store(out_logprobs + out, (x - top) - norm, mask=column < n)
        tl.store(out_ranks + out, ranks.to(tl.int64), mask=column < n)


def token_logprobs(logits: Tensor, tokens: Tensor, n: int) -> TokenLogprobs:
    """As `specdec_kernels.token_logprobs`, for bfloat16, float16 and float32.

    Up to MOST ids take one read of the logits and scratch of a few numbers per tile; more take a
    sort of each row, with scratch of several times the logits.
    """
    rows, vocab = logits.shape
    device = logits.device
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    found = TokenLogprobs(
        logprob=torch.empty(rows, dtype=torch.float32, device=device),
        rank=torch.empty(rows, dtype=torch.int64, device=device),
        top_ids=torch.empty((rows, n), dtype=torch.int64, device=device),
        top_logprobs=torch.empty((rows, n), dtype=torch.float32, device=device),
        top_ranks=torch.empty((rows, n), dtype=torch.int64, device=device),
    )
    if not rows:
        return found
    tokens = tokens.contiguous()
    find = n if n <= MOST else 0
    sums = torch.empty((2, rows, tiles), dtype=torch.float32, device=device)
    counts = torch.empty((2, rows, tiles), dtype=torch.int32, device=device)
    keys = torch.empty((rows, tiles, max(find, 1)), dtype=torch.int64, device=device)
    norms = torch.empty((rows, 2), dtype=torch.float32, device=device)
    partials = sums[0], sums[1], counts[0], keys, counts[1]
    largest = largest_of(logits.dtype)
    tile_bests[(tiles * rows,)](
        logits, logits.stride(0), tokens, *partials, vocab, find, tiles,
        FIND=find > 0, TILE=tile, LARGEST_RAW=largest, num_warps=WARPS,
    )  # fmt: skip
    join_tiles[(rows,)](
        logits, logits.stride(0), tokens, *partials, *found, norms, vocab, find, tiles,
        FIND=find > 0, TP=triton.next_power_of_2(tiles), NP=triton.next_power_of_2(max(find, 1)),
        CP=triton.next_power_of_2(tiles * max(find, 1)), LARGEST_RAW=largest, num_warps=4,
    )  # fmt: skip
    if n == find:
        return found
    values = logits.to(torch.float32).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    # +inf became the largest float32; zeros of either sign are equal, for a sort by bits too
    ordered = values.clamp_(max=largest).add_(0.0).sort(dim=-1, descending=True, stable=True)
    top = ordered.values[:, :n]
    return found._replace(
        top_ids=ordered.indices[:, :n],
        top_logprobs=(top - norms[:, :1]) - norms[:, 1:],
        top_ranks=torch.searchsorted(ordered.values.neg(), top.neg(), right=True),
    )
