"""Tiles of rows of logits as the kernels see them: float32 in registers, nothing written back.

Weights are powers of two: that of a log-weight z is 2 ** (z / ln 2 - reference), so that it costs
one multiplication and one exponential, and no digits however large z is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.gpu.edit_values import edited
from specdec_kernels.gpu.noise import GROUP, gumbel, word
from specdec_kernels.logits import GREEDY_BELOW

# A row is cut into tiles of so many ids, a multiple of the group. Sums are taken within a tile and
# then over tiles, so results depend on it in their last bits; it is the same whatever the batch.
TILE = 4096
WARPS = 4
REGISTERS = 64  # a thread's, at most: more of them leave too few warps to hide the memory
EDITING = 96  # the same where it edits what it reads, which 64 do not hold
CAREFUL = 1024  # the tile of loops that one program runs over a row

GREEDY = tl.constexpr(GREEDY_BELOW)
NOTHING = tl.constexpr(float("-inf"))
INFINITE = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)


def tile_of(vocab: int) -> int:
    """The tile of a vocabulary: a power of two, one group at least."""
    tile: int = max(min(TILE, triton.next_power_of_2(vocab)), GROUP.value)
    return tile


def largest_of(dtype: torch.dtype) -> float:
    """What +inf counts as among logits of a dtype."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


@triton.jit
def chain_length(logits_start, draft_tokens, draft_stride, request, vocab, K, KP: tl.constexpr):
    """Of a request: its first row, and the number of its drafts, or -1 if it has no rows."""
    first = tl.load(logits_start + request)
    rows = tl.load(logits_start + request + 1) - first
    column = tl.arange(0, KP)
    draft = tl.load(draft_tokens + request * draft_stride + column, mask=column < K, other=-1)
    real = (column < rows - 1) & (draft >= 0) & (draft < vocab)
    length = tl.min(tl.where(real, KP, column))
    return first, tl.where(rows > 0, length, -1)


@triton.jit
def clean(x, LIMIT: tl.constexpr):
    """Log-weights or logits as they compare: NaN excluded, +inf the largest float there is."""
    return tl.minimum(tl.where(x == x, x, NOTHING), LIMIT)


@triton.jit
def over_temperature(x, temperature):
    """X over temperature, rounded once; infinite and NaN stay so."""
    # Two multiply-adds mend the product with the rounded inverse (Markstein 1990, "Computation of
    # elementary functions on the IBM RISC System/6000 processor").
    inverse = tl.div_rn(1.0, temperature)
    rough = x * inverse
    mended = tl.fma(tl.fma(-rough, temperature, x), inverse, rough)
    return tl.where(mended == mended, mended, rough)


@triton.jit
def whole_groups(x, ids, mine):
    """Logits after the edits of their row, or of a row for each group: see `edited`.

    ids: [GROUPS, GROUP], or flat; groups of ids in order, of which each is there in full.
    """
    if mine is not None:  # noqa: SIM102  # decided by the compiler, the other one by the request
        if mine[0] != 0:  # a flat tile changes its layout for this
            GROUPS: tl.constexpr = ids.numel // GROUP
            groups = tl.max(tl.reshape(ids, (GROUPS, GROUP)), axis=1) // GROUP
            x = tl.reshape(edited(tl.reshape(x, (GROUPS, GROUP)), groups, mine), ids.shape)
    return x


@triton.jit
def loaded(logits, ids, inside, mine):
    """Logits of ids, edited, those outside excluded; `mine` as `row_edits` gives it.

    Where it is not None, ids are as for `whole_groups`.
    """
    x = tl.load(logits + ids, mask=inside, other=NOTHING).to(tl.float32)
    return whole_groups(x, ids, mine)


@triton.jit
def scaled(logits, ids, inside, temperature, mine):
    """Log-weights of ids, those outside excluded. NaN and +inf are left for others to handle."""
    x = loaded(logits, ids, inside, mine)
    if temperature != 1.0:
        x = over_temperature(x, temperature)
    return x


@triton.jit
def cleaned(logits, ids, inside, temperature, mine):
    """Log-weights of ids as the law has them: NaN and ids outside excluded, +inf the largest."""
    return clean(scaled(logits, ids, inside, temperature, mine), LARGEST)


@triton.jit
def raw(logits, ids, inside, mine, LARGEST_RAW: tl.constexpr):
    """Logits as they compare, those outside excluded."""
    return clean(loaded(logits, ids, inside, mine), LARGEST_RAW)


@triton.jit
def finite(x):
    """x, and 0 where it is -inf: something to subtract."""
    return tl.where(x == NOTHING, 0.0, x)


@triton.jit
def reference_of(top):
    """What weights are relative to, in powers of two, where the largest log-weight is `top`.

    NaN where no float holds it: what is relative to infinity depends on whether the product fuses
    with the subtraction, and has to show that the row is wild.
    """
    reference = finite(top) * LOG2E
    return tl.where(tl.abs(reference) < INFINITE, reference, float("nan"))


@triton.jit
def relative(z, top):
    """Log-weights in powers of two relative to the largest, of rows however wild."""
    near = z * LOG2E - reference_of(top)
    return tl.where(tl.abs(finite(top)) < 1e37, near, (z - finite(top)) * LOG2E)


@triton.jit
def over_lanes(weights):
    """The sum of each group: [groups, 32] -> [groups], one group a thread.

    A reduction would leave every sum in the four threads that held parts of it, and all that
    follows would be computed four times; a split of the last dimension moves the parts together.
    """
    tl.static_assert(weights.shape[1] == 32)
    parts = tl.sum(tl.reshape(weights, (weights.shape[0], 4, 8)), axis=2)
    even, odd = tl.split(tl.reshape(parts, (weights.shape[0], 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def tile_law(logits, ids, vocab, temperature, mine):
    """Of ids [groups, GROUP]: the largest log-weight, and the sum of weights of each group.

    A sum is NaN if an id has NaN, +inf or nearly that: the row is wild, and needs `cleaned`. A
    group e**87 below the largest counts as empty; no noise lifts it to a win.
    """
    z = scaled(logits, ids, ids < vocab, temperature, mine)
    top = tl.max(z)
    return top, over_lanes(tl.exp2(z * LOG2E - reference_of(top)))


@triton.jit
def draw_group(sums, first, second, tile, GROUPS: tl.constexpr):
    """The group of a tile that wins, and its score, in powers of two relative to the weights.

    first, second: the key of the group's domain. The score is +inf where a sum is NaN.
    """
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    some = sums > 0
    mass = tl.log2(tl.where(some, sums, 1.0))
    score = tl.where(some, mass + gumbel(word(first, second, groups)) * LOG2E, NOTHING)
    score = tl.where(sums != sums, INFINITE, score)
    best, winner = tl.max(score, axis=0, return_indices=True)
    return best, tile * GROUPS + winner
