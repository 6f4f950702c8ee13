"""How the rows of a forward are cut into products whose rows do not depend on company."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.runner.attention_plan import are_chunks


@attrs.define(eq=False)
class RowBlocks:
    """How the rows of the running forward are cut into products. One per model.

    `limit` rows at most per product, found by `probe_blocks`; a prefill chunk is one product of its
    own. `rows`, `cuts` and `chunks` (the cuts that are chunks) belong to the running forward.
    """

    limit: int
    least: dict[tuple[int, int], int] = attrs.field(factory=dict)  # by weight shape
    rows: int = -1
    cuts: list[tuple[int, int]] = attrs.field(factory=list)
    chunks: set[tuple[int, int]] = attrs.field(factory=set)

    def plan(
        self,
        rows: int,
        query_start: Sequence[int] | NDArray[np.int64],
        is_prefill: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> None:
        """Cut the rows of one forward; a prefill chunk is one product. Arguments as in `Rows`."""
        self.rows, self.cuts, first = rows, [], 0
        spans = list(pairwise(np.asarray(query_start).tolist()))
        chunks = np.flatnonzero(are_chunks(query_start, is_prefill)).tolist()
        self.chunks = {spans[i] for i in chunks}
        for start, end in sorted(self.chunks):
            self.cuts += [*self.even(first, start), (start, end)]
            first = end
        self.cuts += self.even(first, rows)

    def clear(self) -> None:
        """Forget the forward: later calls on whole sequences are one product each."""
        self.rows, self.cuts, self.chunks = -1, [], set()

    def even(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut rows start .. end into blocks of at most `limit`."""
        return [(i, min(i + self.limit, end)) for i in range(start, end, self.limit)]
