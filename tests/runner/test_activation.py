from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.runner.activation import RowwiseActivation, fix_activations
from specdec.runner.row_blocks import RowBlocks


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.shape[0])
        return x + 1


def test_few_rows_run_one_by_one_and_a_chunk_as_a_whole() -> None:
    inner, blocks = Counting(), RowBlocks(8)
    layer = RowwiseActivation(inner, blocks)
    x = torch.randn(1, 23, 5)
    blocks.plan(23, [0, 2, 22])
    assert torch.equal(layer(x), x + 1)
    assert inner.sizes == [1, 1, 20, 1]


def test_many_rows_of_a_decoding_request_run_one_by_one() -> None:
    inner, blocks = Counting(), RowBlocks(8)
    x = torch.randn(1, 41, 5)
    blocks.plan(41, [0, 21, 41], [False, True])
    assert torch.equal(RowwiseActivation(inner, blocks)(x), x + 1)
    assert inner.sizes == [*[1] * 21, 20]


def test_outside_a_packed_forward_it_is_the_activation_itself() -> None:
    inner = Counting()
    x = torch.randn(2, 3, 5)
    assert torch.equal(RowwiseActivation(inner, RowBlocks(8))(x), x + 1)
    assert inner.sizes == [2]


def test_no_rows_are_no_call() -> None:
    blocks = RowBlocks(8)
    blocks.plan(0, [0])
    assert RowwiseActivation(Counting(), blocks)(torch.zeros(1, 0, 5)).shape == (1, 0, 5)


def test_only_elementwise_modules_are_replaced_and_only_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.PReLU(), nn.LayerNorm(4))
    blocks = RowBlocks(8)
    fix_activations(model, blocks)
    fix_activations(model, blocks)
    kinds = [type(module) for module in model]
    assert kinds == [nn.Linear, RowwiseActivation, nn.PReLU, nn.LayerNorm]
    silu = model[1]
    assert isinstance(silu, RowwiseActivation)
    assert type(silu.activation) is nn.SiLU
