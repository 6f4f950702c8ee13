"""The cut of a row in two reads of it by all its tiles, without sorting.

The first read sums what lies at or above a few levels (`survey_tile`). The level that the cut must
lie below and the one that it must reach are known then (`bracket`), and the second read lists the
few log-weights between them and sums the rest (`collect_tiles`). One program finds the cut among
those (`row_cut`), with all sums at hand to see whether it is there. Where it is not, or the list
overflows, or the row is wild, `find_cut` searches the row alone.

Lists and sums are per tile and joined in the order of the tiles, so a cut depends on its row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import row_of, row_top
from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.rows import (
    INFINITE,
    LOG2E,
    NOTHING,
    loaded,
    over_temperature,
    reference_of,
)
from specdec_kernels.gpu.truncation import (
    LEAST_P,
    find_cut,
    log_weight,
    min_p_floor,
    order,
    value_of,
)

LEVELS = tl.constexpr(10)
_SPAN = tl.constexpr(16)  # a power of two, LEVELS at least
_STEP = tl.constexpr(1.5)  # between levels, in log-weights
# What a row may list, at most; the tiles share it evenly.
ROOM = 16384
# So much of a tile's share is looked at first: that is all there is where the law is peaked.
_FEW = tl.constexpr(32)
# Levels of larger log-weights run together.
ORDINARY = tl.constexpr(1e6)
_SLACK = tl.constexpr(1e-5)  # of all mass: what sums of different order may differ by


@triton.jit
def _rung(top):
    """The highest level not above `top`, in steps: tiles of any top share their levels."""
    return tl.floor(tl.div_rn(top, _STEP))


@triton.jit
def survey_tile(z, top, by_k, out, totals, masses, counts):
    """Store a tile's mass, and what of it (with by_k: how many ids) is at or above each level.

    top: the tile's largest log-weight, which masses are relative to and levels start at.
    """
    weight = tl.exp2(z * LOG2E - reference_of(top))
    rung = _rung(top)
    tl.store(totals + out, tl.sum(weight))
    for level in range(LEVELS):
        reached = z >= (rung - level) * _STEP
        tl.store(masses + out * LEVELS + level, tl.sum(tl.where(reached, weight, 0.0)))
    if by_k:
        for level in range(LEVELS):
            reached = z >= (rung - level) * _STEP
            tl.store(counts + out * LEVELS + level, tl.sum(reached.to(tl.int32)))


@triton.jit
def surveyed_top(at, tops, TILES, TP: tl.constexpr):
    """The largest log-weight of a row."""
    tiles = tl.arange(0, TP)
    place = at.to(tl.int64) * TILES + tiles
    return tl.max(tl.load(tops + place, mask=tiles < TILES, other=NOTHING))


@triton.jit
def bracket(at, top, floor, top_k, top_p, by_k, tops, totals, masses, counts, TILES,
            TP: tl.constexpr):  # fmt: skip
    """Log-weights (low, high) of a row, as its survey has it: low <= cut < high.

    With top-k high is infinite if top-p comes after it, which needs all that top-k leaves. Where
    min-p alone asks both are infinite: the cut is `floor`.
    """
    tiles = tl.arange(0, TP)
    there = tiles < TILES
    place = at.to(tl.int64) * TILES + tiles
    tile_top = tl.load(tops + place, mask=there, other=NOTHING)
    level = tl.arange(0, _SPAN)
    used = level < LEVELS
    rung = _rung(top)
    levels = (rung - level) * _STEP
    # a tile whose largest is lower starts so many levels further down
    own = level[None, :] - (rung - _rung(tile_top))[:, None]
    known = there[:, None] & used[None, :] & (own >= 0) & (own < LEVELS)
    which = place[:, None] * LEVELS + tl.where(known, own, 0.0).to(tl.int32)
    above = tl.where(tile_top == NOTHING, NOTHING, reference_of(tile_top) - reference_of(top))
    scale = tl.exp2(above)
    mass = tl.sum(tl.load(masses + which, mask=known, other=0.0) * scale[:, None], axis=0)
    # what min-p leaves lies between the masses at the levels next to its floor
    most = tl.sum(tl.load(totals + place, mask=there, other=0.0) * scale)
    least = tl.max(tl.where(used & (levels >= floor), mass, 0.0))
    least = tl.where(floor == NOTHING, most, tl.maximum(least, 1.0))
    most = tl.minimum(most, tl.min(tl.where(used & (levels <= floor), mass, INFINITE)))
    most = tl.maximum(most, least)
    below = tl.sum((used & (mass < top_p * least)).to(tl.int32))
    short = tl.sum((used & (mass < top_p * most)).to(tl.int32))
    if by_k:
        count = tl.sum(tl.load(counts + which, mask=known, other=0), axis=0)
        short = tl.sum((used & (count < top_k)).to(tl.int32))
        below = tl.where(top_p < 1, 0, short)
    high = tl.where(below > 0, (rung - (below - 1)) * _STEP, INFINITE)
    low = tl.where(short < LEVELS, (rung - short) * _STEP, NOTHING)
    low = tl.maximum(low, floor)
    neither = (by_k == False) & (top_p >= 1)  # noqa: E712
    return tl.where(neither, INFINITE, low), tl.where(neither, INFINITE, high)


@triton.jit
def collect_tiles(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots,
    temperatures, top_ks, top_ps, min_ps, opened, opens, tops, totals, masses, counts,
    bounds, sums, numbers, listed, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Of the tiles of rows in `opens`: what lies within the bracket of its cut, and sums.

    bounds: float32 [rows, 2], the bracket. listed: [rows, TILES, SHARE], the logits of what lies
    within it, in a dtype that holds them all. numbers: int32 [rows, TILES, 2], how many they are,
    which may be more than SHARE, and how many lie above (only where top-k asks). sums: float32
    [rows, TILES, 2], the mass above it, and all that min-p leaves, relative to the row's largest.
    """
    for item in range(tl.program_id(0), tl.load(opened) * TILES, tl.num_programs(0)):
        at = tl.load(opens + item // TILES)
        tile = item % TILES
        row, slot, _active = row_of(
            at // (K + 1), at % (K + 1), logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, False,
        )  # fmt: skip
        here = logits + row * row_stride
        mine = row_edits(tables, at // (K + 1), at % (K + 1))
        temperature = tl.load(temperatures + slot)
        top_k = tl.load(top_ks + slot)
        by_k = (top_k > 0) & (top_k < vocab)
        top = surveyed_top(at, tops, TILES, TP)
        floor = min_p_floor(top, tl.load(min_ps + slot))
        low, high = bracket(
            at, top, floor, top_k, tl.maximum(tl.load(top_ps + slot), LEAST_P), by_k,
            tops, totals, masses, counts, TILES, TP,
        )  # fmt: skip
        if tile == 0:
            tl.store(bounds + at * 2, low)
            tl.store(bounds + at * 2 + 1, high)
        out = at.to(tl.int64) * TILES + tile
        ids = tile * TILE + tl.arange(0, TILE)
        x = loaded(here, ids, ids < vocab, mine)
        z = x
        if temperature != 1.0:
            z = over_temperature(x, temperature)
        weight = tl.exp2(z * LOG2E - reference_of(top))
        tl.store(sums + out * 2, tl.sum(tl.where(z >= high, weight, 0.0)))
        tl.store(sums + out * 2 + 1, tl.sum(tl.where(z < floor, 0.0, weight)))
        if by_k:
            tl.store(numbers + out * 2 + 1, tl.sum((z >= high).to(tl.int32)))
        within = (z >= low) & (z < high) & (z > NOTHING)
        number = tl.sum(within.to(tl.int32))
        tl.store(numbers + out * 2, number)
        if number > 0:
            place = tl.cumsum(within.to(tl.int32)) - 1
            tl.store(listed + out * SHARE + place, x, mask=within & (place < SHARE))


@triton.jit
def _lowest_reaching(keys, weights, target):
    """Of keys [N], int32: the largest at or above which there is a weight of `target`.

    Keys without weight do not count. The smallest of the others where there is less than that.
    """
    some = weights > 0
    low = tl.min(tl.where(some, keys, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(some, keys, -0x80000000)).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0)) >= target:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def listed_cut(
    at, temperature, top, low, floor, above, kept, higher, top_k, top_p, by_k, numbers, listed,
    TILES, TP: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The cut of a row among what it lists, WIDTH of a tile at most; and whether it is there.

    above, kept: the mass above the bracket, and what min-p leaves. higher: ids above the bracket.
    """
    index = tl.arange(0, TP * WIDTH)
    tile = index // WIDTH
    place = at.to(tl.int64) * TILES + tile
    number = tl.load(numbers + place * 2, mask=tile < TILES, other=0)
    real = index % WIDTH < number
    x = tl.load(listed + place * SHARE + index % WIDTH, mask=real, other=NOTHING).to(tl.float32)
    z = log_weight(x, temperature)
    keys = order(x, SHIFT)
    inside = tl.sum(real.to(tl.int32))
    cut = floor
    good = inside > 0
    if by_k:
        missing = (top_k - higher).to(tl.float32)
        enough = inside >= missing
        good = (missing > 0) & (enough | (low <= floor))
        if good & enough & (inside > 0):
            found = _lowest_reaching(keys, tl.where(real, 1.0, 0.0), missing)
            cut = tl.maximum(cut, log_weight(value_of(found, SHIFT), temperature))
    if top_p < 1:
        weight = tl.exp2(z * LOG2E - reference_of(top))
        weight = tl.where(z < cut, 0.0, weight)
        mass = tl.sum(weight)
        whole = tl.where(by_k, mass, kept)
        target = top_p * whole - tl.where(by_k, 0.0, above)
        reached = (target > 0) & (mass > 0) & (mass >= target - whole * _SLACK)
        good = good & reached
        if good:
            found = _lowest_reaching(keys, weight, target)
            cut = tl.maximum(cut, log_weight(value_of(found, SHIFT), temperature))
    return cut, good


@triton.jit
def row_cut(
    here, at, wild, temperature, top_k, top_p, min_p, tops, bounds, sums, numbers, listed,
    vocab, TILES, mine,
    TP: tl.constexpr, SHARE: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """Of a row that `collect_tiles` went through, or that is known to be wild: its cut and top.

    A row that excludes all ids, and tells so, has no cut.
    """
    tiles = tl.arange(0, TP)
    there = (tiles < TILES) & (wild == False)  # noqa: E712
    place = (at.to(tl.int64) * TILES + tiles) * 2
    by_k = (top_k > 0) & (top_k < vocab)
    above = tl.sum(tl.load(sums + place, mask=there, other=0.0))
    kept = tl.sum(tl.load(sums + place + 1, mask=there, other=0.0))
    most = tl.max(tl.load(numbers + place, mask=there, other=0))
    higher = tl.sum(tl.load(numbers + place + 1, mask=there & by_k, other=0))
    top = tl.max(tl.load(tops + place // 2, mask=there, other=NOTHING))
    low = tl.full((), NOTHING, tl.float32)
    high = tl.full((), INFINITE, tl.float32)
    wild = wild | (kept != kept)
    floor = min_p_floor(top, min_p)
    cut = floor
    good = wild == False  # noqa: E712
    if good & (top > NOTHING) & (by_k | (top_p < 1)):
        low = tl.load(bounds + at * 2)
        high = tl.load(bounds + at * 2 + 1)
        if (most <= _FEW) & (most <= SHARE):
            cut, good = listed_cut(
                at, temperature, top, low, floor, above, kept, higher, top_k, top_p, by_k, numbers,
                listed, TILES, TP, SHARE, _FEW if SHARE > _FEW else SHARE, SHIFT,
            )  # fmt: skip
        elif most <= SHARE:
            cut, good = listed_cut(
                at, temperature, top, low, floor, above, kept, higher, top_k, top_p, by_k, numbers,
                listed, TILES, TP, SHARE, SHARE, SHIFT,
            )  # fmt: skip
        else:
            good = most < 0
    if good == False:  # noqa: E712
        # an overflow says nothing against the bracket; whatever else is wrong may be its fault
        bounded = (wild == False) & (most > SHARE) & (tl.abs(top) < ORDINARY)  # noqa: E712
        low = tl.where(bounded, low, NOTHING)
        high = tl.where(bounded, high, INFINITE)
        if wild:
            top = row_top(here, temperature, vocab, mine, TILE)
        cut = find_cut(
            here, temperature, top, min_p, top_k, top_p, low, high, vocab, mine,
            SHIFT, TILE, LARGEST_RAW,
        )  # fmt: skip
    return cut, top
