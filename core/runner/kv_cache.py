"""The paged key-value cache: which pages are free, and the tensors behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from specdec.errors import OutOfMemoryError

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class KVSpec:
    """What one attention layer stores per token."""

    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None  # a key is visible iff key position > query position - window

    @property
    def width(self) -> int:
        """Elements per token, keys and values together."""
        return self.heads * (self.k_dim + self.v_dim)


class BlockPool:
    """Hands out page numbers 1 .. num_blocks - 1, on the host, in a repeatable order.

    Block 0 is never handed out: padding rows write there. The most recently released block is
    handed out first; a fresh pool counts upwards.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs block 0 at least; got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that can still be allocated."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Return `n` blocks, or raise OutOfMemoryError and take none."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self._free):
            raise OutOfMemoryError(
                f"{n} cache blocks wanted, {len(self._free)} of {self.num_blocks - 1} are free"
            )
        blocks = [self._free.pop() for _ in range(n)]
        self._taken.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. One that is not allocated (twice free, foreign, 0) is a ValueError.

        Nothing is released when any of them is wrong.
        """
        wrong = sorted(set(blocks) - self._taken)
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"released blocks that are not allocated, or twice: {wrong or blocks}")
        self._taken.difference_update(blocks)
        # Reversed: allocating the same number again yields the same blocks in the same order.
        self._free.extend(reversed(blocks))


class PagedKVCache:
    """Keys and values of every layer, one row per slot; slot = block * block_size + offset."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.specs = list(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        for spec in self.specs:
            self._k.append(_zeros((slots, spec.heads, spec.k_dim), dtype, torch.device(device)))
            self._v.append(_zeros((slots, spec.heads, spec.v_dim), dtype, torch.device(device)))

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, after rotary embedding: [num_blocks * block_size, heads, k_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """Values of a layer: [num_blocks * block_size, heads, v_dim]."""
        return self._v[layer]

    def fill(self, value: float) -> None:
        """Overwrite every slot. Tests and the load-time probe fill with NaN to catch bad reads."""
        for tensor in self._k + self._v:
            tensor.fill_(value)

    @staticmethod
    def bytes_per_block(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one more block costs, all layers together."""
        return block_size * dtype.itemsize * sum(spec.width for spec in specs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a kernel may load a whole page and mask it, and 0 * NaN is NaN.

    On a CPU they are numpy's, which take memory only where they are written: a large cache costs
    a process what it has used of it. torch's own zeros are written at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
