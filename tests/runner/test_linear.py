from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.runner import linear
from specdec.runner.linear import PackedLinear, RowBlocks, pack_linears, probe_blocks


class Model(nn.Module):
    """A body, a head tied to the embedding."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 128)
        self.body = nn.Sequential(nn.Linear(128, 256, bias=bias), nn.Linear(256, 128, bias=bias))
        self.conv = Conv1D(128, 128)  # type: ignore[no-untyped-call]
        self.head = nn.Linear(128, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(self.body(x)))
        return out


def rows(n: int, width: int = 128) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [0, 1, 3, 8, 40])
def test_packed_layers_compute_what_they_replaced(n: int, bias: bool) -> None:
    model = Model(bias=bias).eval()
    with torch.inference_mode():
        expected = model(rows(n)[None])
        assert pack_linears(model, head=model.head, blocks=None) == 4
        got = model(rows(n)[None])
    assert got.shape == (1, n, 1000)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_shared_weight_stays_the_same_object_and_others_are_dropped() -> None:
    model = Model()
    shared = model.head.weight
    first = torch.as_tensor(model.body[0].weight).clone()
    conv = torch.as_tensor(model.conv.weight).clone()

    pack_linears(model, head=model.head, blocks=None)

    assert model.head.weight is shared
    assert model.embedding.weight is shared
    packed = model.body[0]
    assert isinstance(packed, PackedLinear)
    assert packed.dense is None
    assert torch.equal(packed.weight, first)
    assert torch.equal(torch.as_tensor(model.conv.weight), conv)


def test_an_untied_head_stays_readable_without_a_copy() -> None:
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(1000, 128))
    weight = model.head.weight
    pack_linears(model, head=model.head, blocks=None)
    assert model.head.weight is weight


def test_other_dtypes_and_tiny_layers_are_left_alone() -> None:
    assert pack_linears(Model().double(), head=None, blocks=None) == 0
    tiny = nn.Sequential(nn.Linear(4, 4))
    assert pack_linears(tiny, head=None, blocks=None) == 0
    assert type(tiny[0]) is nn.Linear


def test_without_the_operators_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Model()
    with caplog.at_level(logging.DEBUG, logger=linear.__name__):
        assert pack_linears(model, head=model.head, blocks=None) == 0
    assert len(caplog.records) == 1
    assert "cannot pack linear layers" in caplog.text


def test_without_the_operators_rows_can_still_be_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Model().eval()
    blocks = probe_blocks(model.modules())
    assert pack_linears(model, head=model.head, blocks=blocks) == 4
    with torch.inference_mode():
        expected = Model().eval()(rows(6))
        blocks.plan(6, [0, 6])
        torch.testing.assert_close(model(rows(6)), expected, rtol=1e-5, atol=1e-5)


def test_chunks_are_products_of_their_own_and_the_rest_is_cut_in_blocks() -> None:
    blocks = RowBlocks(4)
    blocks.plan(3 + 20 + 6 + 2, [0, 1, 3, 23, 29])
    assert blocks.cuts == [(0, 3), (3, 23), (23, 27), (27, 31)]
    assert blocks.chunks == {(3, 23)}
    blocks.clear()
    assert (blocks.cuts, blocks.chunks) == ([], set())


def test_many_rows_of_a_decoding_request_are_no_chunk() -> None:
    blocks = RowBlocks(8)
    blocks.plan(21 + 20, [0, 21, 41], [False, True])
    assert blocks.cuts == [(0, 8), (8, 16), (16, 21), (21, 41)]
    assert blocks.chunks == {(21, 41)}


def test_a_limit_is_found_for_real_shapes_and_it_holds() -> None:
    model = nn.Sequential(*[nn.Linear(i, o, bias=False) for i, o in ((576, 192), (1536, 576))])
    blocks = probe_blocks(model.modules())
    assert blocks.limit in (2, 4, 8)  # 1 would mean that nothing repeats on this machine
    pack_linears(model, head=None, blocks=blocks)
    for layer in model:
        assert isinstance(layer, PackedLinear)
        x = rows(12, layer.in_features)
        with torch.inference_mode():
            each = []
            for i in range(12):
                blocks.plan(1, [0, 1])
                each.append(layer(x[i : i + 1]))
            for n in (2, 5, 12):
                blocks.plan(n, [0, n])
                assert torch.equal(layer(x[:n]), torch.cat(each[:n]))


def test_a_product_that_never_repeats_runs_row_by_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsteady(weight: Tensor) -> object:
        return lambda x: x @ weight.t() + x.shape[0]

    monkeypatch.setattr(linear, "_product_of", unsteady)
    blocks = probe_blocks([nn.Linear(8, 8)])
    assert blocks.limit == 1
    assert blocks.even(0, 3) == [(0, 1), (1, 2), (2, 3)]
    assert "every row runs alone" in caplog.text
