"""Let modules find their children without the search that ends in `nn.Module.__getattr__`."""

from __future__ import annotations

from torch import nn


def shorten_lookups(model: nn.Module) -> None:
    """Put the children of every module among its plain attributes, too.

    Children are kept where Python looks last, and by code of Python's own: a step of one row spends
    a fiftieth of its time there. Setting a child later replaces both, as `nn.Module` takes the name
    out of the plain attributes first.
    """
    for module in model.modules():
        for name, child in module.named_children():
            module.__dict__[name] = child
