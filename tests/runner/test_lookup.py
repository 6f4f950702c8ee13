from __future__ import annotations

import copy

import torch
from torch import nn

from specdec.runner.lookup import shorten_lookups


def test_a_child_that_is_set_later_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    shorten_lookups(model)
    other = nn.Linear(2, 3)
    setattr(model, "0", other)
    assert getattr(model, "0") is model[0] is other
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_a_copy_has_children_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    shorten_lookups(model)
    other = copy.deepcopy(model)
    assert getattr(other, "0") is other[0] is not model[0]
    weight = other[0].weight
    assert isinstance(weight, nn.Parameter)
    with torch.no_grad():
        weight.zero_()
    assert model.state_dict()["0.weight"].any()
