"""Rules that compare laws: standard, block and synthetic, with dense, sparse or one-hot q.

Every tested row, and its q row where q is dense, is read once for its sum; `settle_tests` then
knows which drafts are kept. Only the row whose draft is refused is read again, with its q row, for
the residual. Block reads the rows after the first once more before it decides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import (
    chosen_tokens,
    drawn_tile,
    empty_rows,
    greedy_tile,
    winning_tiles,
)
from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.laws import GIVEN, NO_Q, ROWS, tested_laws
from specdec_kernels.gpu.noise import ACCEPT, key, unit, word
from specdec_kernels.gpu.rows import (
    GREEDY,
    INFINITE,
    LOG2E,
    NOTHING,
    chain_length,
    reference_of,
    scaled,
)

STANDARD = tl.constexpr(0)
BLOCK = tl.constexpr(1)
SYNTHETIC = tl.constexpr(2)


@triton.jit
def test_statistics(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, cuts, q_logits, q_slot, q_column, lse, lse_slot, lse_column,
    tops, scores, choices, totals, q_tops, q_totals, vocab, q_vocab, K, TILES, tables,
    CUT: tl.constexpr, Q_SUMS: tl.constexpr, DRAW: tl.constexpr,
    KP: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One tile of one row, into [B * (K + 1), TILES]: the sums that tests need, or a draw.

    Of greedy requests the winner; of the row after all drafts a draw, if DRAW says so; of rows that
    test a draft the largest log-weight and the sum, of p and, as Q_SUMS says, of dense q.
    """
    tile = tl.program_id(0)
    local = tl.program_id(1)
    request = tl.program_id(2)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    if (slot >= 0) & (local <= length):
        row = first + local
        here = logits + row * row_stride
        at = request * (K + 1) + local
        out = at.to(tl.int64) * TILES + tile
        temperature = tl.load(temperatures + slot)
        mine = row_edits(tables, request, local)
        if temperature < GREEDY:
            greedy_tile(here, tile, out, out, tops, choices, vocab, mine, TILE, LARGEST_RAW)
        elif local == length:
            if DRAW:
                drawn_tile(
                    here, tile, out, tl.load(streams + slot), tl.load(positions + row), temperature,
                    tops, scores, choices, vocab, mine, TILE, 1,
                )  # fmt: skip
        else:
            ids = tile * TILE + tl.arange(0, TILE)
            z = scaled(here, ids, ids < vocab, temperature, mine)
            if CUT:
                z = tl.where(z < tl.load(cuts + at), NOTHING, z)
            top = tl.max(z)
            tl.store(tops + out, top)
            tl.store(totals + out, tl.sum(tl.exp2(z * LOG2E - reference_of(top))))
            if Q_SUMS == ROWS:
                there = q_logits + slot * q_slot + local * q_column
                y = scaled(there, ids, ids < q_vocab, temperature, None)
                q_top = tl.max(y)
                tl.store(q_tops + out, q_top)
                tl.store(q_totals + out, tl.sum(tl.exp2(y * LOG2E - reference_of(q_top))))
            elif Q_SUMS == GIVEN:
                # as if the first tile had it all
                value = tl.load(lse + slot * lse_slot + local * lse_column)
                known = (tl.abs(value) < INFINITE) & (tile == 0)
                tl.store(q_tops + out, tl.where(known, value, NOTHING))
                tl.store(q_totals + out, tl.where(known, 1.0, 0.0))


@triton.jit
def joint_ratios(ratio, length, N: tl.constexpr):
    """log2 of rho after i drafts, [N]: rho_0 = 1, rho_(i+1) = min(1, rho_i * ratio_i)."""
    column = tl.arange(0, N)
    joint = tl.zeros((N,), tl.float32)
    carried = tl.full((), 0.0, tl.float32)
    for i in range(0, length):
        more = carried + tl.sum(tl.where(column == i, tl.maximum(ratio, -3.0e38), 0.0))
        # nothing brings back a rho of 0, not even a draft to which its own q gives no chance
        carried = tl.where(carried <= -1.0e38, carried, tl.minimum(tl.maximum(more, -3.0e38), 0.0))
        joint = tl.where(column == i + 1, carried, joint)
    return tl.where(joint <= -1.0e38, NOTHING, joint)


@triton.jit
def block_laws(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots, temperatures, cuts,
    q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
    tops, totals, q_tops, q_totals, laws, vocab, q_vocab, K, TILES, tables,
    CUT: tl.constexpr, Q: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
    CP: tl.constexpr,
):  # fmt: skip
    """Of one request: what `residual_masses` needs of every row. laws: float32 [B, 5, K + 1]."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    temperature = tl.load(temperatures + tl.maximum(slot, 0))
    if (slot >= 0) & (length > 0) & (temperature >= GREEDY):
        column = tl.arange(0, KP)
        draft = tl.load(
            draft_tokens + request * draft_stride + column, mask=column < length, other=-1
        )
        p_top, p_sum, q_top, q_sum, _cut, ratio = tested_laws(
            logits, row_stride, first, length, request * (K + 1), slot, temperature, cuts, draft,
            q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
            tops, totals, q_tops, q_totals, vocab, q_vocab, TILES, tables, request,
            CUT, Q, KP, TP, TILE, CP,
        )  # fmt: skip
        joint = joint_ratios(ratio, length, KP)
        out = laws + request * 5 * (K + 1) + column
        there = column <= K
        tl.store(out, p_top, mask=there)
        tl.store(out + (K + 1), p_sum, mask=there)
        tl.store(out + 2 * (K + 1), q_top, mask=there)
        tl.store(out + 3 * (K + 1), q_sum, mask=there)
        tl.store(out + 4 * (K + 1), joint, mask=there)


@triton.jit
def one_less_exp2(x):
    """1 - 2 ** x of x <= 0, with its digits where x is small."""
    y = tl.maximum(x, -200.0) * 0.6931471805599453
    return tl.where(y > -0.02, -y * (1.0 + y * (0.5 + y * (1.0 / 6))), 1.0 - tl.exp(y))


@triton.jit
def block_thresholds(
    joint, ratio, at, length, masses, PARTS, Q: tl.constexpr, N: tl.constexpr, TP: tl.constexpr
):
    """H after each draft, [N]: rho after the last, else S / (S + 1 - rho) with the next row's S.

    masses: float32 [B * (K + 1), PARTS], whose sums are S.
    """
    column = tl.arange(0, N)
    ahead = column + 1 < length
    after = tl.zeros((N,), tl.float32)
    following = tl.zeros((N,), tl.float32)  # log2 of p(d) / q(d) of the next draft
    for i in range(0, length):
        after = tl.where(column == i, tl.max(tl.where(column == i + 1, joint, NOTHING)), after)
        following = tl.where(
            column == i, tl.max(tl.where(column == i + 1, ratio, NOTHING)), following
        )
    if Q == NO_Q:
        mass = tl.exp2(after) * one_less_exp2(tl.minimum(following, 0.0))
    else:
        part = tl.arange(0, TP)
        place = (at + column + 1).to(tl.int64)[:, None] * PARTS + part[None, :]
        there = ahead[:, None] & (part < PARTS)[None, :]
        mass = tl.sum(tl.load(masses + place, mask=there, other=0.0), axis=1)
    missing = mass + one_less_exp2(after)
    threshold = tl.where(missing > 0, mass / tl.where(missing > 0, missing, 1.0), 1.0)
    return tl.where(ahead, threshold, tl.exp2(after))


@triton.jit
def settle_tests(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, cuts, rates,
    q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
    tops, totals, scores, choices, q_tops, q_totals, masses, drawn, last_tops,
    out_tokens, out_count, out_rows, out_empty, refused, laws, vocab, q_vocab, K, TILES, PARTS,
    tables, RULE: tl.constexpr, CUT: tl.constexpr, DRAWN: tl.constexpr, Q: tl.constexpr,
    KP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """One request: which drafts are kept, and the token after them unless one was refused.

    last_tops: `tops` of the rows after all drafts, which DRAWN leaves out of those. out_empty: None
    without edits. refused: int32 [B], the column of the draft that a residual has to replace, else
    -1; its laws: float32 [B, 6], p's and q's largest and log_sum, log2 rho, and the cut.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    length = tl.where(slot >= 0, length, -1)
    column = tl.arange(0, KP)
    at = request * (K + 1)
    draft = tl.load(draft_tokens + request * draft_stride + column, mask=column < length, other=-1)
    there = tl.maximum(slot, 0)
    temperature = tl.load(temperatures + there)
    stream = tl.load(streams + there)
    tested = column < length
    position = tl.load(positions + first + column, mask=tested, other=0)
    a, b = key(stream, position, column, ACCEPT)
    uniform = unit(word(a, b, column * 0))
    accepted = tl.full((), 0, tl.int32)
    token = tl.full((), -1, tl.int64)
    refusal = tl.full((), -1, tl.int32)
    if temperature < GREEDY:
        _top, choice = winning_tiles(
            at + column, column <= length, True, 0, tops, scores, choices, TILES, 1, TP
        )
        passed = choice.to(tl.int64) == draft
        if RULE == SYNTHETIC:
            passed = uniform < tl.load(rates + column, mask=tested, other=0.0)
        accepted = tl.min(tl.where(tested & passed, KP, column))
        token = tl.sum(tl.where(column == accepted, choice.to(tl.int64), 0))
    elif length >= 0:
        p_top, p_sum, q_top, q_sum, cut, ratio = tested_laws(
            logits, row_stride, first, length, at, slot, temperature, cuts, draft,
            q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
            tops, totals, q_tops, q_totals, vocab, q_vocab, TILES, tables, request,
            CUT, Q, KP, TP, TILE, CP,
        )  # fmt: skip
        joint = tl.zeros((KP,), tl.float32)
        if RULE == BLOCK:
            joint = joint_ratios(ratio, length, KP)
            threshold = block_thresholds(joint, ratio, at, length, masses, PARTS, Q, KP, TP)
            passed = tested & (uniform <= threshold)
            accepted = tl.max(tl.where(passed, column + 1, 0))
        else:
            if RULE == STANDARD:
                passed = tested & (ratio > tl.log2(uniform))
            else:
                passed = tested & (uniform < tl.load(rates + column, mask=tested, other=0.0))
            accepted = tl.min(tl.where(passed, KP, column))
        if accepted < length:
            refusal = accepted
            chosen = column == accepted
            out = laws + request * 6
            tl.store(out, tl.max(tl.where(chosen, p_top, NOTHING)))
            tl.store(out + 1, tl.max(tl.where(chosen, p_sum, NOTHING)))
            tl.store(out + 2, tl.max(tl.where(chosen, q_top, NOTHING)))
            tl.store(out + 3, tl.max(tl.where(chosen, q_sum, NOTHING)))
            tl.store(out + 4, tl.max(tl.where(chosen, joint, NOTHING)))
            tl.store(out + 5, tl.max(tl.where(chosen, cut, NOTHING)))
        elif DRAWN:
            token = tl.load(drawn + at + length)
        else:
            token = tl.sum(chosen_tokens(
                logits, row_stride, first + length, 1, positions, at + length, stream, temperature,
                tops, scores, choices, vocab, TILES, tables, request, length, 1, TP, TILE,
            ))  # fmt: skip
    active = column <= length
    emitted = active & (column <= accepted)
    tokens = tl.where(column < accepted, draft, tl.where(column == accepted, token, -1))
    out = at + column
    tl.store(out_tokens + out, tl.where(emitted, tokens, -1), mask=column <= K)
    tl.store(out_rows + out, tl.where(emitted, first + column, -1), mask=column <= K)
    tl.store(out_count + request, tl.where(length >= 0, accepted + 1, 0).to(tl.int64))
    if out_empty is not None:
        empty = empty_rows(out, tested, tops, TILES, TP)
        empty_last = empty_rows(out, column == length, last_tops, TILES, TP)
        empty = emitted & tl.where(tested, empty, empty_last)
        tl.store(out_empty + out, empty, mask=column <= K)
    tl.store(refused + request, refusal)
