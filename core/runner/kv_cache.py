"""The paged key-value cache: which pages are free, and the tensors behind them."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
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

    Block 0 is never handed out: padding rows write there. What is handed out depends on what is
    free and on nothing else.

    Requests are kept far apart, each with free blocks behind it: one that grows then stays in one
    run of blocks, and its keys can be read where they lie.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs block 0 at least; got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self._taken: set[int] = set()
        # Gaps are maximal runs of free blocks, first .. end - 1, found from either side.
        self._end: dict[int, int] = {}
        self._first: dict[int, int] = {}
        # By size, the largest first; entries of gaps that have changed are skipped when they come.
        self._by_size: list[tuple[int, int]] = []
        if num_blocks > 1:
            self._open(1, num_blocks)

    @property
    def free(self) -> int:
        """Blocks that can still be allocated."""
        return self.num_blocks - 1 - len(self._taken)

    def allocate(self, n: int, *, after: int | None = None) -> list[int]:
        """Return `n` blocks, or raise OutOfMemoryError and take none.

        after: an allocated block that they should follow, the last one of a request that grows.
            They do as far as the blocks behind it are free. Without it they are a run of their
            own if any gap holds them, in the middle of the largest.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if after is not None and after not in self._taken:
            raise ValueError(f"block {after} is not allocated, so nothing can follow it")
        if n > self.free:
            raise OutOfMemoryError(
                f"{n} cache blocks wanted, {self.free} of {self.num_blocks - 1} are free"
            )
        blocks: list[int] = []
        if after is not None and after + 1 in self._end:
            first = after + 1
            blocks += self._take(first, first, min(n, self._end[first] - first))
        while len(blocks) < n:
            first, size = self._largest()
            wanted = min(n - len(blocks), size)
            # Half of what is left stays with whoever ends before the gap.
            spared = 0 if first == 1 else (size - wanted) // 2
            blocks += self._take(first, first + spared, wanted)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. One that is not allocated (twice free, foreign, 0) is a ValueError.

        Nothing is released when any of them is wrong.
        """
        wrong = sorted(set(blocks) - self._taken)
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"released blocks that are not allocated, or twice: {wrong or blocks}")
        if not blocks:
            return
        self._taken.difference_update(blocks)
        ordered = sorted(blocks)
        breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
        for i, j in pairwise([0, *breaks, len(ordered)]):
            first, end = ordered[i], ordered[j - 1] + 1
            if first in self._first:  # a gap ends where this run starts
                first = self._first[first]
                self._close(first)
            if end in self._end:
                end = self._close(end)
            self._open(first, end)

    def _take(self, gap: int, first: int, n: int) -> list[int]:
        """Allocate n blocks from `first` on, out of the gap that starts at `gap`."""
        if not n:
            return []
        end = self._close(gap)
        if gap < first:
            self._open(gap, first)
        if first + n < end:
            self._open(first + n, end)
        blocks = list(range(first, first + n))
        self._taken.update(blocks)
        return blocks

    def _open(self, first: int, end: int) -> None:
        self._end[first], self._first[end] = end, first
        heappush(self._by_size, (first - end, first))
        if len(self._by_size) > 2 * len(self._end) + 64:
            self._by_size = [(a - b, a) for a, b in self._end.items()]
            heapify(self._by_size)

    def _close(self, first: int) -> int:
        """Forget a gap; return its end."""
        end = self._end.pop(first)
        del self._first[end]
        return end

    def _largest(self) -> tuple[int, int]:
        """First block and size of the largest gap, the lowest of equals. There is one."""
        while True:
            size, first = self._by_size[0]
            if self._end.get(first) == first - size:
                return first, -size
            heappop(self._by_size)


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
        layers = [self._zeros(spec, dtype, torch.device(device)) for spec in self.specs]
        self._by_head = [(k[:, None], v[:, None]) for k, v, _ in layers]
        self._joined = [joined for _, _, joined in layers]

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, after rotary embedding: [num_blocks * block_size, heads, k_dim].

        A view, and not contiguous on a CPU.
        """
        return self._by_head[layer][0][:, 0].transpose(0, 1)

    def v(self, layer: int) -> Tensor:
        """Values of a layer: [num_blocks * block_size, heads, v_dim]. A view like that of `k`."""
        return self._by_head[layer][1][:, 0].transpose(0, 1)

    def by_head(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as attention reads them: [heads, 1, num_blocks * block_size, dim]."""
        return self._by_head[layer]

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rows to their slots. key, value: [1, heads, rows, dim]; slots: [rows]."""
        joined = self._joined[layer]
        if joined is not None:
            joined.index_copy_(2, slots, torch.cat([key, value]))
            return
        for cache, rows in zip(self._by_head[layer], (key, value), strict=True):
            cache.index_copy_(2, slots, rows.transpose(0, 1))

    def fill(self, value: float) -> None:
        """Overwrite every slot. Tests and the load-time probe fill with NaN to catch bad reads."""
        for tensors in self._by_head:
            for tensor in tensors:
                tensor.fill_(value)

    def _zeros(
        self, spec: KVSpec, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of a layer, [heads, slots, dim], and both as one: [2, heads, slots, dim].

        A CPU reads a request's keys head by head: there a head's keys lie side by side, which is
        up to 1.5 times faster at long contexts, and keys and values of one size are one tensor,
        because one write costs half of two. Elsewhere a token's heads lie side by side.
        """
        slots = self.num_blocks * self.block_size
        if device.type == "cpu" and spec.k_dim == spec.v_dim:
            joined = _zeros((2, spec.heads, slots, spec.k_dim), dtype, device)
            return joined[0], joined[1], joined
        k, v = (
            _zeros((spec.heads, slots, dim), dtype, device)
            if device.type == "cpu"
            else _zeros((slots, spec.heads, dim), dtype, device).transpose(0, 1)
            for dim in (spec.k_dim, spec.v_dim)
        )
        return k, v, None

    @staticmethod
    def bytes_per_block(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one more block costs, all layers together."""
        return block_size * dtype.itemsize * sum(spec.width for spec in specs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a kernel may load a whole page and mask it, and 0 * NaN is NaN.

    On a CPU the memory is taken page by page where it is written: a large cache costs a process
    what it has used of it. torch's own zeros are written at once, numpy's come in pages of 2 MB,
    of which requests that lie far apart would touch one for each head of each layer.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = max(math.prod(shape) * dtype.itemsize, 1)
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size)
    else:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return (
        torch.frombuffer(memory, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(shape)
    )
