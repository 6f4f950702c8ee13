"""Linear layers for a CPU: weights packed once, and products whose rows do not depend on company.

With torch's default float32 product two rows cost twice one row, so verifying drafts would not pay.
oneDNN's packed weights make the first few rows nearly free. The operators are private to torch:
where they are missing, or the layer is not float32 on a CPU, `nn.Linear` stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from specdec.errors import ConfigError
from specdec.runner.attention_plan import are_chunks

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ROWS_HINT = 8  # what the packed layout is tuned for; 1 would gain nothing
# Fewer rows are padded up to this: weights streamed from memory arrive faster under the kernel for
# 4 rows than under those for 1 and 2 (30 layers of 576 x 1536: 29 against 36 and 40 ms).
_LEAST_ROWS = 4
_SMALL = 1 << 14  # weights below this many elements gain nothing


@attrs.define(eq=False)
class RowBlocks:
    """How the rows of the running forward are cut into products. One per model.

    `limit` rows at most per product, found by `probe_limit`; a prefill chunk is one product of its
    own. `rows`, `cuts` and `chunks` (the cuts that are chunks) belong to the running forward.
    """

    limit: int
    least: dict[tuple[int, int], int] = attrs.field(factory=dict)  # by weight shape
    rows: int = -1
    cuts: list[tuple[int, int]] = attrs.field(factory=list)
    chunks: set[tuple[int, int]] = attrs.field(factory=set)

    def plan(
        self, rows: int, query_start: Sequence[int], is_prefill: Sequence[bool] | None = None
    ) -> None:
        """Cut the rows of one forward; a prefill chunk is one product. Arguments as in `Rows`."""
        self.rows, self.cuts, first = rows, [], 0
        self.chunks = {
            (start, end)
            for (start, end), chunk in zip(
                pairwise(query_start), are_chunks(query_start, is_prefill), strict=True
            )
            if chunk
        }
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


class PackedLinear(nn.Module):
    """`nn.Linear` or `Conv1D` with the weight packed by oneDNN; float32 on a CPU, inference only.

    blocks: None for speed alone; else every row's result is independent of the other rows.
    keep_dense: keep the original parameter, because someone shares or reads it; otherwise
    `weight` unpacks a copy.
    """

    def __init__(
        self, layer: nn.Module, *, blocks: RowBlocks | None, keep_dense: bool, head: bool
    ) -> None:
        super().__init__()
        weight, bias = _dense(layer), dict(layer.named_parameters()).get("bias")
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.blocks = blocks
        self.head = head
        self.dense: nn.Parameter | None = None
        self._packed: Tensor | None = None
        if available():
            self._packed = _pack(weight)
        if (keep_dense or self._packed is None) and isinstance(layer.weight, nn.Parameter):
            self.dense = layer.weight
        self._transposed = isinstance(layer, Conv1D)
        self._least = _LEAST_ROWS
        if blocks is not None:
            self._least = blocks.least.get((self.out_features, self.in_features), self._least)

    @property
    def weight(self) -> Tensor:
        """The dense weight, shaped as in the layer this replaced; a copy unless it was kept."""
        if self.dense is not None:
            return self.dense
        assert self._packed is not None
        weight = self._packed.to_dense()
        return weight.t() if self._transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows == 0:
            out = x.new_empty(0, self.out_features)
        elif self.blocks is None or self.blocks.rows < 0:
            out = self._product(flat)
        else:
            # The head sees chosen rows, not the forward's: it has no chunks.
            same = rows == self.blocks.rows and not self.head
            cuts = self.blocks.cuts if same else self.blocks.even(0, rows)
            parts = [self._product(flat[start:end]) for start, end in cuts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < self._least:
            x = F.pad(x, (0, 0, 0, self._least - rows))
        if self._packed is None:
            assert self.dense is not None
            weight = self.dense.t() if self._transposed else self.dense
            out = F.linear(x, weight, self.bias)
        else:
            out = _packed_product(x, self._packed, self.bias)
        return out[:rows]


def available() -> bool:
    """Whether this build of torch has the packing operators and oneDNN."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    found = built and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    if not found:
        logger.debug("torch %s cannot pack linear layers: using nn.Linear", torch.__version__)
    return found


def packable(layer: nn.Module) -> bool:
    """Whether the layer is one that PackedLinear can replace."""
    return (
        type(layer) in (nn.Linear, Conv1D)
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
    )


def pack_linears(model: nn.Module, *, head: nn.Module | None, blocks: RowBlocks | None) -> int:
    """Replace the linear layers of `model` in place; return how many.

    Weights that another module holds too (a tied embedding) and the head's stay readable as they
    are; the others exist only packed, so that memory does not double.
    """
    if blocks is None and not available():
        return 0
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    replaced: dict[int, PackedLinear] = {}
    # Parents only: a list of all modules would keep every dense weight alive until the end.
    for parent in [module for module in model.modules() if any(True for _ in module.children())]:
        for name, layer in list(parent.named_children()):
            if not packable(layer):
                continue
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            if blocks is None and weight.numel() < _SMALL:
                continue
            if id(layer) not in replaced:
                replaced[id(layer)] = PackedLinear(
                    layer,
                    blocks=blocks,
                    keep_dense=layer is head or owners[id(weight)] > 1,
                    head=layer is head,
                )
            setattr(parent, name, replaced[id(layer)])
    return len(replaced)


def packed_blocks(model: nn.Module) -> RowBlocks | None:
    """Return the blocks that an earlier target packed `model` with, None if it is not packed.

    Raise ConfigError if it was packed for speed alone: its layers have no dense weight to try.
    """
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if any(layer.blocks is None for layer in packed):
        raise ConfigError(
            "the linear layers of this module were packed by a target without deterministic=True; "
            "load the model again"
        )
    return packed[0].blocks if packed else None


def probe_blocks(layers: Iterable[nn.Module]) -> RowBlocks:
    """Find how many rows a product may have so that each row's bits do not depend on them.

    Tries 8, 4 and 2 rows on every weight shape, each with products of fewer rows padded up to a
    least number; 1 row at a time always works. The answer holds for this build and machine.
    """
    shapes: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        if packable(layer):
            weight = _dense(layer)
            shapes.setdefault((weight.shape[0], weight.shape[1]), weight)
    for limit in (8, 4, 2):
        least = {shape: _least_rows(weight, limit) for shape, weight in shapes.items()}
        if 0 not in least.values():
            return RowBlocks(limit, least)
    logger.warning("products of several rows are not repeatable here: every row runs alone")
    return RowBlocks(1, dict.fromkeys(shapes, 1))


def _least_rows(weight: Tensor, limit: int) -> int:
    """Return to how many rows to pad for products up to `limit` to agree bit for bit; 0 if none."""
    product = _product_of(weight)
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
    for least in range(min(_LEAST_ROWS, limit // 2), limit // 2 + 1):
        if all(agree[least - 1 :]):
            return least
    return 0


def _product_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if not available():
        return lambda x: F.linear(x, weight)
    packed = _pack(weight)
    return lambda x: _packed_product(x, packed, None)


def _dense(layer: nn.Module) -> Tensor:
    """Return the weight as [out, in]."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return (weight.t() if isinstance(layer, Conv1D) else weight).detach().contiguous()


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
