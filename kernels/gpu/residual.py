"""What p has above q: its mass, and the token that replaces a refused draft."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.coupled import draw_row, row_top
from specdec_kernels.gpu.edit_values import edited_ids, row_edits
from specdec_kernels.gpu.laws import DENSE, SPARSE, safe_log2
from specdec_kernels.gpu.noise import GROUP, RESIDUAL_TOKEN, gumbel, key, word
from specdec_kernels.gpu.rows import (
    GREEDY,
    INFINITE,
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
from specdec_kernels.gpu.truncation import log_weight


@triton.jit
def residual_weights(
    here, ids, cut, temperature, p_top, p_sum, carried, draft,
    q_here, q_ids_here, candidates, q_top, q_sum, vocab, q_vocab, mine, start, Q: tl.constexpr,
):  # fmt: skip
    """max(rho p - q, 0) of whole groups of ids, those from `start` on in order.

    A q_sum of -inf puts all of q on the draft.
    """
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
                if (id_ >= start) & (id_ < start + ids.numel) & (id_ < vocab):
                    y = cleaned(q_here, i, True, temperature, None)
                    log_q = relative(y, q_top) - q_sum
                    weight = tl.where(ids == id_, less(p, log_p, log_q), weight)
    return weight


@triton.jit
def less(p, log_p, log_q):
    """max(p - q, 0), in a form that keeps its digits where the two are close."""
    part = tl.exp2(tl.where(log_p == NOTHING, 0.0, log_q - log_p))
    return tl.where((part < 1) & (log_p > NOTHING), p * (1.0 - part), 0.0)


@triton.jit
def excess(
    here, ids, cut, temperature, p_top, p_sum, carried, q_here, q_top, q_sum, vocab, q_vocab, mine,
    CUT: tl.constexpr,
):  # fmt: skip
    """max(rho p - q, 0) summed over ids, q dense; NaN or +inf where p or q is wild."""
    z = scaled(here, ids, ids < vocab, temperature, mine)
    if CUT:
        z = tl.where(z < cut, NOTHING, z)
    y = scaled(q_here, ids, ids < q_vocab, temperature, None)
    p = tl.exp2(z * LOG2E - reference_of(p_top) - (p_sum - carried))
    q = tl.exp2(y * LOG2E - reference_of(q_top) - q_sum)
    return tl.sum(tl.maximum(p - q, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def residual_masses(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots, temperatures, cuts,
    q_logits, q_slot, q_column, laws, masses, vocab, q_vocab, K, TILES, tables,
    CUT: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row that tests draft i > 0: the mass of max(rho_i p - q, 0), q dense.

    masses: float32 [B * (K + 1), TILES].
    """
    tile = tl.program_id(0)
    local = tl.program_id(1) + 1
    # what was read last for its sums is read first here, while the cache still holds it
    request = tl.num_programs(2) - 1 - tl.program_id(2)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    temperature = tl.load(temperatures + tl.maximum(slot, 0))
    if (slot >= 0) & (local < length) & (temperature >= GREEDY):
        at = request * (K + 1) + local
        cut = tl.full((), NOTHING, tl.float32)
        if CUT:
            cut = tl.load(cuts + at)
        law = laws + request * 5 * (K + 1) + local
        p_top, p_sum = tl.load(law), tl.load(law + (K + 1))
        q_top, q_sum = tl.load(law + 2 * (K + 1)), tl.load(law + 3 * (K + 1))
        carried = tl.load(law + 4 * (K + 1))
        here = logits + (first + local) * row_stride
        there = q_logits + slot * q_slot + local * q_column
        mine = row_edits(tables, request, local)
        ids = tile * TILE + tl.arange(0, TILE)
        mass = excess(
            here, ids, cut, temperature, p_top, p_sum, carried, there, q_top, q_sum,
            vocab, q_vocab, mine, CUT,
        )  # fmt: skip
        # slower, for what is wild and for a q that is all on the draft
        if (mass != mass) | (mass == INFINITE) | (q_sum == NOTHING):
            draft = tl.load(draft_tokens + request * draft_stride + local)
            mass = 0.0
            for start in range(tile * TILE, tile * TILE + TILE, PART):
                weight = residual_weights(
                    here, start + tl.arange(0, PART), cut, temperature, p_top, p_sum, carried,
                    draft, there, there, 0, q_top, q_sum, vocab, q_vocab, mine, start, DENSE,
                )  # fmt: skip
                mass += tl.sum(weight)
        tl.store(masses + at.to(tl.int64) * TILES + tile, mass)


@triton.jit
def candidate_masses(
    logits, row_stride, logits_start, draft_tokens, draft_stride, slots, temperatures, cuts,
    q_logits, q_slot, q_column, q_ids, ids_slot, ids_column, candidates, laws, masses,
    vocab, K, tables, CUT: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The same of a whole row, q on a few candidates: rho_i less what p and q share there.

    masses: float32 [B * (K + 1)].
    """
    local = tl.program_id(0) + 1
    request = tl.program_id(1)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    temperature = tl.load(temperatures + tl.maximum(slot, 0))
    if (slot >= 0) & (local < length) & (temperature >= GREEDY):
        at = request * (K + 1) + local
        law = laws + request * 5 * (K + 1) + local
        q_sum = tl.load(law + 3 * (K + 1))
        carried = tl.load(law + 4 * (K + 1))
        candidate = tl.arange(0, CP)
        ids = tl.load(
            q_ids + slot * ids_slot + local * ids_column + candidate,
            mask=candidate < candidates, other=-1,
        )  # fmt: skip
        real = (ids >= 0) & (ids < vocab)
        there = q_logits + slot * q_slot + local * q_column
        y = cleaned(there, candidate, real, temperature, None)
        log_q = relative(y, tl.load(law + 2 * (K + 1))) - q_sum
        if q_sum == NOTHING:  # all of q is on the draft
            draft = tl.load(draft_tokens + request * draft_stride + local)
            real = candidate == 0
            ids = tl.where(real, draft, ids)
            log_q = candidate * 0.0
        here = logits + (first + local) * row_stride
        x = tl.load(here + tl.where(real, ids, 0), mask=real, other=NOTHING).to(tl.float32)
        x = edited_ids(x, tl.where(real, ids, 0), row_edits(tables, request, local))
        z = log_weight(tl.where(real, x, NOTHING), temperature)
        if CUT:
            z = tl.where(z < tl.load(cuts + at), NOTHING, z)
        p_sum = tl.load(law + (K + 1))
        log_p = relative(z, tl.load(law)) - p_sum + carried
        log_p = tl.where(log_p == log_p, log_p, NOTHING)
        shared = tl.sum(tl.exp2(tl.minimum(log_p, log_q)))
        mass = tl.where(p_sum > NOTHING, tl.maximum(tl.exp2(carried) - shared, 0.0), 0.0)
        tl.store(masses + at, mass)


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
            row_edits(tables, request, column), tile * TILE, Q,
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
                tl.load(law + 2), tl.load(law + 3), vocab, q_vocab, mine, group * GROUP, Q,
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
