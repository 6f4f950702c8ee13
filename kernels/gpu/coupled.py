"""Draws: the target's own token for every row, and the drafts that agree with it.

Two launches where nothing truncates. `row_statistics` reads every tile of every row once and leaves
a winner per tile; `settle_chains` takes the best of them per row, draws within its group, and keeps
the drafts that match. Where a request may truncate, six launches stand between the two: see
`attempts` and `retries`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.edit_values import row_edits
from specdec_kernels.gpu.noise import GROUP, TARGET_TOKEN, gumbel, key, word
from specdec_kernels.gpu.rows import (
    GREEDY,
    INFINITE,
    NOTHING,
    chain_length,
    cleaned,
    draw_group,
    finite,
    loaded,
    raw,
    reference_of,
    relative,
    tile_law,
)


@triton.jit
def row_of(
    request, local, logits_start, draft_tokens, draft_stride, slots, vocab, K,
    CHAINS: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A request's row after `local` drafts: its index, its slot, whether a token is asked of it.

    LAST: only of the row that follows all drafts.
    """
    slot = tl.load(slots + request)
    if CHAINS:
        first, length = chain_length(
            logits_start, draft_tokens, draft_stride, request, vocab, K, KP
        )
    else:
        first, length = request.to(tl.int64), 0
    asked = local == length if LAST else local <= length
    return first + local, slot, (slot >= 0) & asked


@triton.jit
def row_statistics(
    logits,
    row_stride,
    logits_start,
    draft_tokens,
    draft_stride,
    positions,
    slots,
    streams,
    temperatures,
    tops,
    scores,
    choices,
    vocab,
    K,
    TILES,
    tables,
    CHAINS: tl.constexpr,
    KP: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):
    """One tile of one row, into [B * (K + 1), TILES]: the winners and what they are weighed by.

    tops: the largest log-weight (of a greedy row: logit). choices, scores [..., ATTEMPTS]: of a
    greedy row the first id that has it; else, for each attempt to draw, the group that wins, and by
    what, relative to tops; +inf if the tile is wild. Without CHAINS each request is a row. tables:
    the edits of the call, or None; so in all that follows.
    """
    tile = tl.program_id(0)
    at = tl.program_id(2) * (K + 1) + tl.program_id(1)
    row, slot, active = row_of(
        tl.program_id(2), tl.program_id(1), logits_start, draft_tokens, draft_stride, slots,
        vocab, K, CHAINS, KP, LAST,
    )  # fmt: skip
    if active:
        here = logits + row * row_stride
        out = at.to(tl.int64) * TILES + tile
        temperature = tl.load(temperatures + slot)
        mine = row_edits(tables, tl.program_id(2), tl.program_id(1))
        if temperature < GREEDY:
            greedy_tile(
                here, tile, out * ATTEMPTS, out, tops, choices, vocab, mine, TILE, LARGEST_RAW
            )
        else:
            stream = tl.load(streams + slot)
            position = tl.load(positions + row)
            drawn_tile(
                here, tile, out, stream, position, temperature, tops, scores, choices,
                vocab, mine, TILE, ATTEMPTS,
            )  # fmt: skip


@triton.jit
def greedy_tile(
    here, tile, choice_at, top_at, tops, choices, vocab, mine, TILE: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """Store a tile's largest logit and the first id that has it."""
    ids = tile * TILE + tl.arange(0, TILE)
    x = loaded(here, ids, ids < vocab, mine)
    most = tl.max(x)
    if (most != most) | (most == INFINITE):
        x = raw(here, ids, ids < vocab, mine, LARGEST_RAW)
        most = tl.max(x)
    best = tl.min(tl.where((x == most) & (ids < vocab), ids, vocab))
    tl.store(tops + top_at, most)
    tl.store(choices + choice_at, tl.where(best < vocab, best, tile * TILE))


@triton.jit
def drawn_tile(
    here, tile, out, stream, position, temperature, tops, scores, choices, vocab, mine,
    TILE: tl.constexpr, ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Store a tile's law, and for each attempt to draw the group that wins in it."""
    GROUPS: tl.constexpr = TILE // GROUP
    ids = tile * TILE + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    top, sums = tile_law(here, ids, vocab, temperature, mine)
    tl.store(tops + out, top)
    for attempt in tl.static_range(ATTEMPTS):
        a, b = key(stream, position, attempt, TARGET_TOKEN + 1)
        score, group = draw_group(sums, a, b, tile, GROUPS)
        tl.store(scores + out * ATTEMPTS + attempt, score)
        tl.store(choices + out * ATTEMPTS + attempt, group)


@triton.jit
def tiles_of(at, active, TILES, TP: tl.constexpr):
    """Of rows [N]: the places of their tiles' results, and which of them are there; [N, TP]."""
    tiles = tl.arange(0, TP)
    place = at.to(tl.int64)[:, None] * TILES + tiles[None, :]
    return place, active[:, None] & (tiles < TILES)[None, :]


@triton.jit
def winning_tiles(
    at, active, greedy, attempt, tops, scores, choices, TILES,
    ATTEMPTS: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Of rows [N]: the largest log-weight, and the id (greedy) or group that wins."""
    place, there = tiles_of(at, active, TILES, TP)
    top = tl.load(tops + place, mask=there, other=NOTHING)
    row_top = tl.max(top, axis=1)
    if greedy:
        best = tl.argmax(top, axis=1)
    else:
        score = tl.load(scores + place * ATTEMPTS + attempt, mask=there, other=NOTHING)
        above = reference_of(top) - reference_of(row_top)[:, None]
        score = tl.where(top == NOTHING, NOTHING, above + score)
        best = tl.argmax(score, axis=1)
    best = tl.minimum(best, TILES - 1)  # wild tiles compare with nothing
    won = (at.to(tl.int64) * TILES + best) * ATTEMPTS + attempt
    return row_top, tl.load(choices + won, mask=active, other=0)


@triton.jit
def member_of(here, active, group, top, temperature, first, second, vocab, cut, mine):
    """The id that wins within a group, and its log-weight. All [N], but for the temperature.

    first, second: the key of the ids' domain; `here` [N] points at the rows; below `cut` [N] an id
    is excluded; what `mine` says of several rows is [N, 1].
    """
    lane = tl.arange(0, GROUP)
    ids = group[:, None] * GROUP + lane[None, :]
    x = cleaned(here[:, None], ids, active[:, None] & (ids < vocab), temperature, mine)
    x = tl.where(x < cut[:, None], NOTHING, x)
    score = (x - finite(top)[:, None]) + gumbel(word(first[:, None], second[:, None], ids))
    score = tl.where(x == NOTHING, NOTHING, score)
    best = tl.argmax(score, axis=1)
    weight = tl.sum(tl.where(lane[None, :] == best[:, None], finite(x), 0.0), axis=1)
    return group * GROUP + best, weight


@triton.jit
def drawn_ids(
    here, at, active, stream, position, temperature, attempt,
    tops, scores, choices, vocab, TILES, mine, ATTEMPTS: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Of rows [N] of a sampled request: an attempt's id (int64), its log-weight and the largest."""
    top, group = winning_tiles(
        at, active, False, attempt, tops, scores, choices, TILES, ATTEMPTS, TP
    )
    a, b = key(stream, position, attempt, TARGET_TOKEN)
    cut = tl.where(active, NOTHING, NOTHING)
    member, level = member_of(here, active, group, top, temperature, a, b, vocab, cut, mine)
    return member.to(tl.int64), level, top


@triton.jit
def wild_rows(at, active, scores, TILES, ATTEMPTS: tl.constexpr, TP: tl.constexpr):
    """Which rows [N] of a sampled request hold NaN or +inf."""
    place, there = tiles_of(at, active, TILES, TP)
    score = tl.load(scores + place * ATTEMPTS, mask=there, other=0.0)
    return tl.max((score == INFINITE).to(tl.int32), axis=1) > 0


@triton.jit
def empty_rows(at, active, tops, TILES, TP: tl.constexpr):
    """Which rows [N] exclude every id, by the largest log-weights of their tiles (NaN is none)."""
    place, there = tiles_of(at, active, TILES, TP)
    top = tl.load(tops + place, mask=there, other=NOTHING)
    return tl.max((top > NOTHING).to(tl.int32), axis=1) == 0


@triton.jit
def row_top(here, temperature, vocab, mine, TILE: tl.constexpr):
    """The largest log-weight of a row, NaN excluded."""
    top = tl.full((TILE,), NOTHING, tl.float32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        top = tl.maximum(top, cleaned(here, ids, ids < vocab, temperature, mine))
    return tl.max(top)


@triton.jit
def draw_row(
    here, temperature, top, cut, stream, position, index, domain, vocab, mine, TILE: tl.constexpr
):
    """A draw from what a row has at or above its cut, by one program: an id and its log-weight."""
    GROUPS: tl.constexpr = TILE // GROUP
    a, b = key(stream, position, index, domain + 1)
    best = tl.full((), NOTHING, tl.float32)
    choice = tl.full((), 0, tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        z = cleaned(here, ids, ids < vocab, temperature, mine)
        weight = tl.where(z < cut, 0.0, tl.exp2(relative(z, top)))
        score, group = draw_group(tl.sum(weight, axis=1), a, b, start // TILE, GROUPS)
        choice = tl.where(score > best, group, choice)
        best = tl.maximum(best, score)
    one = tl.arange(0, 1)
    a, b = key(stream, position + one, index, domain)
    member, level = member_of(
        here + one, one == 0, choice + one, one.to(tl.float32) + top, temperature, a, b, vocab,
        one.to(tl.float32) + cut, mine,
    )  # fmt: skip
    return tl.sum(member).to(tl.int64), tl.sum(level)


@triton.jit
def chosen_tokens(
    logits, row_stride, first, count, positions, at, stream, temperature,
    tops, scores, choices, vocab, TILES, tables, request, local,
    N: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tokens of a request's rows, `count` from `first` on, nothing truncated: int64 [N].

    at: where the first of them is among all places; local: how many drafts are before it.
    """
    column = tl.arange(0, N)
    active = column < count
    place = at + column
    if temperature < GREEDY:
        _, choice = winning_tiles(place, active, True, 0, tops, scores, choices, TILES, 1, TP)
        tokens = choice.to(tl.int64)
    else:
        here = logits + tl.where(active, first + column, 0) * row_stride
        position = tl.load(positions + first + column, mask=active, other=0)
        mine = row_edits(tables, request, tl.where(active, column, 0)[:, None] + local)
        tokens, _levels, _tops = drawn_ids(
            here, place, active, stream, position, temperature, 0,
            tops, scores, choices, vocab, TILES, mine, 1, TP,
        )  # fmt: skip
        wild = wild_rows(place, active, scores, TILES, 1, TP)
        if tl.max(wild.to(tl.int32)) > 0:
            for i in range(0, count):
                if tl.max((wild & (column == i)).to(tl.int32)) > 0:
                    row = logits + (first + i) * row_stride
                    own = row_edits(tables, request, i + local)
                    top = row_top(row, temperature, vocab, own, TILE)
                    token, _level = draw_row(
                        row, temperature, top, NOTHING, stream, tl.load(positions + first + i),
                        0, TARGET_TOKEN, vocab, own, TILE,
                    )  # fmt: skip
                    tokens = tl.where(column == i, token, tokens)
    return tokens


@triton.jit
def settle_chains(
    logits, row_stride, logits_start, draft_tokens, draft_stride, positions, slots, streams,
    temperatures, tops, scores, choices, drawn, out_tokens, out_count, out_rows, out_empty,
    vocab, K, TILES, tables,
    DRAWN: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One request: the token of each of its rows, then the drafts that equal them.

    drawn: int64 [B * (K + 1)], the tokens, where DRAWN says that somebody chose them already.
    out_empty: None without edits.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    first, length = chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP)
    length = tl.where(slot >= 0, length, -1)
    column = tl.arange(0, KP)
    active = column <= length
    at = request * (K + 1)
    if DRAWN:
        tokens = tl.load(drawn + at + column, mask=active, other=-1)
    else:
        there = tl.maximum(slot, 0)
        tokens = chosen_tokens(
            logits, row_stride, first, length + 1, positions, at,
            tl.load(streams + there), tl.load(temperatures + there),
            tops, scores, choices, vocab, TILES, tables, request, 0, KP, TP, TILE,
        )  # fmt: skip
    draft = tl.load(draft_tokens + request * draft_stride + column, mask=column < length, other=-1)
    accepted = tl.min(tl.where((column < length) & (tokens == draft), KP, column))
    emitted = active & (column <= accepted)
    out = at + column
    tl.store(out_tokens + out, tl.where(emitted, tokens, -1), mask=column <= K)
    tl.store(out_rows + out, tl.where(emitted, first + column, -1), mask=column <= K)
    tl.store(out_count + request, tl.where(length >= 0, accepted + 1, 0).to(tl.int64))
    if out_empty is not None:
        empty = emitted & empty_rows(out, active, tops, TILES, TP)
        tl.store(out_empty + out, empty, mask=column <= K)


@triton.jit
def settle_rows(
    logits, row_stride, positions, slots, streams, temperatures, tops, scores, choices,
    out_tokens, vocab, TILES, tables, TP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row that is a request by itself: its token, -1 for padding."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    there = tl.maximum(slot, 0)
    tokens = chosen_tokens(
        logits, row_stride, request.to(tl.int64), (slot >= 0).to(tl.int32), positions, request,
        tl.load(streams + there), tl.load(temperatures + there),
        tops, scores, choices, vocab, TILES, tables, request, 0, 1, TP, TILE,
    )  # fmt: skip
    tl.store(out_tokens + request + tl.arange(0, 1), tl.where(slot >= 0, tokens, -1))
