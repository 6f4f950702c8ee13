"""Which rows attend over which cache slots: worked out once per forward, used by every layer.

A *tile* is one attention call. Decoding requests, which have a few rows each, share tiles, padded
to the longest; a prefill chunk is a tile of its own, so that it pays for no padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FEW_ROWS = 16  # a prompt's rows are a chunk of their own only if they are more than this
KEY_BLOCK = 256  # deterministic: key lengths are multiples of this
QUERY_TILE = 8  # deterministic: query rows of one tile entry, always exactly this many
_SMALL_CONTEXT = 256  # below this, padding keys costs less than another call


class Tile:
    """Some requests' rows and the keys they may see.

    Padded query rows repeat the entry's last row, padded keys repeat its last key (masked), so
    nothing is read that the request did not write and no row is without a visible key.
    """

    def __init__(
        self,
        q_index: Tensor,  # [n, q] rows
        q_positions: Tensor,  # [n, q]
        key_index: Tensor,  # [n, keys] cache slots
        key_positions: Tensor,  # [n, keys]; a padded key has a position no row reaches
        *,
        out_from: Tensor | None,  # [m] index into n * q of every real row; None: all, in order
        out_rows: Tensor | None,  # [m] the row each of them is; None: those of `row_slice`
        chunk: bool,  # one prefill chunk
        exact: bool,  # deterministic and not a chunk
        padded_keys: bool,
        key_slice: slice | None,  # the keys as one run of slots, where they are one
        row_slice: slice | None,  # the rows as one run without padding, where they are one
    ) -> None:
        self.q_index = q_index
        self.key_index = key_index
        self.out_from = out_from
        self.out_rows = out_rows
        self.chunk = chunk
        self.exact = exact
        self.padded_keys = padded_keys
        self.key_slice = key_slice
        self.row_slice = row_slice
        self._q_positions = q_positions
        self._key_positions = key_positions
        self._masks: dict[tuple[int | None, int | None, torch.dtype], Tensor] = {}
        self._folded: dict[tuple[int | None, int | None, torch.dtype, int], Tensor] = {}
        self._head_index: dict[int, Tensor] = {}

    @property
    def entries(self) -> int:
        """Requests (or pieces of them) in this tile."""
        return self.q_index.shape[0]

    @property
    def q(self) -> int:
        """Query rows per entry, padding included."""
        return self.q_index.shape[1]

    @property
    def keys(self) -> int:
        """Keys per entry, padding included."""
        return self.key_index.shape[1]

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, q, keys]: 0 where the key is visible, -inf elsewhere."""
        key = (window, chunk, dtype)
        if key not in self._masks:
            q, k = self._q_positions[:, :, None], self._key_positions[:, None, :]
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
        key = (window, chunk, dtype, group)
        if key not in self._folded:
            mask = self.mask(window, chunk, dtype)[:, None].expand(-1, group, -1, -1)
            self._folded[key] = mask.reshape(self.entries, 1, group * self.q, self.keys)
        return self._folded[key]

    def head_index(self, heads: int) -> Tensor:
        """Rows of a cache viewed as [slots * heads, dim], ordered [n, heads, keys]."""
        if heads not in self._head_index:
            offsets = torch.arange(heads, device=self.key_index.device)
            index = self.key_index[:, None, :] * heads + offsets[None, :, None]
            self._head_index[heads] = index.reshape(-1)
        return self._head_index[heads]


@attrs.frozen(eq=False)
class AttentionPlan:
    """Where this forward's rows are stored and how they attend."""

    rows: int
    slots: Tensor  # [rows] where each row's key and value go; block 0 for padding rows
    tiles: list[Tile]
    complete: bool  # one tile yields every row in order


@attrs.frozen
class _Piece:
    """Rows start .. start + count of one request; its first row sits at `position`."""

    request: int
    start: int
    count: int
    position: int

    @property
    def context(self) -> int:
        return self.position + self.count


def plan_attention(
    positions: Tensor,
    query_start: Sequence[int],
    context: Sequence[int],
    block_tables: Tensor,
    block_size: int,
    *,
    deterministic: bool,
    is_prefill: Sequence[bool] | None = None,
) -> AttentionPlan:
    """Lay out one forward. Arguments as in `Rows`; each request's positions are consecutive."""
    device = positions.device
    rows, batch = positions.shape[0], len(query_start) - 1
    counts = [query_start[i + 1] - query_start[i] for i in range(batch)]
    real = query_start[-1]
    request = torch.repeat_interleave(
        torch.arange(batch, device=device), torch.tensor(counts, device=device), output_size=real
    )
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    slots[:real] = _slots(block_tables, request, positions[:real], block_size)

    few: list[_Piece] = []
    chunks: list[_Piece] = []
    chunked = are_chunks(query_start, is_prefill)
    for i, count in enumerate(counts):
        first = context[i] - count
        if chunked[i]:
            chunks.append(_Piece(i, query_start[i], count, first))
        elif deterministic:
            few += [
                _Piece(i, query_start[i] + j, min(QUERY_TILE, count - j), first + j)
                for j in range(0, count, QUERY_TILE)
            ]
        elif count:
            few.append(_Piece(i, query_start[i], count, first))
    tiles = [
        _tile([piece], block_tables, block_size, device, chunk=True, exact=False)
        for piece in chunks
    ]
    tiles += [
        _tile(group, block_tables, block_size, device, chunk=False, exact=deterministic)
        for group in _by_context(few)
    ]
    complete = len(tiles) == 1 and tiles[0].row_slice == slice(0, rows)
    return AttentionPlan(rows, slots, tiles, complete)


def are_chunks(query_start: Sequence[int], is_prefill: Sequence[bool] | None) -> list[bool]:
    """Which requests are prefill chunks, [batch].

    Not by the number of rows alone: a request whose many drafts are verified has to be computed
    as one with few, or its logits would depend on their number.
    """
    long = [end - start > FEW_ROWS for start, end in pairwise(query_start)]
    if is_prefill is None:
        return long
    return [a and b for a, b in zip(long, is_prefill, strict=True)]


def _slots(tables: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return tables[request, positions // block_size] * block_size + positions % block_size


def _by_context(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Group pieces so that padding keys at most doubles the work. Longest contexts first."""
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.context):
        longest = groups[-1][0].context if groups else 0
        if groups and longest <= max(_SMALL_CONTEXT, 2 * piece.context):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    # Rows in order again: a uniform batch then needs no reordering.
    return [sorted(group, key=lambda piece: piece.start) for group in groups]


def _tile(
    pieces: list[_Piece],
    block_tables: Tensor,
    block_size: int,
    device: torch.device,
    *,
    chunk: bool,
    exact: bool,
) -> Tile:
    q = QUERY_TILE if exact else max(piece.count for piece in pieces)
    keys = max(piece.context for piece in pieces)
    if exact:
        keys = -(-keys // KEY_BLOCK) * KEY_BLOCK

    host = np.array([[p.request, p.start, p.count, p.position] for p in pieces], dtype=np.int64)
    request, start, count, position = torch.from_numpy(host).to(device).unbind(1)
    step = torch.minimum(torch.arange(q, device=device), count[:, None] - 1)  # [n, q]
    last = (position + count - 1)[:, None]  # [n, 1]
    key = torch.arange(keys, device=device)[None]  # [1, keys]
    key_index = _slots(block_tables, request[:, None], torch.minimum(key, last), block_size)

    padded_rows = any(piece.count != q for piece in pieces)
    follow = all(a.start + a.count == b.start for a, b in pairwise(pieces))
    run = follow and not padded_rows
    out_from = out_rows = None
    if not run:
        counts = host[:, 2]
        entry = np.repeat(np.arange(len(pieces)), counts)
        within = np.arange(len(entry)) - (np.cumsum(counts) - counts)[entry]
        out_rows = torch.from_numpy(host[entry, 1] + within).to(device)
        if padded_rows:
            out_from = torch.from_numpy(entry * q + within).to(device)
    return Tile(
        start[:, None] + step,
        position[:, None] + step,
        key_index,
        # A padded key lies beyond every row of its entry, so causality alone hides it.
        key.expand(len(pieces), keys),
        out_from=out_from,
        out_rows=out_rows,
        chunk=chunk,
        exact=exact,
        padded_keys=any(piece.context != keys for piece in pieces),
        key_slice=_run(key_index) if not exact else None,
        row_slice=slice(pieces[0].start, pieces[-1].start + pieces[-1].count) if run else None,
    )


def _run(key_index: Tensor) -> slice | None:
    """One run of slots needs no gather. Only looked for on the CPU: on a device it would sync."""
    if key_index.device.type != "cpu" or key_index.shape[0] != 1:
        return None
    slots = key_index[0]
    if slots.shape[0] > 1 and not bool((slots[1:] - slots[:-1] == 1).all()):
        return None
    first = int(slots[0])
    return slice(first, first + slots.shape[0])
