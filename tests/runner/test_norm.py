from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.runner.norm import RMSNorm, replace_norms, rms_norm


def llama(eps: float = 1e-5) -> nn.Module:
    norm: Any = LlamaRMSNorm(64, eps)
    return scattered(norm)


def gemma() -> nn.Module:
    norm: Any = GemmaRMSNorm(64, eps=1e-6)
    return scattered(norm)


def scattered(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    assert isinstance(norm.weight, Tensor)
    norm.weight.data = norm.weight.data + torch.randn(64, generator=generator)
    return norm


@pytest.mark.parametrize("norm", [llama(), llama(1e-2), gemma()], ids=["llama", "eps", "gemma"])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 64), (1, 3, 5, 64), (0, 64)])
def test_it_computes_what_it_replaces(
    norm: nn.Module, scale: float, shape: tuple[int, ...]
) -> None:
    found = rms_norm(norm)
    assert found is not None
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    with torch.inference_mode():
        torch.testing.assert_close(found(x), norm(x), rtol=2e-6, atol=0)
    assert torch.equal(x, before)


def test_strided_rows_are_taken() -> None:
    norm = llama()
    found = rms_norm(norm)
    assert found is not None
    x = torch.randn(2, 3, 128)[..., :64].transpose(0, 1)
    with torch.inference_mode():
        torch.testing.assert_close(found(x), norm(x), rtol=2e-6, atol=1e-7)


class Odd(nn.Module):
    """Norms that are almost one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 64))
        self.eps = 1e-5
        self.kind = kind
        if kind == "bias":
            self.bias = nn.Parameter(torch.ones(64))
        if kind == "buffer":
            self.register_buffer("shift", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "centred":
            x = x - x.mean(-1, keepdim=True)
        square = x.pow(2).mean(-1, keepdim=True)
        if self.kind == "eps":
            square = square + 1e-6
        if self.kind == "other_dim":
            square = x.pow(2).mean(-2, keepdim=True)
        return x * torch.rsqrt(square + self.eps) * self.weight


class Gated(Odd):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_a_module_of_another_name_is_found_by_what_it_computes() -> None:
    assert rms_norm(Odd("plain")) is not None


@pytest.mark.parametrize(
    "module",
    [
        *[Odd(kind) for kind in ("bias", "buffer", "centred", "eps", "other_dim")],
        Gated("gated"),
        nn.LayerNorm(64),
        nn.LayerNorm(64, bias=False),
        nn.Linear(64, 64, bias=False),
        nn.Embedding(9, 64),
        nn.PReLU(64),
        nn.SiLU(),
        llama().double(),
        nn.Sequential(llama()),
    ],
    ids=lambda module: getattr(module, "kind", type(module).__name__),
)
def test_what_computes_anything_else_stays(module: nn.Module) -> None:
    assert rms_norm(module) is None


def test_a_norm_that_somebody_watches_stays() -> None:
    norm = llama()
    norm.register_forward_hook(lambda *_: None)
    assert rms_norm(norm) is None


def test_norms_are_replaced_once_wherever_they_are_and_keep_their_weight() -> None:
    shared = llama()
    inner = nn.Sequential(shared, nn.SiLU())
    model = nn.Sequential(inner, shared, gemma(), nn.LayerNorm(64))
    weight = shared.weight
    assert replace_norms(model) == 2
    assert inner[0] is model[1]
    assert isinstance(model[1], RMSNorm)
    assert model[1].weight is weight
    kinds = [type(module) for module in model]
    assert kinds == [nn.Sequential, RMSNorm, RMSNorm, nn.LayerNorm]
    assert replace_norms(model) == 0
