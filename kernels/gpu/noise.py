"""The words and numbers of `specdec_kernels.noise`, for Triton kernels.

Words are equal bit for bit to those of the reference. Logarithms are the device's own: they differ
from the reference's by some 1e-6 at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels import noise

GROUP = tl.constexpr(noise.GROUP)
TARGET_TOKEN = tl.constexpr(noise.TARGET_TOKEN)
RESIDUAL_TOKEN = tl.constexpr(noise.RESIDUAL_TOKEN)
DRAFT_TOKEN = tl.constexpr(noise.DRAFT_TOKEN)
REDRAW_TOKEN = tl.constexpr(noise.REDRAW_TOKEN)
ACCEPT = tl.constexpr(noise.ACCEPT)

_GOLDEN = tl.constexpr(0x9E3779B9)
_GOLDEN_TWICE = tl.constexpr(2 * 0x9E3779B9 & 0xFFFFFFFF)
_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * tl.full((), _FIRST, tl.uint32)
    word = word ^ (word >> 15)
    word = word * tl.full((), _SECOND, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def _absorb(state, stream, position, index):
    state = _mix(state ^ stream.to(tl.uint32))
    state = _mix(state ^ (stream >> 32).to(tl.uint32))
    state = _mix(state ^ position.to(tl.uint32))
    return _mix(state ^ (position * 0 + index).to(tl.uint32))


@triton.jit
def key(stream, position, index, domain):
    """Two 32-bit words that all numbers of (stream, position, index, domain) are made from.

    stream, position: int64, any shape; index: an integer, or of that shape; domain: an integer.
    """
    domain = tl.full((), domain, tl.uint32)
    first = _absorb(tl.full((), _GOLDEN, tl.uint32), stream, position, index)
    second = _absorb(tl.full((), _GOLDEN_TWICE, tl.uint32), stream, position, index)
    return _mix(first ^ domain), _mix(second ^ domain)


@triton.jit
def word(first, second, ids):
    """The 32-bit word of an id (or of a group) under a key: uint32, broadcast."""
    return _mix(_mix(ids.to(tl.uint32) ^ first) + second)


@triton.jit
def unit(words):
    """A float32 in (0, 1), at most 1 - 2**-24."""
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def _minus_log1p_minus(u):
    # The logarithm of 1 - u has no digits left where u is small; there
    # -log(1 - u) = 2 atanh(s), s = u / (2 - u), whose series needs five terms below u = 1/4.
    s = u / (2.0 - u)
    t = s * s
    series = 2.0 * s * (1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9)))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, from -2.9 to 22.9."""
    return -tl.log(_minus_log1p_minus(unit(words)))
