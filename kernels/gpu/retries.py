"""What follows where the first token drawn is not kept: the other attempts, the cut, a redraw.

The rows it is asked of are listed, so the work is spread evenly whichever they are. Two reads of
them: for the other attempts and for the cut (`survey`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.attempts import TESTED, UNKNOWN, WILD
from specdec_kernels.gpu.coupled import draw_row, drawn_ids, row_of
from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.noise import GROUP, REDRAW_TOKEN, TARGET_TOKEN, key
from specdec_kernels.gpu.rows import NOTHING, draw_group, scaled, tile_law
from specdec_kernels.gpu.survey import ORDINARY, row_cut, survey_tile, surveyed_top
from specdec_kernels.gpu.truncation import LEAST_P


@triton.jit
def retry_tiles(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots,
    streams, temperatures, top_ks, states, opened, opens,
    tops, scores, choices, totals, masses, numbers, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Of the tiles of rows left open: the winners of the other attempts, and the survey.

    scores, choices: [rows, TILES, ATTEMPTS] without the first. totals, masses, numbers: see
    `survey_tile`; `tops` too of TESTED rows.
    """
    GROUPS: tl.constexpr = TILE // GROUP
    for item in range(tl.program_id(0), tl.load(opened) * TILES, tl.num_programs(0)):
        at = tl.load(opens + item // TILES)
        tile = item % TILES
        state = tl.load(states + at)
        if state != WILD:
            row, slot, _active = row_of(
                at // (K + 1), at % (K + 1), logits_start, draft_tokens, draft_stride, slots,
                vocab, K, CHAINS, KP, False,
            )  # fmt: skip
            here = logits + row * row_stride
            temperature = tl.load(temperatures + slot)
            mine = row_edits(tables, at // (K + 1), at % (K + 1))
            out = at.to(tl.int64) * TILES + tile
            if state == UNKNOWN:
                lanes = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                _top, sums = tile_law(here, tile * TILE + lanes, vocab, temperature, mine)
                stream = tl.load(streams + slot)
                position = tl.load(positions + row)
                for attempt in range(1, ATTEMPTS):
                    a, b = key(stream, position, attempt, TARGET_TOKEN + 1)
                    score, group = draw_group(sums, a, b, tile, GROUPS)
                    tl.store(scores + out * ATTEMPTS + attempt, score)
                    tl.store(choices + out * ATTEMPTS + attempt, group)
            ids = tile * TILE + tl.arange(0, TILE)
            z = scaled(here, ids, ids < vocab, temperature, mine)
            top = tl.max(z)
            tl.store(tops + out, top)
            top_k = tl.load(top_ks + slot)
            survey_tile(z, top, (top_k > 0) & (top_k < vocab), out, totals, masses, numbers)


@triton.jit
def drawn_again(
    here, at, stream, position, temperature, attempt, tops, scores, choices, vocab, TILES, mine,
    ATTEMPTS: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Of one row: a later attempt's id (int64) and its log-weight."""
    one = tl.arange(0, 1)
    member, level, _top = drawn_ids(
        here + one, at + one, one == 0, stream, position + one, temperature, attempt,
        tops, scores, choices, vocab, TILES, mine, ATTEMPTS, TP,
    )  # fmt: skip
    return tl.sum(member), tl.sum(level)


@triton.jit
def settle_attempts(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots,
    streams, temperatures, top_ks, top_ps, min_ps, drawn, levels, states, opened, opens, cuts,
    tops, scores, choices, bounds, sums, numbers, listed, vocab, K, TILES, tables,
    CHAINS: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr,
    TILE: tl.constexpr, ATTEMPTS: tl.constexpr, SHARE: tl.constexpr, SHIFT: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """Of one row left open: the first attempt at or above its cut, else a draw from what is.

    Of a TESTED row the cut.
    """
    if tl.program_id(0) < tl.load(opened):
        at = tl.load(opens + tl.program_id(0))
        state = tl.load(states + at)
        row, slot, _active = row_of(
            at // (K + 1), at % (K + 1), logits_start, draft_tokens, draft_stride, slots,
            vocab, K, CHAINS, KP, False,
        )  # fmt: skip
        here = logits + row * row_stride
        temperature = tl.load(temperatures + slot)
        mine = row_edits(tables, at // (K + 1), at % (K + 1))
        top_k = tl.load(top_ks + slot)
        top_p = tl.maximum(tl.load(top_ps + slot), LEAST_P)
        stream = tl.load(streams + slot)
        position = tl.load(positions + row)
        token = tl.load(drawn + at)
        level = tl.load(levels + at)
        attempt = tl.where(state == WILD, 0, 1)
        settled = False
        if state == UNKNOWN:
            # most attempts lie outside the bracket, and need no cut
            searched = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
            if searched & (tl.abs(surveyed_top(at, tops, TILES, TP)) < ORDINARY):
                low = tl.load(bounds + at * 2)
                while (attempt < ATTEMPTS) & (level < low):
                    token, level = drawn_again(
                        here, at, stream, position, temperature, attempt, tops, scores, choices,
                        vocab, TILES, mine, ATTEMPTS, TP,
                    )  # fmt: skip
                    attempt += 1
                settled = (level >= low) & (level >= tl.load(bounds + at * 2 + 1))
        if settled == False:  # noqa: E712
            cut, top = row_cut(
                here, at, state == WILD, temperature, top_k, top_p, tl.load(min_ps + slot),
                tops, bounds, sums, numbers, listed, vocab, TILES, mine,
                TP, SHARE, TILE, SHIFT, LARGEST_RAW,
            )  # fmt: skip
            if state == TESTED:
                tl.store(cuts + at, cut)
                settled = True
            elif state == UNKNOWN:
                settled = level >= cut
            while (attempt < ATTEMPTS) & (settled == False):  # noqa: E712
                if state == WILD:
                    token, level = draw_row(
                        here, temperature, top, NOTHING, stream, position, attempt, TARGET_TOKEN,
                        vocab, mine, TILE,
                    )  # fmt: skip
                else:
                    token, level = drawn_again(
                        here, at, stream, position, temperature, attempt, tops, scores, choices,
                        vocab, TILES, mine, ATTEMPTS, TP,
                    )  # fmt: skip
                settled = level >= cut
                attempt += 1
            if settled == False:  # noqa: E712
                token, _level = draw_row(
                    here, temperature, top, cut, stream, position, 0, REDRAW_TOKEN,
                    vocab, mine, TILE,
                )  # fmt: skip
        if state != TESTED:
            tl.store(drawn + at, token)
