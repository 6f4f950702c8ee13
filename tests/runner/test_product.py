from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.runner import product
from specdec.runner.product import LEAST_ROWS, Product, least_rows
from specdec.runner.row_blocks import RowBlocks


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every packed product."""
    rows: list[int] = []
    real = product.packed_product

    def spy(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return real(x, packed, bias)

    monkeypatch.setattr(product, "packed_product", spy)
    return rows


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (1, 5, 64), (2, 3, 64), (64,)])
def test_any_leading_shape_is_kept(shape: tuple[int, ...]) -> None:
    weight, bias, x = normal(96, 64), normal(96), normal(*shape)
    got = Product(weight, bias, blocks=None)(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias))


def test_strided_rows_are_taken() -> None:
    weight, x = normal(96, 64), normal(6, 128)[:, ::2]
    torch.testing.assert_close(Product(weight, None, blocks=None)(x), x @ weight.T)


def test_few_rows_are_padded_to_what_runs_fastest(seen: list[int]) -> None:
    fast = Product(normal(96, 64), None, blocks=None)
    for n in (1, 3, 4, 5):
        fast(normal(1, n, 64))
    assert seen == [LEAST_ROWS, LEAST_ROWS, 4, 5]


def test_rows_of_the_forward_are_cut_as_planned_and_the_heads_are_not(seen: list[int]) -> None:
    blocks = RowBlocks(8)
    body = Product(normal(96, 64), None, blocks=blocks)
    head = Product(normal(96, 64), None, blocks=blocks, head=True)
    x = normal(1, 26, 64)
    blocks.plan(26, [0, 3, 23, 26])
    body(x)
    assert seen == [4, 20, 4]
    seen.clear()
    head(x)
    assert seen == [8, 8, 8, 4]
    seen.clear()
    blocks.clear()
    body(x)
    assert seen == [26]


def test_least_rows_says_from_where_on_products_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsteady(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight.T + (x.shape[0] < 3)

    weight = torch.eye(16)
    monkeypatch.setattr(product, "pack", lambda weight: weight)
    monkeypatch.setattr(product, "packed_product", unsteady)
    assert least_rows(weight, 8) == 4
    assert least_rows(weight, 4) == 0  # half of it, 2, still differ
    monkeypatch.setattr(product, "packed_product", lambda x, packed, bias: x + torch.rand(()))
    assert least_rows(weight, 8) == 0
