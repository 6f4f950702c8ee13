"""Where a row is cut, by one program that searches it: for the rows that `survey` leaves over."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.rows import (
    LARGEST,
    NOTHING,
    clean,
    cleaned,
    over_temperature,
    raw,
    relative,
)

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
def min_p_floor(top, min_p):
    """The log-weight of an id `min_p` times as likely as the likeliest."""
    return tl.where(min_p > 0, top + tl.log(tl.where(min_p > 0, min_p, 1.0)), NOTHING)


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
    here, temperature, top, min_p, top_k, top_p, low, high, vocab, mine,
    SHIFT: tl.constexpr, TILE: tl.constexpr, LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """The smallest log-weight that min-p, then top-k, then top-p keep.

    top: the row's largest. low, high: low <= cut < high, infinite where nothing is known; of the
    cut by top-k too, unless top-k is off.
    """
    cut = min_p_floor(top, min_p)
    lowest = order(tl.full((), NOTHING, tl.float32), SHIFT).to(tl.int64)
    highest = order(tl.full((), LARGEST_RAW, tl.float32), SHIFT).to(tl.int64) + 1
    # a logit and its log-weight times the temperature differ by two roundings
    lowest = tl.maximum(lowest, order(low * temperature, SHIFT).to(tl.int64) - 2)
    highest = tl.minimum(highest, order(high * temperature, SHIFT).to(tl.int64) + 2)
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
