"""Drawing an id a row by keyed noise in one level, or in two with groups of any size: Triton.

Two launches each, as in `specdec_kernels.gpu.coupled`, at temperature 1 and with nothing around it:
the tiles of a row leave their winners, one program a row takes the best.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.noise import TARGET_TOKEN, gumbel, key, word
from specdec_kernels.gpu.rows import LOG2E, NOTHING, draw_group, finite, reference_of


@triton.jit
def flat_tiles(
    logits, row_stride, positions, streams, scores, choices, vocab, TILES, TILE: tl.constexpr
):  # fmt: skip
    """One tile of one row, into [rows, TILES]: the id that wins, and by what."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=NOTHING).to(tl.float32)
    # the reference draws groups of one in the groups' domain
    a, b = key(tl.load(streams + row), tl.load(positions + row), 0, TARGET_TOKEN + 1)
    best, winner = tl.max(z + gumbel(word(a, b, ids)), axis=0, return_indices=True)
    tl.store(scores + row * TILES + tile, best)
    tl.store(choices + row * TILES + tile, tile * TILE + winner)


@triton.jit
def settle_flat(scores, choices, tokens, TILES, TP: tl.constexpr):
    """One row: the best of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TP)
    score = tl.load(scores + row * TILES + tiles, mask=tiles < TILES, other=NOTHING)
    token = tl.load(choices + row * TILES + tl.argmax(score, axis=0))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _halved(parts):
    even, odd = tl.split(tl.reshape(parts, (parts.shape[0], parts.shape[1] // 2, 2)))
    return even + odd


@triton.jit
def _group_sums(weights, SIZE: tl.constexpr):
    """[groups, SIZE] -> [groups]: `over_lanes` of the package, for any power of two from 8 on."""
    parts = tl.sum(tl.reshape(weights, (weights.shape[0], SIZE // 8, 8)), axis=2)
    if SIZE >= 128:
        parts = _halved(parts)
    if SIZE >= 64:
        parts = _halved(parts)
    if SIZE >= 32:
        parts = _halved(parts)
    if SIZE >= 16:
        parts = _halved(parts)
    return tl.reshape(parts, (weights.shape[0],))


@triton.jit
def _ids(group, lane, STEP, PIECE: tl.constexpr, SIZE: tl.constexpr):
    """Members of groups: pieces of PIECE ids, STEP pieces from one to the next."""
    block = group // STEP
    piece = (block * (SIZE // PIECE) + lane // PIECE) * STEP + group % STEP
    return piece * PIECE + lane % PIECE


@triton.jit
def group_tiles(
    logits, row_stride, positions, streams, tops, scores, choices, vocab, COUNT, STEP, TILES,
    TILE: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """One tile of one row, into [rows, TILES]: its largest logit; the group that wins, by what.

    COUNT groups, see `_ids`. WITHIN: a tile is a block of STEP groups, or PIECE is SIZE; else a
    tile holds some of the groups of the one block there is, from all over the row.
    """
    GROUPS: tl.constexpr = TILE // SIZE
    PIECES: tl.constexpr = SIZE // PIECE
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    here = logits + row * row_stride
    first, step = tile * GROUPS, STEP
    if WITHIN:
        first, step = tile * TILE, GROUPS
    # the order of the ids in memory, so that loads are of whole vectors
    if PIECES == 1:
        ids = tile * TILE + tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        inside = ids < vocab
    else:
        rank = tl.arange(0, GROUPS * PIECE)
        ids = first + tl.arange(0, PIECES)[:, None] * step * PIECE + rank[None, :]
        inside = ids < vocab
        if not WITHIN:
            inside = inside & (first + rank < COUNT)[None, :]
    z = tl.load(here + ids, mask=inside, other=NOTHING).to(tl.float32)
    top = tl.max(z)
    weights = tl.exp2(z * LOG2E - reference_of(top))
    if PIECES == 1:
        sums = _group_sums(weights, SIZE)
    else:
        sums = tl.sum(weights, axis=0)
        if PIECE > 1:
            sums = tl.sum(tl.reshape(sums, (GROUPS, PIECE)), axis=1)
    a, b = key(tl.load(streams + row), tl.load(positions + row), 0, TARGET_TOKEN + 1)
    score, winner = draw_group(sums, a, b, tile, GROUPS)
    tl.store(tops + row * TILES + tile, top)
    tl.store(scores + row * TILES + tile, score)
    tl.store(choices + row * TILES + tile, winner)


@triton.jit
def settle_groups(
    logits, row_stride, positions, streams, tops, scores, choices, tokens, vocab, STEP, TILES,
    TP: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One row: the best group of its tiles, and the id within."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TP)
    there = tiles < TILES
    top = tl.load(tops + row * TILES + tiles, mask=there, other=NOTHING)
    score = tl.load(scores + row * TILES + tiles, mask=there, other=NOTHING)
    row_top = tl.max(top)
    score = tl.where(top == NOTHING, NOTHING, reference_of(top) - reference_of(row_top) + score)
    group = tl.load(choices + row * TILES + tl.argmax(score, axis=0))
    lane = tl.arange(0, SIZE)
    ids = _ids(group, lane, STEP, PIECE, SIZE)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=NOTHING).to(tl.float32)
    a, b = key(tl.load(streams + row), tl.load(positions + row), 0, TARGET_TOKEN)
    best = tl.argmax((x - finite(row_top)) + gumbel(word(a, b, group * SIZE + lane)), axis=0)
    token = tl.sum(tl.where(lane == best, ids, 0))
    tl.store(tokens + row, token.to(tl.int64))
