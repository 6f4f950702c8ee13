"""Sibling linear layers that are handed the same tensor become one product.

q, k and v of an attention, gate and up of a feed-forward: which layers these are is seen in a
forward, not told by names. One product streams its weights faster than three, and costs fewer
calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specdec.runner.product import Product

# Children of a module that become one product, by the module's id: ids, because references would
# keep dense weights alive while they are being packed.
Siblings = Mapping[int, Sequence[tuple[str, ...]]]


class LinearGroup:
    """The product of several layers. The first to be called computes for all of them."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product = product
        self._sizes = list(sizes)
        self._input: ref[Tensor] | None = None
        self._version = -1
        self._parts: dict[int, Tensor] = {}

    def part(self, x: Tensor, index: int) -> Tensor:
        """What layer `index` makes of `x`. Its answer is kept for nobody but the other layers."""
        version = -1 if x.is_inference() else x._version  # inference tensors count no writes
        held = self._input is not None and self._input() is x and self._version == version
        if not held or index not in self._parts:
            # Weak: the input belongs to the model, and the parts are of no use after it.
            self._input = ref(x, self._forget)
            self._version = version
            parts = torch.split_with_sizes(self._product(x), self._sizes, -1)
            self._parts = dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part

    def dense(self, index: int) -> Tensor:
        """The weight of layer `index`, [out, in]; a copy."""
        first = sum(self._sizes[:index])
        return self._product.dense()[first : first + self._sizes[index]].clone()

    def _forget(self, _: object) -> None:
        self._input = None
        self._parts = {}


class GroupPart:
    """One layer's share of a group; called as its product would be."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        self._group = group
        self._index = index

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features of the layer]."""
        return self._group.part(x, self._index)

    def dense(self) -> Tensor:
        """The layer's weight, [out_features, in_features]; a copy."""
        return self._group.dense(self._index)


class LinearCalls:
    """Which layers were called with which input, in one forward."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Tensor | None, int]] = []

    def add(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook. Inputs are kept alive, so that no two have the same id."""
        x = args[0] if args else None
        self._calls.append((id(layer), x, -1 if x is None else x._version))

    def siblings(self, model: nn.Module) -> Siblings:
        """Layers of one parent that were called once, with one tensor that nobody changed."""
        times = Counter(layer for layer, _, _ in self._calls)
        homes = Counter(
            id(child) for parent in model.modules() for child in parent._modules.values()
        )
        fed = {
            layer: (id(x), version)
            for layer, x, version in self._calls
            if x is not None and times[layer] == homes[layer] == 1
        }
        order = list(fed)
        found: dict[int, list[tuple[str, ...]]] = {}
        for parent in model.modules():
            names = {id(child): name for name, child in parent.named_children()}
            together: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
            for layer in order:
                if layer in names:
                    together[fed[layer]].append(names[layer])
            groups = [tuple(group) for group in together.values() if len(group) > 1]
            if groups:
                found[id(parent)] = groups
        return found


@contextmanager
def recording(layers: Iterable[nn.Module]) -> Iterator[LinearCalls]:
    """Watch calls of `layers` in a forward, which must not run in inference mode.

    Their answers come as parts of something wider, as those of a group will: a model that cannot
    take that raises here.
    """
    calls = LinearCalls()
    handles: list[Any] = []
    try:
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(calls.add))
            handles.append(layer.register_forward_hook(_widened))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _widened(layer: nn.Module, args: object, out: Tensor) -> Tensor:
    wide = torch.cat([out, out], -1)
    return wide[..., : out.shape[-1]]
