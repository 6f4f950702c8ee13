"""A product with a weight that oneDNN has packed; float32 on a CPU.

With torch's default float32 product two rows cost twice one row, so verifying drafts would not pay.
oneDNN's packed weights make the first few rows nearly free. The operators are private to torch:
where they are missing the weight stays dense.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.runner.row_blocks import RowBlocks

logger = logging.getLogger(__name__)

ROWS_HINT = 8  # what the packed layout is tuned for; 1 would gain nothing
# Fewer rows are padded up to this: weights streamed from memory arrive faster under the kernel for
# 4 rows than under those for 1 and 2 (30 layers of SmolLM2-135M: 22 against 30 and 35 ms).
LEAST_ROWS = 4


class Product:
    """x @ weight.T + bias, each row independent of the others if there are `blocks`.

    head: its rows are chosen ones, not those of the forward that `blocks` has cut.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, blocks: RowBlocks | None, head: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._blocks = blocks
        self._head = head
        self.packed = pack(weight) if available() else None  # in a layout of oneDNN's own
        self._dense = weight if self.packed is None else None
        self._least = LEAST_ROWS
        if blocks is not None:
            self._least = blocks.least.get((self.out_features, self.in_features), LEAST_ROWS)
        self._zeros = weight.new_zeros(self._least, self.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        blocks = self._blocks
        if blocks is None or blocks.rows < 0:
            return self._multiply(x)
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        same = rows == blocks.rows and not self._head
        cuts = blocks.cuts if same else blocks.even(0, rows)
        if len(cuts) == 1:
            return self._multiply(x)
        parts = [self._multiply(flat[start:end]) for start, end in cuts]
        out = torch.cat(parts) if parts else flat.new_empty(0, self.out_features)
        return out.view(*x.shape[:-1], self.out_features)

    def dense(self) -> Tensor:
        """The weight, [out_features, in_features]: a copy where it is packed."""
        if self.packed is None:
            assert self._dense is not None
            return self._dense
        return self.packed.to_dense()

    def _multiply(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows >= self._least:
            return self._padded(x.contiguous())
        if not rows:
            return x.new_empty(*x.shape[:-1], self.out_features)
        flat = torch.cat([x.reshape(rows, self.in_features), self._zeros[rows:]])
        return self._padded(flat)[:rows].view(*x.shape[:-1], self.out_features)

    def _padded(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.dense(), self._bias)
        return packed_product(x, self.packed, self._bias)


def available() -> bool:
    """Whether this build of torch has the packing operators and oneDNN."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    found = built and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    if not found:
        logger.debug("torch %s cannot pack linear layers: using nn.Linear", torch.__version__)
    return found


def pack(weight: Tensor) -> Tensor:
    """Return the weight in oneDNN's layout; opaque, except for `to_dense()`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out], `x` contiguous."""
    # the overload by name: finding the one that fits takes longer
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


def least_rows(weight: Tensor, limit: int) -> int:
    """Return to how many rows to pad for products up to `limit` to agree bit for bit; 0 if none."""
    packed = pack(weight) if available() else None

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight) if packed is None else packed_product(x, packed, None)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(limit, weight.shape[1], generator=generator)
    expected = product(x)
    agree: list[bool] = []
    for rows in range(1, limit + 1):
        offsets = {0, limit - rows}
        same = [torch.equal(product(x[o : o + rows]), expected[o : o + rows]) for o in offsets]
        agree.append(all(same))
    if not torch.equal(product(x.flip(0)).flip(0), expected):
        return 0  # a row's bits depend on where in the block it stands
    # Every count from the least on has to agree. Half the limit at most: with padding to the limit
    # a single row would cost as much as all of them, a smaller limit serves better.
    for least in range(min(LEAST_ROWS, limit // 2), limit // 2 + 1):
        if all(agree[least - 1 :]):
            return least
    return 0
