"""Activations row by row, for the deterministic mode.

torch's vectorised loops compute what is left over at the end of a tensor, or of a thread's share of
it, by another formula. Where these ends fall depends on the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.runner.row_blocks import RowBlocks

_HOMES = ("transformers.activations", "torch.nn.modules.activation")


class RowwiseActivation(nn.Module):
    """Applies an elementwise module to one row at a time, and to a prefill chunk as a whole."""

    def __init__(self, activation: nn.Module, blocks: RowBlocks) -> None:
        super().__init__()
        self.activation = activation
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if self.blocks.rows < 0:
            out: Tensor = self.activation(x)
            return out
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        parts: list[Tensor] = []
        for cut in self.blocks.cuts if rows == self.blocks.rows else [(0, rows)]:
            part = flat[slice(*cut)]
            whole = rows == self.blocks.rows and cut in self.blocks.chunks
            pieces = [part] if whole else part.split(1)  # type: ignore[no-untyped-call]
            parts += [self.activation(piece) for piece in pieces]
        return torch.cat(parts).view(x.shape) if parts else torch.empty_like(x)


def fix_activations(model: nn.Module, blocks: RowBlocks) -> None:
    """Replace the activation modules of `model` in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            elementwise = type(child).__module__ in _HOMES and not any(
                True for _ in child.parameters()
            )
            if elementwise and not isinstance(parent, RowwiseActivation):
                setattr(parent, name, RowwiseActivation(child, blocks))
