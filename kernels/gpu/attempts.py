"""Min-p, top-k and top-p by attempts: is the first token drawn kept.

It is if less than top_p of the mass, and fewer than top_k ids, lie strictly above it: one read of
the row, which settles most rows. `open_rows` lists the others for `retries`, and so it does with
rows whose cut is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import drawn_ids, row_of, tiles_of, wild_rows, winning_tiles
from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.rows import (
    GREEDY,
    INFINITE,
    LOG2E,
    NOTHING,
    chain_length,
    reference_of,
    scaled,
)
from specdec_kernels.gpu.truncation import LEAST_P, min_p_floor

KEPT = tl.constexpr(0)
UNKNOWN = tl.constexpr(1)
WILD = tl.constexpr(2)
TESTED = tl.constexpr(3)  # only its cut is asked for


@triton.jit
def first_draws(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots,
    streams, temperatures, top_ks, top_ps, min_ps, tops, scores, choices,
    drawn, levels, row_tops, states, cuts, opened, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TP: tl.constexpr,
    CUTS: tl.constexpr,
):  # fmt: skip
    """Of one row: the token of the first attempt and its log-weight, and whether it truncates.

    drawn: int64 [rows], the greedy token, or the first attempt's. levels, row_tops: float32 [rows],
    its log-weight and the largest; only of rows that truncate, where `states` is UNKNOWN.
    CUTS: rows that LAST leaves out are TESTED if they truncate, and have no cut in `cuts` if not.
    opened: int32 [1], becomes 0.
    """
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(opened, 0)
    at = tl.program_id(1) * (K + 1) + tl.program_id(0)
    row, slot, active = row_of(
        tl.program_id(1), tl.program_id(0), logits_start, draft_tokens, draft_stride, slots,
        vocab, K, CHAINS, KP, LAST,
    )  # fmt: skip
    one = tl.arange(0, 1)
    there = one == 0
    state = KEPT
    asked = slot >= 0
    if asked:
        top_k = tl.load(top_ks + slot)
        asked = (top_k > 0) & (top_k < vocab)
        asked = asked | (tl.load(top_ps + slot) < 1) | (tl.load(min_ps + slot) > 0)
        asked = asked & (tl.load(temperatures + slot) >= GREEDY)
    if active:
        temperature = tl.load(temperatures + slot)
        if temperature < GREEDY:
            _, choice = winning_tiles(at + one, there, True, 0, tops, scores, choices, TILES, 1, TP)
            tl.store(drawn + at + one, choice.to(tl.int64))
        else:
            here = logits + row * row_stride + one
            mine = row_edits(tables, tl.program_id(1), tl.program_id(0))
            token, level, top = drawn_ids(
                here, at + one, there, tl.load(streams + slot), tl.load(positions + row) + one,
                temperature, 0, tops, scores, choices, vocab, TILES, mine, 1, TP,
            )  # fmt: skip
            tl.store(drawn + at + one, token)
            if tl.max(wild_rows(at + one, there, scores, TILES, 1, TP).to(tl.int32)) > 0:
                state = WILD
            elif asked:
                state = UNKNOWN
                tl.store(row_tops + at + one, top)
                tl.store(levels + at + one, level)
    else:
        tl.store(drawn + at, -1)
        if CUTS:
            _row, _slot, tested = row_of(
                tl.program_id(1), tl.program_id(0), logits_start, draft_tokens, draft_stride, slots,
                vocab, K, CHAINS, KP, False,
            )  # fmt: skip
            if tested & asked:
                state = TESTED
            else:
                tl.store(cuts + at, NOTHING)
    tl.store(states + at, state)


@triton.jit
def mass_above(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots,
    temperatures, top_ks, min_ps, levels, row_tops, states, above, counts, kept, vocab, K, TILES,
    tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row: the mass and the number of ids above the first attempt's token.

    above, counts: float32, int32 [rows, TILES]; counts only where top-k is asked for.
    kept: float32 [rows, TILES], the mass in all that min-p keeps.
    """
    tile = tl.program_id(0)
    # what was read last for its draw is read first here, while the cache still holds it
    request = tl.num_programs(2) - 1 - tl.program_id(2)
    local = tl.program_id(1)
    at = request * (K + 1) + local
    if tl.load(states + at) == UNKNOWN:
        row, slot, _active = row_of(
            request, local, logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, LAST,
        )  # fmt: skip
        ids = tile * TILE + tl.arange(0, TILE)
        mine = row_edits(tables, request, local)
        temperature = tl.load(temperatures + slot)
        z = scaled(logits + row * row_stride, ids, ids < vocab, temperature, mine)
        top = tl.load(row_tops + at)
        weight = tl.exp2(z * LOG2E - reference_of(top))
        floor = min_p_floor(top, tl.load(min_ps + slot))
        top_k = tl.load(top_ks + slot)
        out = at.to(tl.int64) * TILES + tile
        tl.store(kept + out, tl.sum(tl.where(z < floor, 0.0, weight)))
        higher = z > tl.load(levels + at)
        tl.store(above + out, tl.sum(tl.where(higher, weight, 0.0)))
        if (top_k > 0) & (top_k < vocab):
            tl.store(counts + out, tl.sum(higher.to(tl.int32)))


@triton.jit
def left_open(
    at, active, top, level, top_k, top_p, min_p, above, counts, kept, vocab, TILES,
    TP: tl.constexpr,
):  # fmt: skip
    """Which rows' first attempts are not kept, or not surely; all [N], but for the parameters."""
    place, there = tiles_of(at, active, TILES, TP)
    by_k = (top_k > 0) & (top_k < vocab)
    whole = tl.sum(tl.load(kept + place, mask=there, other=0.0), axis=1)
    mass = tl.sum(tl.load(above + place, mask=there, other=0.0), axis=1)
    count = tl.sum(tl.load(counts + place, mask=there & by_k, other=0), axis=1)
    most = tl.where(by_k, top_k, 1)  # without top-k nothing is counted
    lost = (level < min_p_floor(top, min_p)) | (count >= most)
    # Above top_p of the whole is all the more above top_p of what top-k leaves of it. That is not
    # known yet, but has this token and all above it.
    own = tl.exp2(level * LOG2E - reference_of(top))
    share = tl.where(top_p < 1, top_p, INFINITE)
    lost = lost | (mass >= share * tl.where(by_k, mass + own, whole))
    return (top > NOTHING) & lost


@triton.jit
def open_rows(
    logits_start, draft_tokens, draft_stride, slots, top_ks, top_ps, min_ps, drawn, levels,
    row_tops, states, above, counts, kept, opened, opens, vocab, K, TILES,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Of one request: list its rows that are left open.

    opened: int32 [1], how many rows of the call are. opens: int32 [rows], which; in any order, on
    which nothing depends. Rows after one whose draft is surely refused are left out, unless they
    are asked for one by one.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if slot >= 0:
        column = tl.arange(0, KP)
        there = column <= K
        at = request * (K + 1) + column
        state = tl.load(states + at, mask=there, other=KEPT)
        tried = state == UNKNOWN
        top_k = tl.load(top_ks + slot)
        lost = left_open(
            at, tried, tl.load(row_tops + at, mask=tried, other=0.0),
            tl.load(levels + at, mask=tried, other=0.0), top_k,
            tl.maximum(tl.load(top_ps + slot), LEAST_P), tl.load(min_ps + slot),
            above, counts, kept, vocab, TILES, TP,
        )  # fmt: skip
        unsettled = (state == TESTED) | (state == WILD) | (tried & lost)
        if CHAINS and not LAST:
            _first, length = chain_length(
                logits_start, draft_tokens, draft_stride, request, vocab, K, KP
            )
            tested = column < length
            draft = tl.load(draft_tokens + request * draft_stride + column, mask=tested, other=-1)
            token = tl.load(drawn + at, mask=tested, other=-1)
            refused = tested & (token != draft) & (unsettled == False)  # noqa: E712
            unsettled = unsettled & (column < tl.min(tl.where(refused, column, KP)))
        number = tl.sum(unsettled.to(tl.int32))
        if number > 0:
            place = tl.atomic_add(opened, number) + tl.cumsum(unsettled.to(tl.int32)) - 1
            tl.store(opens + place, at, mask=unsettled)
