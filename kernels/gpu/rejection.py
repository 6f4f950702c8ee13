"""Rules that compare laws: standard, block and synthetic, with dense, sparse or one-hot q.

Every tested row, and its q row where q is dense, is read once for its sum; `settle_tests` then
knows which drafts are kept. Only the row whose draft is refused is read again, with its q row, for
the residual. Block reads the rows after the first once more before it decides.

Laws are kept as pairs: log2 p(x) = (z(x) - largest) / ln 2 - log_sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import (
    chosen_tokens,
    draw_row,
    drawn_tile,
    empty_rows,
    greedy_tile,
    row_top,
    winning_tiles,
)
from specdec_kernels.gpu.edit_values import edited_ids, row_edits
from specdec_kernels.gpu.noise import (
    ACCEPT,
    GROUP,
    RESIDUAL_TOKEN,
    gumbel,
    key,
    unit,
    word,
)
from specdec_kernels.gpu.rows import (
    GREEDY,
    LOG2E,
    NOTHING,
    chain_length,
    cleaned,
    draw_group,
    over_lanes,
    reference_of,
    relative,
    scaled,
)
from specdec_kernels.gpu.truncation import LEAST_P, find_cut, log_weight

NO_Q = tl.constexpr(0)
DENSE = tl.constexpr(1)
SPARSE = tl.constexpr(2)

STANDARD = tl.constexpr(0)
BLOCK = tl.constexpr(1)
SYNTHETIC = tl.constexpr(2)


@triton.jit
def row_cuts(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots, temperatures,
    top_ks, top_ps, min_ps, cuts, vocab, K, tables,
    KP: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """Of one tested row: below which log-weight truncation excludes. float32 [B * (K + 1)]."""
    request = tl.program_id(1)
    local = tl.program_id(0)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    cut = tl.full((), NOTHING, tl.float32)
    if (slot >= 0) & (local < length):
        temperature = tl.load(temperatures + slot)
        top_k = tl.load(top_ks + slot)
        top_p = tl.maximum(tl.load(top_ps + slot), LEAST_P)
        min_p = tl.load(min_ps + slot)
        asked = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
        if asked & (temperature >= GREEDY):
            here = logits + (first + local) * row_stride
            mine = row_edits(tables, request, local)
            top = row_top(here, temperature, vocab, mine, TILE)
            cut = find_cut(
                here, temperature, top, min_p, top_k, top_p, vocab, mine, SHIFT, TILE, LARGEST_RAW
            )
    tl.store(cuts + request * (K + 1) + local, cut)


@triton.jit
def test_statistics(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, cuts, q_logits, q_slot, q_column, tops, scores, choices, totals, q_tops, q_totals,
    vocab, q_vocab, K, TILES, tables,
    CUT: tl.constexpr, DENSE_Q: tl.constexpr, DRAW: tl.constexpr,
    KP: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One tile of one row, into [B * (K + 1), TILES]: the sums that tests need, or a draw.

    Of greedy requests the winner; of the row after all drafts a draw, if DRAW says so; of rows that
    test a draft the largest log-weight and the sum, of p and of dense q.
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
            if DENSE_Q:
                there = q_logits + slot * q_slot + local * q_column
                y = scaled(there, ids, ids < q_vocab, temperature, None)
                q_top = tl.max(y)
                tl.store(q_tops + out, q_top)
                tl.store(q_totals + out, tl.sum(tl.exp2(y * LOG2E - reference_of(q_top))))


@triton.jit
def log_sums(at, active, tops, totals, TILES, TP: tl.constexpr):
    """Of rows [N]: (largest, log2 of the sum relative to it), and which rows are wild."""
    tiles = tl.arange(0, TP)
    place = at.to(tl.int64)[:, None] * TILES + tiles[None, :]
    there = active[:, None] & (tiles < TILES)[None, :]
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
    if tl.max((wild & active).to(tl.int32)) > 0:
        for i in range(0, length):
            if tl.max((wild & (column == i)).to(tl.int32)) > 0:
                here = logits + (first + i) * row_stride
                own = row_edits(tables, request, i)
                lowest = tl.min(tl.where(column == i, cut, float("inf")))
                one, other = careful_log_sum(here, temperature, lowest, vocab, own, TILE)
                p_top = tl.where(column == i, one, p_top)
                p_sum = tl.where(column == i, other, p_sum)
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
        if tl.max((q_wild & active).to(tl.int32)) > 0:
            for i in range(0, length):
                if tl.max((q_wild & (column == i)).to(tl.int32)) > 0:
                    there = q_logits + slot * q_slot + i * q_column
                    one, other = careful_log_sum(there, temperature, NOTHING, q_vocab, None, TILE)
                    q_top = tl.where(column == i, one, q_top)
                    q_sum = tl.where(column == i, other, q_sum)
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


@triton.jit
def joint_ratios(ratio, length, N: tl.constexpr):
    """log2 of rho after i drafts, [N]: rho_0 = 1, rho_(i+1) = min(1, rho_i * ratio_i)."""
    column = tl.arange(0, N)
    joint = tl.zeros((N,), tl.float32)
    carried = tl.full((), 0.0, tl.float32)
    for i in range(0, length):
        carried += tl.sum(tl.where(column == i, tl.maximum(ratio, -3.0e38), 0.0))
        carried = tl.minimum(tl.maximum(carried, -3.0e38), 0.0)
        joint = tl.where(column == i + 1, carried, joint)
    return tl.where(joint <= -1.0e38, NOTHING, joint)


@triton.jit
def residual_weights(
    here, ids, cut, temperature, p_top, p_sum, carried, draft,
    q_here, q_ids_here, candidates, q_top, q_sum, vocab, q_vocab, mine, Q: tl.constexpr,
):  # fmt: skip
    """max(rho p - q, 0) of whole groups of ids; a q_sum of -inf puts all of q on the draft."""
    z = cleaned(here, ids, ids < vocab, temperature, mine)
    z = tl.where(z < cut, NOTHING, z)
    log_p = relative(z, p_top) - p_sum + carried
    log_p = tl.where(log_p == log_p, log_p, NOTHING)
    p = tl.exp2(log_p)
    weight = tl.where(ids == draft, 0.0, p)
    if q_sum > NOTHING:
        if Q == DENSE:
            y = cleaned(q_here, ids, ids < q_vocab, temperature, None)
            log_q = relative(y, q_top) - q_sum
            weight = less(p, log_p, log_q)
        elif Q == SPARSE:
            weight = p
            for i in range(0, candidates):
                id_ = tl.load(q_ids_here + i)
                y = cleaned(q_here, i, (id_ >= 0) & (id_ < vocab), temperature, None)
                log_q = relative(y, q_top) - q_sum
                weight = tl.where(ids == id_, tl.minimum(weight, less(p, log_p, log_q)), weight)
    return weight


@triton.jit
def less(p, log_p, log_q):
    """max(p - q, 0), in a form that keeps its digits where the two are close."""
    part = tl.exp2(tl.where(log_p == NOTHING, 0.0, log_q - log_p))
    return tl.where((part < 1) & (log_p > NOTHING), p * (1.0 - part), 0.0)


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
def residual_masses(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots, temperatures, cuts,
    q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates, laws, masses,
    vocab, q_vocab, K, TILES, tables,
    CUT: tl.constexpr, Q: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row that tests draft i > 0: the mass of max(rho_i p - q, 0).

    masses: float32 [B * (K + 1), TILES].
    """
    tile = tl.program_id(0)
    local = tl.program_id(1) + 1
    request = tl.program_id(2)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    temperature = tl.load(temperatures + tl.maximum(slot, 0))
    if (slot >= 0) & (local < length) & (temperature >= GREEDY):
        at = request * (K + 1) + local
        cut = tl.full((), NOTHING, tl.float32)
        if CUT:
            cut = tl.load(cuts + at)
        law = laws + request * 5 * (K + 1) + local
        ids = tile * TILE + tl.arange(0, TILE)
        weight = residual_weights(
            logits + (first + local) * row_stride, ids, cut, temperature,
            tl.load(law), tl.load(law + (K + 1)), tl.load(law + 4 * (K + 1)),
            tl.load(draft_tokens + request * draft_stride + local),
            q_logits + slot * q_slot + local * q_column,
            q_ids + slot * ids_slot + local * ids_column, candidates,
            tl.load(law + 2 * (K + 1)), tl.load(law + 3 * (K + 1)), vocab, q_vocab,
            row_edits(tables, request, local), Q,
        )  # fmt: skip
        tl.store(masses + at.to(tl.int64) * TILES + tile, tl.sum(weight))


@triton.jit
def one_less_exp2(x):
    """1 - 2 ** x of x <= 0, with its digits where x is small."""
    y = tl.maximum(x, -200.0) * 0.6931471805599453
    return tl.where(y > -0.02, -y * (1.0 + y * (0.5 + y * (1.0 / 6))), 1.0 - tl.exp(y))


@triton.jit
def block_thresholds(
    joint, ratio, at, length, masses, TILES, Q: tl.constexpr, N: tl.constexpr, TP: tl.constexpr
):
    """H after each draft, [N]: rho after the last, else S / (S + 1 - rho) with the next row's S."""
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
        tiles = tl.arange(0, TP)
        place = (at + column + 1).to(tl.int64)[:, None] * TILES + tiles[None, :]
        there = ahead[:, None] & (tiles < TILES)[None, :]
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
    out_tokens, out_count, out_rows, out_empty, refused, laws, vocab, q_vocab, K, TILES, tables,
    RULE: tl.constexpr, CUT: tl.constexpr, DRAWN: tl.constexpr, Q: tl.constexpr,
    KP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """One request: which drafts are kept, and the token after them unless one was refused.

    last_tops: `tops` of the rows after all drafts, which DRAWN leaves out of those. out_empty: None
    without edits. refused: int32 [B], the column of the draft that a residual has to replace, else -1; its laws:
    float32 [B, 6], p's and q's largest and log_sum, log2 rho, and the cut.
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
    uniform = tl.zeros((KP,), tl.float32)
    if RULE == SYNTHETIC:
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
        if RULE == SYNTHETIC:
            passed = tested & (uniform < tl.load(rates + column, mask=tested, other=0.0))
            accepted = tl.min(tl.where(passed, KP, column))
        else:
            position = tl.load(positions + first + column, mask=tested, other=0)
            a, b = key(stream, position, column, ACCEPT)
            uniform = unit(word(a, b, column * 0))
            if RULE == STANDARD:
                passed = tested & (ratio > tl.log2(uniform))
                accepted = tl.min(tl.where(passed, KP, column))
            else:
                joint = joint_ratios(ratio, length, KP)
                threshold = block_thresholds(joint, ratio, at, length, masses, TILES, Q, KP, TP)
                passed = tested & (uniform <= threshold)
                accepted = tl.max(tl.where(passed, column + 1, 0))
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


@triton.jit
def residual_tiles(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
    refused, laws, scores, choices, vocab, q_vocab, K, TILES, tables,
    Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of the row whose draft was refused: the group of the residual that wins.

    scores, choices: [B, TILES].
    """
    tile = tl.program_id(0)
    request = tl.program_id(1)
    column = tl.load(refused + request)
    if column >= 0:
        GROUPS: tl.constexpr = TILE // GROUP
        slot = tl.load(slots + request)
        row = tl.load(logits_start + request) + column
        ids = tile * TILE + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        law = laws + request * 6
        weight = residual_weights(
            logits + row * row_stride, ids, tl.load(law + 5), tl.load(temperatures + slot),
            tl.load(law), tl.load(law + 1), tl.load(law + 4),
            tl.load(draft_tokens + request * draft_stride + column),
            q_logits + slot * q_slot + column * q_column,
            q_ids + slot * ids_slot + column * ids_column, candidates,
            tl.load(law + 2), tl.load(law + 3), vocab, q_vocab,
            row_edits(tables, request, column), Q,
        )  # fmt: skip
        a, b = key(tl.load(streams + slot), tl.load(positions + row), 0, RESIDUAL_TOKEN + 1)
        score, group = draw_group(over_lanes(weight), a, b, tile, GROUPS)
        out = request.to(tl.int64) * TILES + tile
        tl.store(scores + out, score)
        tl.store(choices + out, group)


@triton.jit
def settle_residual(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates,
    refused, laws, scores, choices, out_tokens, vocab, q_vocab, K, TILES, tables,
    Q: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One request whose draft was refused: the token that replaces it."""
    request = tl.program_id(0)
    column = tl.load(refused + request)
    if column >= 0:
        slot = tl.load(slots + request)
        row = tl.load(logits_start + request) + column
        here = logits + row * row_stride
        temperature = tl.load(temperatures + slot)
        stream = tl.load(streams + slot)
        position = tl.load(positions + row)
        law = laws + request * 6
        cut = tl.load(law + 5)
        mine = row_edits(tables, request, column)
        tiles = tl.arange(0, TP)
        place = request.to(tl.int64) * TILES + tiles
        score = tl.load(scores + place, mask=tiles < TILES, other=NOTHING)
        if tl.max(score) > NOTHING:
            group = tl.load(choices + request.to(tl.int64) * TILES + tl.argmax(score, axis=0))
            ids = group * GROUP + tl.arange(0, GROUP)
            weight = residual_weights(
                here, ids, cut, temperature, tl.load(law), tl.load(law + 1), tl.load(law + 4),
                tl.load(draft_tokens + request * draft_stride + column),
                q_logits + slot * q_slot + column * q_column,
                q_ids + slot * ids_slot + column * ids_column, candidates,
                tl.load(law + 2), tl.load(law + 3), vocab, q_vocab, mine, Q,
            )  # fmt: skip
            a, b = key(stream, position, 0, RESIDUAL_TOKEN)
            total = safe_log2(weight) + gumbel(word(a, b, ids)) * LOG2E
            token = (group * GROUP + tl.argmax(total, axis=0)).to(tl.int64)
        else:
            # by rounding p exceeds q nowhere; then p = q as far as floats tell
            top = row_top(here, temperature, vocab, mine, TILE)
            token, _level = draw_row(
                here, temperature, top, cut, stream, position, 0, RESIDUAL_TOKEN, vocab, mine, TILE
            )
        tl.store(out_tokens + request * (K + 1) + column, token)
