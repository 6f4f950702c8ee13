"""Drafts from the likeliest ids of a row alone, for the kernels of `draft`.

Two launches: `draft_candidates` leaves the likeliest ids of every tile, and `settle_candidates`
draws from the likeliest of those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.noise import GROUP, gumbel, key, word
from specdec_kernels.gpu.rows import GREEDY, LOG2E, NOTHING, cleaned, finite, raw
from specdec_kernels.gpu.truncation import order

# A program compares each of them with each other, to see which share a group.
MOST_CANDIDATES = 128

_NOTHING_LEFT = tl.constexpr(-(2**63))
_LOW = tl.constexpr(2**32 - 1)
_NO_GROUP = tl.constexpr(2**31 - 1)


@triton.jit
def draft_candidates(
    logits, row_stride, slots, temperatures, keys, vocab, TILES,
    ARGMAX: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One tile of one row: its C largest log-weights (of a greedy row: the largest logit).

    keys: int64 [B, TILES, CP], which compare as the weights do and then as the lower id.
    """
    tile = tl.program_id(0) % TILES
    request = (tl.program_id(0) // TILES).to(tl.int64)
    slot = tl.load(slots + request)
    if slot >= 0:
        here = logits + request * row_stride
        ids = tile * TILE + tl.arange(0, TILE)
        temperature = tl.load(temperatures + slot)
        if ARGMAX | (temperature < GREEDY):
            x = raw(here, ids, ids < vocab, None, LARGEST_RAW)
            count = 1
        else:
            x = cleaned(here, ids, ids < vocab, temperature, None)
            count = C
        high = order(x, 0).to(tl.int64) << 32
        left = tl.where(ids < vocab, high | (_LOW - ids.to(tl.int64)), _NOTHING_LEFT)
        out = keys + (request * TILES + tile) * CP
        for i in range(0, count):
            best = tl.max(left)
            tl.store(out + i, best)
            left = tl.where(left == best, _NOTHING_LEFT, left)


@triton.jit(do_not_specialize=["index", "column"])
def settle_candidates(
    logits, row_stride, positions, slots, streams, temperatures, targets, keys,
    lse, lse_stride, lse_step, tokens,
    out_ids, ids_stride, ids_step, ids_lane, out_logits, logits_stride, logits_step, logits_lane,
    TILES, index, column,
    MAPPED: tl.constexpr, ARGMAX: tl.constexpr, DOMAIN: tl.constexpr, LSE: tl.constexpr,
    TP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """One row: its C likeliest ids, and its draft among them."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    token = tl.full((), -1, tl.int64)
    if slot >= 0:
        temperature = tl.load(temperatures + slot)
        greedy = ARGMAX | (temperature < GREEDY)
        count = tl.where(greedy, 1, C)
        place = tl.arange(0, TP * CP)
        full = (place < TILES * CP) & (place % CP < count)
        left = tl.load(keys + request * TILES * CP + place, mask=full, other=_NOTHING_LEFT)
        lane = tl.arange(0, CP)
        chosen = tl.full((CP,), _NOTHING_LEFT, tl.int64)
        for i in range(0, count):
            best = tl.max(left)
            chosen = tl.where(lane == i, best, chosen)
            left = tl.where(left == best, _NOTHING_LEFT, left)
        there = chosen != _NOTHING_LEFT
        id = tl.where(there, _LOW - (chosen & _LOW), 0)
        target = id
        if MAPPED:
            target = tl.load(targets + id)
        if greedy:
            token = tl.sum(tl.where(lane == 0, target, 0))
        else:
            here = logits + request * row_stride + id
            x = cleaned(here, lane * 0, there, temperature, None)
            there = x > NOTHING
            top = finite(tl.max(x))
            weight = tl.exp2((x - top) * LOG2E)
            stream = tl.load(streams + slot)
            position = tl.load(positions + request)
            group = tl.where(there, (target // GROUP).to(tl.int32), -1)
            same = group[:, None] == group[None, :]
            mass = tl.sum(tl.where(same, weight[None, :], 0.0), axis=1)
            some = there & (mass > 0)
            a, b = key(stream, position, index, DOMAIN + 1)
            score = tl.log2(tl.where(some, mass, 1.0)) + gumbel(word(a, b, group)) * LOG2E
            score = tl.where(some, score, NOTHING)
            won = some & (score == tl.max(score))
            group_won = tl.min(tl.where(won, group, _NO_GROUP))
            among = there & (group == group_won)
            a, b = key(stream, position, index, DOMAIN)
            score = tl.where(among, x - top + gumbel(word(a, b, target)), NOTHING)
            won = among & (score == tl.max(score))
            token = tl.min(tl.where(won, target, _LOW))
            token = tl.where(token == _LOW, 0, token)
            out = out_ids + slot * ids_stride + column * ids_step + lane * ids_lane
            tl.store(out, tl.where(there, target, -1), mask=lane < C)
            out = out_logits + slot * logits_stride + column * logits_step + lane * logits_lane
            value = tl.load(here, mask=there, other=NOTHING)
            tl.store(out, value, mask=lane < C)
            if LSE:
                total = tl.sum(weight)
                value = tl.max(x) + tl.log(tl.where(total > 0, total, 1.0))
                tl.store(lse + slot * lse_stride + column * lse_step, value)
    tl.store(tokens + request, token)
