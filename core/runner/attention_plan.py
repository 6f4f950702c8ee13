"""Which rows attend over which cache slots: worked out once per forward, used by every layer.

A request's keys are read where they lie if they are one run of slots, and gathered otherwise, or
if they are so few that one call for several requests is worth the copy. A prefill chunk is a tile
of its own, so that it pays for no padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from specdec.runner.attention_tile import Pieces, Tile, slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Ints = NDArray[np.int64]

FEW_ROWS = 16  # a prompt's rows are a chunk of their own only if they are more than this
KEY_BLOCK = 256  # deterministic: key lengths are multiples of this
QUERY_TILE = 8  # deterministic: query rows of one tile entry, always exactly this many
# Up to so many keys, padding and copying them costs less than another call.
_SMALL_CONTEXT = 256
_FEW_REQUESTS = 2  # and so many requests are not worth a copy


@attrs.frozen(eq=False)
class AttentionPlan:
    """Where this forward's rows are stored and how they attend."""

    rows: int
    real: int  # rows of requests; those that follow are padding
    slots: Tensor  # [rows] where each row's key and value go; block 0 for padding rows
    tiles: list[Tile]
    order: Tensor | None  # [rows] the tiles' rows, one after the other, for each; None: as they are
    _zeros: dict[tuple[int, ...], Tensor] = attrs.field(factory=dict, init=False)

    def assemble(self, parts: list[Tensor]) -> Tensor:
        """The tiles' answers, [1, .., heads, dim] each, by row: [1, rows, heads, dim].

        Padding rows are zeros: they must stay finite in the layers that follow.
        """
        if self.real < self.rows:
            shape = (1, self.rows - self.real, *parts[0].shape[2:])
            if shape not in self._zeros:
                self._zeros[shape] = parts[0].new_zeros(shape)
            parts = [*parts, self._zeros[shape]]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out if self.order is None else out.index_select(1, self.order)


def plan_attention(
    positions: Tensor,
    query_start: Sequence[int] | Ints,
    context: Sequence[int] | Ints,
    block_tables: Tensor,
    block_size: int,
    *,
    deterministic: bool,
    is_prefill: Sequence[bool] | NDArray[np.bool_] | None = None,
) -> AttentionPlan:
    """Lay out one forward. Arguments as in `Rows`; each request's positions are consecutive."""
    device = positions.device
    start, seen = np.asarray(query_start, np.int64), np.asarray(context, np.int64)
    count = np.diff(start)
    rows, real, batch = positions.shape[0], int(start[-1]), len(count)
    request = torch.from_numpy(np.repeat(np.arange(batch), count)).to(device)
    slots = slots_of(block_tables, request, positions[:real], block_size)
    if real < rows:
        slots = torch.cat([slots, slots.new_zeros(rows - real)])

    pieces = Pieces(np.arange(batch), start[:-1], count, seen - count)
    chunked = are_chunks(start, is_prefill)
    firsts = _firsts(block_tables, seen, block_size)

    def tile(which: Pieces, q: int, *, chunk: bool = False, runs: bool = False) -> Tile:
        exact = deterministic and not chunk
        keys = int(which.context.max())
        if exact:
            keys = -(-keys // KEY_BLOCK) * KEY_BLOCK
        return Tile(
            which, block_tables, block_size, q=q, keys=keys, chunk=chunk, exact=exact,
            firsts=firsts[which.request] if runs else None,
        )  # fmt: skip

    tiles = []
    for i in np.flatnonzero(chunked):
        runs = bool(firsts[i] >= 0)
        tiles.append(tile(pieces[i : i + 1], int(count[i]), chunk=True, runs=runs))
    few = pieces[~chunked & (count > 0)]
    if deterministic:
        tiles += [tile(group, QUERY_TILE) for group in _by_context(_cut(few))]
    else:
        short = few.context <= _SMALL_CONTEXT
        in_place = (firsts[few.request] >= 0) & ~(short & (short.sum() > _FEW_REQUESTS))
        single = few.count == 1  # they need neither a mask nor padding to others' drafts
        for group in (few[in_place & single], few[in_place & ~single]):
            if len(group):
                tiles.append(tile(group, int(group.count.max()), runs=True))
        for group in _by_context(few[~in_place]):
            tiles.append(tile(group, int(group.count.max())))
    return AttentionPlan(rows, real, slots, tiles, _order(tiles, rows, real, device))


def are_chunks(
    query_start: Sequence[int] | Ints, is_prefill: Sequence[bool] | NDArray[np.bool_] | None
) -> NDArray[np.bool_]:
    """Which requests are prefill chunks, [batch].

    Not by the number of rows alone: a request whose many drafts are verified has to be computed
    as one with few, or its logits would depend on their number.
    """
    long: NDArray[np.bool_] = np.diff(np.asarray(query_start)) > FEW_ROWS
    return long if is_prefill is None else long & np.asarray(is_prefill, bool)


def _firsts(block_tables: Tensor, context: Ints, block_size: int) -> Ints:
    """The slot of each request's first key if its keys are one run of slots, else -1: [batch].

    Only looked for on a CPU: on a device it would wait for the tables.
    """
    none = np.full(len(context), -1, np.int64)
    if block_tables.device.type != "cpu" or not len(context):
        return none
    used = -(-context // block_size)
    tables = block_tables.numpy()[:, : max(int(used.max()), 1)]
    follows = tables[:, 1:] == tables[:, :-1] + 1
    run = (follows | (np.arange(1, tables.shape[1]) >= used[:, None])).all(1)
    return np.where(run, tables[:, 0] * block_size, none)


def _cut(pieces: Pieces) -> Pieces:
    """The pieces in pieces of QUERY_TILE rows."""
    parts = -(-pieces.count // QUERY_TILE)
    whole = pieces[np.repeat(np.arange(len(pieces)), parts)]
    skipped = QUERY_TILE * (np.arange(len(whole)) - np.repeat(np.cumsum(parts) - parts, parts))
    return Pieces(
        whole.request,
        whole.start + skipped,
        np.minimum(whole.count - skipped, QUERY_TILE),
        whole.position + skipped,
    )


def _by_context(pieces: Pieces) -> list[Pieces]:
    """Group pieces so that padding keys at most doubles the work. Longest contexts first."""
    groups = []
    order = np.argsort(-pieces.context, kind="stable")
    while len(order):
        context = pieces.context[order]
        fits = int((context[0] <= np.maximum(_SMALL_CONTEXT, 2 * context)).sum())
        # Rows in order again: a uniform batch then needs no reordering.
        groups.append(pieces[np.sort(order[:fits])])
        order = order[fits:]
    return groups


def _order(tiles: list[Tile], rows: int, real: int, device: torch.device) -> Tensor | None:
    """Where each row is in what the tiles give one after the other; padding comes after that."""
    came = np.concatenate([tile.rows for tile in tiles]) if tiles else np.zeros(0, np.int64)
    if np.array_equal(came, np.arange(real)):
        return None
    order = np.arange(rows)
    order[came] = np.arange(real)
    return torch.from_numpy(order).to(device)
