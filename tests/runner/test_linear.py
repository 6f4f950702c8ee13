from __future__ import annotations

import logging
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.runner import linear, product
from specdec.runner.linear import PackedLinear, pack_linears, probe_blocks
from specdec.runner.linear_groups import Siblings


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
    with caplog.at_level(logging.DEBUG, logger=product.__name__):
        assert pack_linears(model, head=model.head, blocks=None) == 0
    assert len(caplog.records) == 1
    assert "cannot pack linear layers" in caplog.text


def test_without_the_operators_rows_can_still_be_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Model().eval()
    blocks = probe_blocks(model)
    assert pack_linears(model, head=model.head, blocks=blocks) == 4
    with torch.inference_mode():
        expected = Model().eval()(rows(6))
        blocks.plan(6, [0, 6])
        torch.testing.assert_close(model(rows(6)), expected, rtol=1e-5, atol=1e-5)
    layer = model.body[0]
    assert torch.equal(torch.as_tensor(layer.weight), torch.as_tensor(Model().body[0].weight))


def test_a_limit_is_found_for_real_shapes_and_it_holds() -> None:
    model = nn.Sequential(*[nn.Linear(i, o, bias=False) for i, o in ((576, 192), (1536, 576))])
    blocks = probe_blocks(model)
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
    monkeypatch.setattr(linear, "least_rows", lambda weight, limit: 0)
    blocks = probe_blocks(nn.Sequential(nn.Linear(8, 8)))
    assert blocks.limit == 1
    assert blocks.even(0, 3) == [(0, 1), (1, 2), (2, 3)]
    assert "every row runs alone" in caplog.text


# -- siblings ----------------------------------------------------------------


class Attention(nn.Module):
    """Three layers of one input, of unequal widths; one with a bias, one a Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.q = nn.Linear(128, 256)
        self.k = nn.Linear(128, 192, bias=False)
        self.v = Conv1D(160, 128)  # type: ignore[no-untyped-call]
        nn.init.normal_(self.q.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


def fused(model: nn.Module) -> Siblings:
    return {id(model): [("q", "k", "v")]}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 8, 40])
def test_siblings_compute_what_they_replaced(n: int, deterministic: bool) -> None:
    model = Attention()
    x = rows(n)[None]
    with torch.inference_mode():
        expected = model(x)
        blocks = probe_blocks(model, fused(model)) if deterministic else None
        assert pack_linears(model, head=None, blocks=blocks, siblings=fused(model)) == 3
        if blocks is not None:
            blocks.plan(n, [0, n])
        got = model(x)
    for have, want in zip(got, expected, strict=True):
        assert have.shape == want.shape
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_siblings_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    pack_linears(model, head=None, blocks=None, siblings=fused(model))
    widths: list[int] = []
    real = product.packed_product

    def spy(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        out = real(x, packed, bias)
        widths.append(out.shape[-1])
        return out

    monkeypatch.setattr(product, "packed_product", spy)
    with torch.inference_mode():
        model(rows(4))
        model(rows(4))
    assert widths == [608, 608]


def test_siblings_keep_weights_and_biases_readable() -> None:
    model, same = Attention(), Attention()
    pack_linears(model, head=None, blocks=None, siblings=fused(model))
    for name in ("q", "k", "v"):
        have, want = getattr(model, name), getattr(same, name)
        assert torch.equal(have.weight, want.weight)
        assert (have.out_features, have.in_features) == (want.weight.numel() // 128, 128)
    assert torch.equal(torch.as_tensor(model.q.bias), torch.as_tensor(same.q.bias))
    assert model.k.bias is None


def test_rows_of_siblings_do_not_depend_on_their_number() -> None:
    model = nn.Module()
    model.q, model.k = nn.Linear(576, 576), nn.Linear(576, 192)
    together: Siblings = {id(model): [("q", "k")]}
    blocks = probe_blocks(model, together)
    assert set(blocks.least) == {(768, 576)}
    pack_linears(model, head=None, blocks=blocks, siblings=together)
    x = rows(12, 576)
    with torch.inference_mode():
        for layer in (model.q, model.k):
            each = []
            for i in range(12):
                blocks.plan(1, [0, 1])
                each.append(layer(x[i : i + 1]))
            blocks.plan(12, [0, 12])
            assert torch.equal(layer(x), torch.cat(each))


def test_a_layer_whose_weight_is_shared_or_that_cannot_be_packed_has_no_siblings() -> None:
    model = Attention()
    model.other = nn.Embedding(192, 128)
    model.other.weight = model.k.weight
    weight = model.k.weight
    assert pack_linears(model, head=None, blocks=None, siblings=fused(model)) == 3
    assert model.k.weight is weight
    odd = Attention()
    odd.k = odd.k.double()
    assert pack_linears(odd, head=None, blocks=None, siblings=fused(odd)) == 2
    assert type(odd.k) is nn.Linear


def test_dense_weights_are_freed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Attention() for _ in range(3)])
    siblings = {id(part): [("q", "k", "v")] for part in model}
    dense = [ref(layer.weight) for part in model for layer in part.children()]
    alive: list[int] = []
    real = product.pack

    def spy(weight: Tensor) -> Tensor:
        alive.append(sum(weight() is not None for weight in dense))
        return real(weight)

    monkeypatch.setattr(product, "pack", spy)
    pack_linears(model, head=None, blocks=None, siblings=siblings)
    assert alive == [9, 6, 3]
    assert all(weight() is None for weight in dense)
