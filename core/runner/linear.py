"""Linear layers for a CPU: weights packed once, siblings as one product, rows free of company.

The layers of a model are replaced in place; those that are not float32 on a CPU stay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.errors import ConfigError
from specdec.runner.huge_pages import use_huge_pages
from specdec.runner.linear_groups import GroupPart, LinearGroup, Siblings
from specdec.runner.product import Product, available, least_rows
from specdec.runner.row_blocks import RowBlocks

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_SMALL = 1 << 14  # weights below this many elements gain nothing


class PackedLinear(nn.Module):
    """`nn.Linear` or `Conv1D` over a packed weight; float32 on a CPU, inference only.

    source: computes it, alone or together with siblings.
    blocks: None for speed alone; else every row's result is independent of the other rows.
    keep_dense: keep the original parameter, because someone shares or reads it; otherwise
    `weight` unpacks a copy.
    """

    def __init__(
        self,
        layer: nn.Module,
        source: Product | GroupPart,
        *,
        blocks: RowBlocks | None,
        keep_dense: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = _dense(layer).shape
        self.bias = dict(layer.named_parameters()).get("bias")
        self.blocks = blocks
        self.dense: nn.Parameter | None = None
        if keep_dense and isinstance(layer.weight, nn.Parameter):
            self.dense = layer.weight
        self._source = source
        self._transposed = isinstance(layer, Conv1D)

    @property
    def weight(self) -> Tensor:
        """The dense weight, shaped as in the layer this replaced; a copy unless it was kept."""
        if self.dense is not None:
            return self.dense
        weight = self._source.dense()
        return weight.t() if self._transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._source(x)


def packable(layer: nn.Module) -> bool:
    """Whether the layer is one that PackedLinear can replace."""
    return (
        type(layer) in (nn.Linear, Conv1D)
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
    )


def pack_linears(
    model: nn.Module,
    *,
    head: nn.Module | None,
    blocks: RowBlocks | None,
    siblings: Siblings | None = None,
) -> int:
    """Replace the linear layers of `model` in place; return how many.

    siblings: layers to make one product of, see `LinearCalls.siblings`.

    Weights that another module holds too (a tied embedding) and the head's stay readable as they
    are; the others exist only packed, so that memory does not double.
    """
    if blocks is None and not available():
        return 0
    kept = _shared(model) | ({id(head.weight)} if head is not None else set())
    replaced: dict[int, PackedLinear] = {}
    packed: list[Tensor] = []
    for parent, names in _products(model, siblings):
        layers = [parent.get_submodule(name) for name in names]
        if id(layers[0]) not in replaced:
            if blocks is None and sum(_dense(layer).numel() for layer in layers) < _SMALL:
                continue
            product = Product(*_joined(layers), blocks=blocks, head=layers[0] is head)
            if product.packed is not None:
                packed.append(product.packed)
            replaced |= _replacements(layers, product, blocks, kept)
        for name in names:
            setattr(parent, name, replaced[id(parent.get_submodule(name))])
    use_huge_pages(packed)
    return len(replaced)


def _replacements(
    layers: list[nn.Module], product: Product, blocks: RowBlocks | None, kept: set[int]
) -> dict[int, PackedLinear]:
    """What takes the place of each layer, by its id. kept: ids of parameters that stay."""
    group = LinearGroup(product, [_dense(layer).shape[0] for layer in layers])
    return {
        id(layer): PackedLinear(
            layer,
            GroupPart(group, i) if len(layers) > 1 else product,
            blocks=blocks,
            keep_dense=id(layer.weight) in kept,
        )
        for i, layer in enumerate(layers)
    }


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


def probe_blocks(model: nn.Module, siblings: Siblings | None = None) -> RowBlocks:
    """Find how many rows a product may have so that each row's bits do not depend on them.

    Tries 8, 4 and 2 rows on every weight shape, each with products of fewer rows padded up to a
    least number; 1 row at a time always works. The answer holds for this build and machine.
    """
    shapes: dict[tuple[int, int], tuple[nn.Module, tuple[str, ...]]] = {}
    for parent, names in _products(model, siblings):
        layers = [_dense(parent.get_submodule(name)) for name in names]
        shapes.setdefault((sum(w.shape[0] for w in layers), layers[0].shape[1]), (parent, names))
    for limit in (8, 4, 2):
        least = {}
        for shape, (parent, names) in shapes.items():
            weight, _ = _joined([parent.get_submodule(name) for name in names])
            least[shape] = least_rows(weight, limit)
        if 0 not in least.values():
            return RowBlocks(limit, least)
    logger.warning("products of several rows are not repeatable here: every row runs alone")
    return RowBlocks(1, dict.fromkeys(shapes, 1))


def _products(
    model: nn.Module, siblings: Siblings | None
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """The children, by parent, that are a product together or, mostly, alone.

    The caller may replace them meanwhile. Nothing here holds a layer: its dense weight goes when
    it is replaced.
    """
    shared = _shared(model)
    for parent in [module for module in model.modules() if any(True for _ in module.children())]:
        names = [name for name, layer in parent.named_children() if packable(layer)]
        for group in (siblings or {}).get(id(parent), ()):
            own = all(id(parent.get_submodule(name).weight) not in shared for name in group)
            if available() and own and set(group) <= set(names):
                yield parent, group
                names = [name for name in names if name not in group]
        for name in names:
            yield parent, (name,)


def _shared(model: nn.Module) -> set[int]:
    """Ids of the parameters that several modules hold."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {parameter for parameter, count in owners.items() if count > 1}


def _joined(layers: list[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] of the layers as one."""
    weights = [_dense(layer) for layer in layers]
    biases = [getattr(layer, "bias", None) for layer in layers]
    if len(layers) == 1:
        return weights[0], biases[0]
    if all(bias is None for bias in biases):
        return torch.cat(weights), None
    filled = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(weights), torch.cat(filled)


def _dense(layer: nn.Module) -> Tensor:
    """Return the weight as [out, in]."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return (weight.t() if isinstance(layer, Conv1D) else weight).detach().contiguous()
