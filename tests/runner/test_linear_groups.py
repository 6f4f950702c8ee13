from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from specdec.runner.linear_groups import GroupPart, LinearCalls, LinearGroup, recording
from specdec.runner.product import Product


class Counting(Product):
    """A product that counts its calls."""

    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x)


def group() -> tuple[Counting, list[GroupPart], Tensor]:
    weight = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    product = Counting(weight, None, blocks=None)
    together = LinearGroup(product, [6, 4])
    return product, [GroupPart(together, 0), GroupPart(together, 1)], weight


def test_the_same_tensor_is_multiplied_once() -> None:
    product, (first, second), weight = group()
    x = torch.randn(5, 8)
    torch.testing.assert_close(first(x), x @ weight[:6].T)
    torch.testing.assert_close(second(x), x @ weight[6:].T)
    assert product.calls == 1


def test_another_tensor_is_not_taken_for_it() -> None:
    product, (first, second), weight = group()
    x, y = torch.randn(5, 8), torch.randn(3, 8)
    first(x)
    torch.testing.assert_close(second(y), y @ weight[6:].T)
    torch.testing.assert_close(first(y), y @ weight[:6].T)
    assert product.calls == 2


def test_a_layer_that_is_called_twice_answers_twice() -> None:
    _, (first, second), weight = group()
    x = torch.randn(5, 8)
    for part in (first, first, second, second):
        torch.testing.assert_close(part(x), x @ part.dense().T)
    assert torch.equal(torch.cat([first.dense(), second.dense()]), weight)


def test_a_tensor_that_was_written_to_is_another_one() -> None:
    _, (first, second), weight = group()
    x = torch.randn(5, 8)
    first(x)
    x.mul_(2)
    torch.testing.assert_close(second(x), x @ weight[6:].T)


@pytest.mark.parametrize("used", [1, 2])
def test_neither_input_nor_answers_outlive_the_call(used: int) -> None:
    _, parts, _ = group()
    with torch.inference_mode():
        x = torch.randn(5, 8)
        outs = [part(x) for part in parts[:used]]
    alive = [ref(x), *[ref(out) for out in outs]]
    del x, outs
    gc.collect()
    assert [thing() for thing in alive] == [None] * len(alive)
    held = parts[0]._group
    assert held._parts == {}


# -- which layers are siblings -----------------------------------------------


class Block(nn.Module):
    """Calls three layers as it is told."""

    def __init__(self, call: Callable[[Block, Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> None:
        self.call(self, x)


def siblings(call: Callable[[Block, Tensor], object], *, also: str = "") -> list[tuple[str, ...]]:
    block = Block(call)
    model = nn.Sequential(block)
    if also:
        model.add_module("again", getattr(block, also))
    with torch.no_grad(), recording([block.a, block.b, block.c]) as calls:
        block(torch.randn(2, 8))
    found = calls.siblings(model)
    assert set(found) <= {id(block)}
    return list(found.get(id(block), ()))


def test_layers_of_one_input_are_siblings() -> None:
    assert siblings(lambda m, x: (m.a(x), m.b(x), m.c(x))) == [("a", "b", "c")]
    assert siblings(lambda m, x: (m.b(x), m.c(m.a(x)))) == [("b", "a")]


def test_an_equal_input_that_is_another_tensor_makes_none() -> None:
    assert siblings(lambda m, x: (m.a(x), m.b(x.clone()), m.c(x + 0))) == []


def test_an_input_that_changed_in_between_makes_none() -> None:
    assert siblings(lambda m, x: (m.a(x), m.b(x.mul_(2)), m.c(x))) == [("b", "c")]


def test_a_layer_called_twice_is_left_alone() -> None:
    assert siblings(lambda m, x: (m.a(x), m.b(x), m.c(x), m.a(x))) == [("b", "c")]


def test_a_layer_with_two_places_is_left_alone() -> None:
    assert siblings(lambda m, x: (m.a(x), m.b(x), m.c(x)), also="a") == [("b", "c")]


def test_an_input_by_name_is_not_looked_at() -> None:
    assert siblings(lambda m, x: (m.a(input=x), m.b(x))) == []


def test_layers_of_two_parents_are_no_siblings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))

    model = Two()
    with torch.no_grad(), recording([model.one[0], model.two[0]]) as calls:
        x = torch.randn(2, 8)
        model.one(x), model.two(x)
    assert calls.siblings(model) == {}


def test_a_recording_leaves_no_hooks_and_shows_that_parts_are_not_contiguous() -> None:
    layer = nn.Linear(8, 6)
    x = torch.randn(3, 8)
    with torch.no_grad(), recording([layer]):
        out = layer(x)
    assert torch.equal(out, layer(x))
    assert not out.is_contiguous()
    with pytest.raises(RuntimeError, match="view"):
        out.view(-1)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert isinstance(LinearCalls().siblings(layer), dict)
