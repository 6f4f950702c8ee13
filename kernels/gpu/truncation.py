"""Min-p, top-k and top-p without sorting: is a token kept, and where is the cut.

A token is kept if less than top_p of the mass, and fewer than top_k ids, lie strictly above it: one
read of the row. Only rows whose first draw is not kept need the cut itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import (
    draw_row,
    drawn_ids,
    row_of,
    row_top,
    wild_rows,
    winning_tiles,
)
from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.noise import REDRAW_TOKEN, TARGET_TOKEN
from specdec_kernels.gpu.rows import (
    GREEDY,
    LARGEST,
    LOG2E,
    NOTHING,
    clean,
    cleaned,
    over_temperature,
    raw,
    reference_of,
    relative,
    scaled,
)

KEPT = tl.constexpr(0)
UNKNOWN = tl.constexpr(1)
WILD = tl.constexpr(2)
LEAST_P = tl.constexpr(1e-30)  # top-p of 0 keeps the likeliest

_WAYS = tl.constexpr(8)


@triton.jit
def order(x, SHIFT: tl.constexpr):
    """An int32 that compares as the float does; SHIFT drops bits that no value of x has."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(ordered, SHIFT: tl.constexpr):
    """The float with that order."""
    bits = ordered << SHIFT
    bits = tl.where(bits < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def log_weight(x, temperature):
    """What `cleaned` makes of a logit."""
    if temperature != 1.0:
        x = over_temperature(x, temperature)
    return clean(x, LARGEST)


@triton.jit
def largest_order(
    here, temperature, floor, top, target, low, high, vocab, mine,
    COUNT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """The largest order at or above which there is a weight of `target`; `low` if there is none.

    low, high: int64; the answer is in [low, high). Weights are relative to `top`, or 1 each with
    COUNT, and 0 below `floor`.
    """
    ways = tl.arange(0, _WAYS)
    while high - low > 1:
        step = (high - low + (_WAYS - 1)) // _WAYS
        at = tl.minimum(low + step * (ways + 1), high).to(tl.int32)
        sums = tl.zeros((_WAYS, TILE), tl.float32)
        for start in range(0, vocab, TILE):
            ids = start + tl.arange(0, TILE)
            x = raw(here, ids, ids < vocab, mine, LARGEST_RAW)
            z = cleaned(here, ids, ids < vocab, temperature, mine)
            weight = tl.exp2(relative(z, top))
            if COUNT:
                weight = tl.where(z == NOTHING, 0.0, 1.0)
            weight = tl.where(z < floor, 0.0, weight)
            sums += tl.where(order(x, SHIFT)[None, :] >= at[:, None], weight[None, :], 0.0)
        passed = tl.sum((tl.sum(sums, axis=1) >= target).to(tl.int64))
        high = tl.minimum(high, low + step * (passed + 1))
        low = low + step * passed
        low = tl.minimum(low, high - 1)
    return low


@triton.jit
def weight_from(here, temperature, floor, top, vocab, mine, TILE: tl.constexpr):
    """The sum of weights, relative to `top`, at or above `floor`; as `largest_order` sums them."""
    sums = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        z = cleaned(here, ids, ids < vocab, temperature, mine)
        sums += tl.where(z < floor, 0.0, tl.exp2(relative(z, top)))
    return tl.sum(sums)


@triton.jit
def find_cut(
    here, temperature, top, min_p, top_k, top_p, vocab, mine,
    SHIFT: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """The smallest log-weight that min-p, then top-k, then top-p keep. top: the row's largest."""
    cut = min_p_floor(top, min_p)
    lowest = order(tl.full((), NOTHING, tl.float32), SHIFT).to(tl.int64)
    highest = order(tl.full((), LARGEST_RAW, tl.float32), SHIFT).to(tl.int64) + 1
    if (top_k > 0) & (top_k < vocab):
        found = largest_order(
            here, temperature, cut, top, top_k.to(tl.float32), lowest, highest, vocab, mine,
            True, SHIFT, TILE, LARGEST_RAW,
        )  # fmt: skip
        cut = tl.maximum(cut, log_weight(value_of(found.to(tl.int32), SHIFT), temperature))
    if top_p < 1:
        whole = weight_from(here, temperature, cut, top, vocab, mine, TILE)
        found = largest_order(
            here, temperature, cut, top, top_p * whole, lowest, highest, vocab, mine,
            False, SHIFT, TILE, LARGEST_RAW,
        )  # fmt: skip
        cut = tl.maximum(cut, log_weight(value_of(found.to(tl.int32), SHIFT), temperature))
    return cut


@triton.jit
def first_draws(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots,
    streams, temperatures, top_ks, top_ps, min_ps, tops, scores, choices,
    drawn, attempts, levels, row_tops, states, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TP: tl.constexpr,
    ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Of one row: the token of each attempt and its log-weight, and whether it truncates.

    drawn: int64 [rows], the greedy token, or the first attempt's. attempts, levels: int64, float32
    [rows, ATTEMPTS]; only of rows that truncate, where `states` is UNKNOWN.
    """
    at = tl.program_id(1) * (K + 1) + tl.program_id(0)
    row, slot, active = row_of(
            tl.program_id(1), tl.program_id(0), logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, LAST,
        )  # fmt: skip
    one = tl.arange(0, 1)
    there = one == 0
    state = KEPT
    if active:
        temperature = tl.load(temperatures + slot)
        if temperature < GREEDY:
            _, choice = winning_tiles(
                at + one, there, True, 0, tops, scores, choices, TILES, ATTEMPTS, TP
            )
            tl.store(drawn + at + one, choice.to(tl.int64))
        else:
            here = logits + row * row_stride + one
            mine = row_edits(tables, tl.program_id(1), tl.program_id(0))
            stream = tl.load(streams + slot)
            position = tl.load(positions + row) + one
            token, level, top = drawn_ids(
                here, at + one, there, stream, position, temperature, 0,
                tops, scores, choices, vocab, TILES, mine, ATTEMPTS, TP,
            )  # fmt: skip
            tl.store(drawn + at + one, token)
            top_k = tl.load(top_ks + slot)
            by_k = (top_k > 0) & (top_k < vocab)
            if tl.max(wild_rows(at + one, there, scores, TILES, ATTEMPTS, TP).to(tl.int32)) > 0:
                state = WILD
            elif by_k | (tl.load(top_ps + slot) < 1) | (tl.load(min_ps + slot) > 0):
                state = UNKNOWN
                tl.store(row_tops + at + one, top)
                tl.store(attempts + at * ATTEMPTS + one, token)
                tl.store(levels + at * ATTEMPTS + one, level)
                for attempt in tl.static_range(1, ATTEMPTS):
                    token, level, top = drawn_ids(
                        here, at + one, there, stream, position, temperature, attempt,
                        tops, scores, choices, vocab, TILES, mine, ATTEMPTS, TP,
                    )  # fmt: skip
                    tl.store(attempts + at * ATTEMPTS + attempt + one, token)
                    tl.store(levels + at * ATTEMPTS + attempt + one, level)
    else:
        tl.store(drawn + at, -1)
    tl.store(states + at, state)


@triton.jit
def mass_above(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots,
    temperatures, top_ks, min_ps, levels, row_tops, states, above, counts, kept, vocab, K, TILES,
    tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
    ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row: the mass and the number of ids above each attempt's token.

    above, counts: float32, int32 [rows, TILES, ATTEMPTS]; counts only where top-k is asked for.
    kept: float32 [rows, TILES], the mass in all that min-p keeps.
    """
    tile = tl.program_id(0)
    at = tl.program_id(2) * (K + 1) + tl.program_id(1)
    if tl.load(states + at) == UNKNOWN:
        row, slot, _active = row_of(
            tl.program_id(2), tl.program_id(1), logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, LAST,
        )  # fmt: skip
        ids = tile * TILE + tl.arange(0, TILE)
        mine = row_edits(tables, tl.program_id(2), tl.program_id(1))
        temperature = tl.load(temperatures + slot)
        z = scaled(logits + row * row_stride, ids, ids < vocab, temperature, mine)
        top = tl.load(row_tops + at)
        weight = tl.exp2(z * LOG2E - reference_of(top))
        floor = min_p_floor(top, tl.load(min_ps + slot))
        top_k = tl.load(top_ks + slot)
        by_k = (top_k > 0) & (top_k < vocab)
        out = at.to(tl.int64) * TILES + tile
        tl.store(kept + out, tl.sum(tl.where(z < floor, 0.0, weight)))
        for attempt in tl.static_range(ATTEMPTS):
            higher = z > tl.load(levels + at * ATTEMPTS + attempt)
            tl.store(above + out * ATTEMPTS + attempt, tl.sum(tl.where(higher, weight, 0.0)))
            if by_k:
                tl.store(counts + out * ATTEMPTS + attempt, tl.sum(higher.to(tl.int32)))


@triton.jit
def min_p_floor(top, min_p):
    """The log-weight of an id `min_p` times as likely as the likeliest."""
    return tl.where(min_p > 0, top + tl.log(tl.where(min_p > 0, min_p, 1.0)), NOTHING)


@triton.jit
def settle_attempts(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots,
    streams, temperatures, top_ks, top_ps, min_ps, drawn, attempts, levels, row_tops, states,
    above, counts, kept, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TP: tl.constexpr,
    TILE: tl.constexpr, ATTEMPTS: tl.constexpr, SHIFT: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """Of one row that truncates: the first attempt that is kept, else a draw from what is."""
    at = tl.program_id(1) * (K + 1) + tl.program_id(0)
    state = tl.load(states + at)
    if state != KEPT:
        row, slot, _active = row_of(
            tl.program_id(1), tl.program_id(0), logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, LAST,
        )  # fmt: skip
        here = logits + row * row_stride
        mine = row_edits(tables, tl.program_id(1), tl.program_id(0))
        stream = tl.load(streams + slot)
        position = tl.load(positions + row)
        temperature = tl.load(temperatures + slot)
        top_k = tl.load(top_ks + slot)
        top_p = tl.maximum(tl.load(top_ps + slot), LEAST_P)
        min_p = tl.load(min_ps + slot)
        by_k = (top_k > 0) & (top_k < vocab)
        top = tl.load(row_tops + at)
        cut = tl.full((), NOTHING, tl.float32)
        cut_known = state == WILD
        if cut_known:
            top = row_top(here, temperature, vocab, mine, TILE)
            cut = find_cut(
                here, temperature, top, min_p, top_k, top_p, vocab, mine, SHIFT, TILE, LARGEST_RAW
            )
        floor = min_p_floor(top, min_p)
        tiles = tl.arange(0, TP)
        there = (tiles < TILES) & (state == UNKNOWN)
        place = at.to(tl.int64) * TILES + tiles
        whole = tl.sum(tl.load(kept + place, mask=there, other=0.0))
        token = tl.full((), 0, tl.int64)
        settled = False
        attempt = 0
        while (attempt < ATTEMPTS) & (settled == False):  # noqa: E712
            if state == WILD:
                token, level = draw_row(
                    here, temperature, top, NOTHING, stream, position, attempt, TARGET_TOKEN,
                    vocab, mine, TILE,
                )  # fmt: skip
                settled = level >= cut
            else:
                token = tl.load(attempts + at * ATTEMPTS + attempt)
                level = tl.load(levels + at * ATTEMPTS + attempt)
                which = place * ATTEMPTS + attempt
                mass = tl.sum(tl.load(above + which, mask=there, other=0.0))
                count = tl.sum(tl.load(counts + which, mask=there & by_k, other=0))
                # above top_p of the whole is all the more above top_p of what top-k leaves of it
                lost = (level < floor) | (by_k & (count >= top_k))
                lost = lost | ((top_p < 1) & (mass >= top_p * whole))
                if (lost == False) & by_k & (top_p < 1):  # noqa: E712
                    if cut_known == False:  # noqa: E712
                        cut = find_cut(
                            here, temperature, top, min_p, top_k, top_p, vocab, mine,
                            SHIFT, TILE, LARGEST_RAW,
                        )  # fmt: skip
                        cut_known = True
                    lost = level < cut
                settled = lost == False  # noqa: E712
            attempt += 1
        if settled == False:  # noqa: E712
            if cut_known == False:  # noqa: E712
                cut = find_cut(
                    here, temperature, top, min_p, top_k, top_p, vocab, mine,
                    SHIFT, TILE, LARGEST_RAW,
                )  # fmt: skip
            token, _level = draw_row(
                here, temperature, top, cut, stream, position, 0, REDRAW_TOKEN, vocab, mine, TILE
            )
        tl.store(drawn + at, token)
