"""Ways to draw an id by keyed noise, and how often two laws then draw the same one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels import noise

Floats = NDArray[np.float64]
TINY = 1e-300
UNLIKELY = 1e-9  # groups that both draw less often are left out: 1e-5 in all at most


@attrs.frozen
class Scheme:
    """How ids are drawn: flat (size 1), or in groups of `size`.

    A group is size / piece pieces of `piece` consecutive ids each; from one piece to the next it is
    `stride` pieces. With piece = size and stride = 1 groups are of consecutive ids.
    """

    name: str
    size: int = 1
    piece: int = 1
    stride: int | None = None  # None: as far apart as V allows

    def _shape(self, vocab: int) -> tuple[int, int, int, int]:
        """Ids padded to blocks of: pieces of a group, groups, ids of a piece."""
        pieces = self.size // self.piece
        # a multiple of 16, so that tiles load whole vectors
        stride = self.stride or -(-vocab // (self.size * 16)) * 16
        blocks = -(-vocab // (self.size * stride))
        return blocks, pieces, stride, self.piece

    def groups(self, vocab: int) -> int:
        """How many there are, empty ones included."""
        blocks, _, stride, _ = self._shape(vocab)
        return blocks * stride

    def members(self, row: Floats) -> Floats:
        """Values [V] by group: [groups, size], with 0 where they lack ids."""
        shape = self._shape(len(row))
        full = np.pad(row, (0, math.prod(shape) - len(row))).reshape(shape)
        return full.swapaxes(1, 2).reshape(-1, self.size)

    def agreement(self, p: Floats, q: Floats) -> float:
        """The probability that two laws [V] with the same noise draw the same id."""
        if self.size == 1:
            return float(both(p, q).sum())
        p, q = self.members(p), self.members(q)
        group = both(p.sum(-1), q.sum(-1))
        likely = group > UNLIKELY
        return float((group[likely] * both(p[likely], q[likely]).sum(-1)).sum())

    def draw(self, log_weights: Tensor, stream: Tensor, position: Tensor) -> Tensor:
        """One id per row, by the package's noise: float32 [n, V] to int64 [n]."""
        vocab = log_weights.shape[1]
        shape = self._shape(vocab)
        ids = torch.arange(math.prod(shape), device=log_weights.device)
        ids = ids.view(shape).transpose(1, 2).flatten()  # by group
        full = pad(log_weights, (0, len(ids) - vocab), value=-math.inf)
        with group_size(self.size):
            place = noise.draw(full[:, ids], stream, position, noise.TARGET_TOKEN)
        return ids[place]


def consecutive(size: int) -> Scheme:
    """Groups of consecutive ids, as the package has them."""
    return Scheme(f"groups of {size}", size, piece=size, stride=1)


FLAT = Scheme("flat", stride=1)
SCHEMES = [
    FLAT,
    *(consecutive(size) for size in (8, 16, 32, 64, 128)),
    *(Scheme(f"{size}, strided", size) for size in (32, 128)),
    Scheme("32 by 128", 32, stride=128),
    Scheme("32 by 1024, in eights", 32, piece=8, stride=128),
]


def both(p: Floats, q: Floats) -> Floats:
    """The probability of each outcome to win both draws: [..., n]. Weights of any scale."""
    order = np.argsort(p / np.maximum(q, TINY), axis=-1)
    p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
    # where p_j / q_j is larger than here, p_j / p_i is the larger of the two ratios; else the other
    above = np.flip(np.cumsum(np.flip(p, -1), -1), -1)
    below = np.cumsum(q, -1) - q
    chance = p * q / np.maximum(above * q + below * p, TINY)
    found = np.empty_like(chance)
    np.put_along_axis(found, order, chance, -1)
    return found


@contextmanager
def group_size(size: int) -> Iterator[None]:
    """Let `noise.draw` use groups of another size."""
    before = noise.GROUP
    noise.GROUP = size
    try:
        yield
    finally:
        noise.GROUP = before
