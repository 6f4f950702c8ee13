"""A tile: the rows of some requests and the keys they may see, attended over in one go."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.runner.kv_cache import PagedKVCache

Ints = NDArray[np.int64]
_Limits = tuple[int | None, int | None]  # window, chunk


@attrs.frozen(eq=False)
class Pieces:
    """Rows start .. start + count of each request; its first row sits at `position`. [n] each."""

    request: Ints
    start: Ints
    count: Ints
    position: Ints

    @property
    def context(self) -> Ints:
        """Keys that the last row of each sees."""
        context: Ints = self.position + self.count
        return context

    def __len__(self) -> int:
        return len(self.request)

    def __getitem__(self, which: NDArray[np.generic] | slice) -> Pieces:
        return Pieces(
            self.request[which], self.start[which], self.count[which], self.position[which]
        )


class Tile:
    """Pieces that are attended over together, in order of their rows.

    Padded query rows repeat the piece's last row, padded keys repeat its last key (masked), so
    nothing is read that the request did not write and no row is without a visible key.

    q: query rows of each piece, padding included. keys: of each piece, padding included.
    firsts: the slot of each piece's first key where its keys lie in one run of slots, and are
        read where they are. None: they are gathered.
    """

    def __init__(
        self,
        pieces: Pieces,
        block_tables: Tensor,
        block_size: int,
        *,
        q: int,
        keys: int,
        chunk: bool,  # one prefill chunk
        exact: bool,  # deterministic and not a chunk
        firsts: Ints | None,
    ) -> None:
        self.pieces = pieces
        self.q = q
        self.keys = keys
        self.chunk = chunk
        self.exact = exact
        self.firsts = firsts
        self._tables = block_tables
        self._block_size = block_size
        self._padded = bool((pieces.count != q).any())
        self._masks: dict[tuple[_Limits, torch.dtype], Tensor] = {}
        self._folded: dict[tuple[_Limits, torch.dtype, int], Tensor] = {}
        self._views: dict[_Limits, dict[int, list[tuple[Tensor, Tensor]]]] = {}
        self._piece_masks: dict[tuple[_Limits, torch.dtype, int], list[Tensor]] = {}
        self._head_index: dict[tuple[int, int], Tensor] = {}
        self._scratch: dict[tuple[str, int, int, torch.dtype], Tensor] = {}

    @property
    def entries(self) -> int:
        """Pieces in this tile."""
        return len(self.pieces)

    @cached_property
    def rows(self) -> Ints:
        """The row of the forward that each of the tile's is, without padding."""
        return self.pieces.start[self._entry] + self._within

    @cached_property
    def row_slice(self) -> tuple[int, int] | None:
        """First row and number, where the rows are one run without padding."""
        start, count = self.pieces.start, self.pieces.count
        if self._padded or not np.array_equal(start[1:], start[:-1] + count[:-1]):
            return None
        return int(start[0]), self.q * self.entries

    @cached_property
    def q_index(self) -> Tensor:
        """The rows, padded ones included: [n * q]."""
        return self._put((self.pieces.start[:, None] + self._steps).reshape(-1))

    @cached_property
    def out_from(self) -> Tensor | None:
        """Which of n * q rows are real; None: all."""
        return self._put(self._entry * self.q + self._within) if self._padded else None

    @cached_property
    def padded_keys(self) -> bool:
        """Whether a piece has fewer keys than the tile."""
        return bool((self.pieces.context != self.keys).any())

    def spans(self, window: int | None, chunk: int | None) -> list[tuple[int, int, int]]:
        """What each piece of a tile that is not gathered reads: (first key, its slot, keys).

        Keys before that are hidden from all of its rows.
        """
        assert self.firsts is not None
        first = np.zeros_like(self.pieces.position)
        if window is not None:
            first = np.maximum(first, self.pieces.position - window + 1)
        if chunk is not None:
            first = np.maximum(first, self.pieces.position // chunk * chunk)
        columns = (first, self.firsts + first, self.pieces.context - first)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def views(
        self, cache: PagedKVCache, layer: int, window: int | None, chunk: int | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a layer that each piece reads, where they lie: [heads, 1, keys, dim].

        Made for all layers at once: between two layers' products each would cost several times as
        much.
        """
        views = self._views.setdefault((window, chunk), {})
        if layer not in views:
            spans = self.spans(window, chunk)
            for other, spec in enumerate(cache.specs):
                if spec.window == window or other == layer:
                    k, v = cache.by_head(other)
                    views[other] = [(k.narrow(2, s, n), v.narrow(2, s, n)) for _, s, n in spans]
        return views[layer]

    def piece_masks(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, group: int
    ) -> list[Tensor] | list[None]:
        """The folded mask over what `views` gives for each piece: [1, group * q, keys]."""
        if self.q == 1:
            return [None] * self.entries
        key = ((window, chunk), dtype, group)
        if key not in self._piece_masks:
            mask = self.folded_mask(window, chunk, dtype, group)
            self._piece_masks[key] = [
                mask[i, ..., first : first + keys]
                for i, (first, _, keys) in enumerate(self.spans(window, chunk))
            ]
        return self._piece_masks[key]

    def gathered(self, cache: Tensor, name: str) -> Tensor:
        """Keys or values (`name`) of a layer, [heads, 1, slots, dim] -> [n, heads, keys, dim].

        Good until the next call of that name: the memory is used again, as fresh memory would cost
        page faults on every layer.
        """
        heads, _, _, dim = cache.shape
        key = (name, heads, dim, cache.dtype)
        if key not in self._scratch:
            self._scratch[key] = cache.new_empty(heads, 1, self.entries * self.keys, dim)
        out = torch.index_select(cache, 2, self._key_index.view(-1), out=self._scratch[key])
        return out.view(heads, self.entries, self.keys, dim).transpose(0, 1)

    def gathered_by_head(self, cache: Tensor, name: str) -> Tensor:
        """As `gathered`, contiguous: [n * heads, keys, dim]."""
        heads, _, slots, dim = cache.shape
        if (heads, slots) not in self._head_index:
            offsets = torch.arange(heads, device=cache.device) * slots
            index = self._key_index[:, None, :] + offsets[None, :, None]
            self._head_index[heads, slots] = index.reshape(-1)
        index, key = self._head_index[heads, slots], (name, heads, dim, cache.dtype)
        if key not in self._scratch:
            self._scratch[key] = cache.new_empty(len(index), dim)
        out = torch.index_select(cache.view(-1, dim), 0, index, out=self._scratch[key])
        return out.view(self.entries * heads, self.keys, dim)

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, q, keys]: 0 where the key is visible, -inf elsewhere."""
        key = ((window, chunk), dtype)
        if key not in self._masks:
            q = self._put(self.pieces.position[:, None] + self._steps)[:, :, None]
            # A padded key lies beyond every row of its piece, so causality alone hides it.
            k = torch.arange(self.keys, device=q.device)[None, None]
            hidden = k > q
            if window is not None:
                hidden |= k <= q - window
            if chunk is not None:
                hidden |= k // chunk != q // chunk
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))
        return self._masks[key]

    def folded_mask(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, group: int
    ) -> Tensor:
        """The mask for `group` query heads laid out as further rows: [n, 1, group * q, keys]."""
        key = ((window, chunk), dtype, group)
        if key not in self._folded:
            mask = self.mask(window, chunk, dtype)[:, None].expand(-1, group, -1, -1)
            self._folded[key] = mask.reshape(self.entries, 1, group * self.q, self.keys)
        return self._folded[key]

    @cached_property
    def _key_index(self) -> Tensor:
        """[n, keys] cache slots."""
        last = self._put(self.pieces.context - 1)[:, None]
        key = torch.minimum(torch.arange(self.keys, device=last.device)[None], last)
        request = self._put(self.pieces.request)[:, None]
        return slots_of(self._tables, request, key, self._block_size)

    @cached_property
    def _steps(self) -> Ints:
        """[n, q] from a piece's first row to each of its rows."""
        steps: Ints = np.minimum(np.arange(self.q), self.pieces.count[:, None] - 1)
        return steps

    @cached_property
    def _entry(self) -> Ints:
        return np.repeat(np.arange(self.entries), self.pieces.count)

    @cached_property
    def _within(self) -> Ints:
        before = np.cumsum(self.pieces.count) - self.pieces.count
        within: Ints = np.arange(len(self._entry)) - before[self._entry]
        return within

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._tables.device)


def slots_of(tables: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Cache slots of positions of requests, by their block tables."""
    return tables[request, positions // block_size] * block_size + positions % block_size
