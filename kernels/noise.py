"""All randomness of the package: keyed, stateless, and replaceable as a whole.

A random number is a pure function of (stream, position, index, domain, id). Nothing is drawn in
sequence, so nothing depends on batch order, padding, neighbours or the number of drafts. The 32-bit
words are the same on every device; the logarithms taken of them may differ in the last bit.

The scheme is NOT frozen: no test or user may rely on the tokens a given seed produces.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

# Ids [g * GROUP, (g + 1) * GROUP) are drawn as one, then the id within. 1 is one flat draw.
GROUP = 32

# Draws from the whole law, one after the other, until truncation keeps one; then one from what it
# keeps. Each has its own `index`.
ATTEMPTS = 4

# What a number is for. `draw` takes a *_TOKEN domain and uses the next one to choose the group.
TARGET_TOKEN, TARGET_GROUP = 0, 1
RESIDUAL_TOKEN, RESIDUAL_GROUP = 2, 3
DRAFT_TOKEN, DRAFT_GROUP = 4, 5
ACCEPT = 6
REDRAW_TOKEN, REDRAW_GROUP = 7, 8

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN32 = 0x9E3779B9
_GOLDEN64 = 0x9E3779B97F4A7C15


def make_stream(seed: int, index: int) -> int:
    """The stream of completion `index` of a request seeded `seed`, as a signed 64-bit integer.

    Different indices never share a stream under one seed. `seed` counts modulo 2**64.
    """
    word = _mix64((_mix64((seed + _GOLDEN64) & _MASK64) + index) & _MASK64)
    return word - (1 << 64) if word >> 63 else word


def uniform(stream: Tensor, position: Tensor, domain: int, index: Tensor | int) -> Tensor:
    """Float32 in the open interval (0, 1), one per element of the arguments broadcast together."""
    state = _state(stream, position, index)
    lone = torch.zeros(1, dtype=torch.int64, device=stream.device)
    return _unit(_words(state, torch.zeros_like(stream) + domain, lone)).squeeze(-1)


def draw(
    log_weights: Tensor,
    stream: Tensor,
    position: Tensor,
    domain: Tensor | int,
    index: Tensor | int = 0,
) -> Tensor:
    """One id per row, with probability proportional to exp(log_weights).

    log_weights: float32 [R, V], any offset per row; -inf excludes an id. NaN excludes its whole
        group, so callers replace it first.
    stream, position: int64 [R]; domain, index: int, or int64 [R].
    Returns int64 [R]. Of a row that excludes every id: 0.

    Two levels of Gumbel-max: a group with its log-sum-exp as weight, then an id within it. That is
    exact (P(group) is the group's mass, P(id | group) the rest) and takes V / GROUP + GROUP
    logarithms where the flat draw takes V.
    """
    vocab = log_weights.shape[-1]
    groups = -(-vocab // GROUP)
    if vocab % GROUP:
        log_weights = pad(log_weights, (0, groups * GROUP - vocab), value=-inf)
    members = log_weights.view(-1, groups, GROUP)

    state = _state(stream, position, index)
    domain = torch.zeros_like(stream) + domain
    row = torch.arange(len(stream), device=stream.device)
    ids = torch.arange(groups, device=stream.device)
    mass = _ordered(members.logsumexp(-1))
    # centred, so that large weights do not swallow the digits of the noise
    top = mass.amax(-1, keepdim=True)
    group = (_ordered(mass - top) + _gumbel(_words(state, domain + 1, ids))).argmax(-1)
    ids = group[:, None] * GROUP + torch.arange(GROUP, device=stream.device)
    chosen = members[row, group] - top
    member = (_ordered(chosen) + _gumbel(_words(state, domain, ids))).argmax(-1)
    return group * GROUP + member


def _ordered(weights: Tensor) -> Tensor:
    """NaN below everything and infinity a float, so that adding noise and argmax are defined."""
    return torch.nan_to_num(weights, nan=-inf, neginf=-inf)


def _state(stream: Tensor, position: Tensor, index: Tensor | int) -> Tensor:
    """Two independent 32-bit words of (stream, position, index): int64 [..., 2]."""
    state = torch.arange(1, 3, device=stream.device) * _GOLDEN32 & _MASK32
    for word in (stream, stream >> 32, position, torch.zeros_like(position) + index):
        state = _mix(state ^ (word & _MASK32).unsqueeze(-1))
    return state


def _words(state: Tensor, domain: Tensor, ids: Tensor) -> Tensor:
    """A 32-bit word for every id: int64, `state`'s leading shape and then that of the ids."""
    lanes = _mix(state ^ domain.unsqueeze(-1))
    first, second = lanes[..., :1], lanes[..., 1:]
    # Two rounds with different words: after one, rows whose first words are close to each other
    # would hold the same values in another order.
    return _mix((_mix(ids ^ first) + second) & _MASK32)


def _unit(words: Tensor) -> Tensor:
    # float32 rounds the top words up to 1, which has no finite Gumbel value
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, from -2.9 to 22.9."""
    # not -log(-log(u)): large values then come from small u, where floats lie dense
    return -torch.log(-torch.log1p(-_unit(words)))


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words: the public-domain finalizer `lowbias32` by Chris Wellons."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _MASK32
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _MASK32
    return word ^ (word >> 16)


def _mix64(word: int) -> int:
    """A bijection of 64-bit words: the public-domain finalizer of `splitmix64`."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK64
    return word ^ (word >> 31)
