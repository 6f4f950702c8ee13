from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from specdec_kernels import make_stream, noise
from specdec_kernels.gpu import noise as gpu_noise
from specdec_kernels.gpu.noise import gumbel, key, unit, word
from specdec_kernels.gpu.rows import over_temperature

DOMAINS = {
    name: getattr(noise, name) for name in vars(noise) if name.endswith(("_TOKEN", "ACCEPT"))
}


@triton.jit  # type: ignore[untyped-decorator]
def _words(streams, positions, index, ids, out, DOMAIN: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    request = tl.program_id(0)
    a, b = key(tl.load(streams + request), tl.load(positions + request), tl.load(index), DOMAIN)
    lane = tl.arange(0, N)
    tl.store(out + request * N + lane, word(a, b, tl.load(ids + lane)).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words, units, noises, N: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.program_id(0) * N + tl.arange(0, N)
    words = tl.load(words + lane).to(tl.uint32)
    tl.store(units + lane, unit(words))
    tl.store(noises + lane, gumbel(words))


@triton.jit  # type: ignore[untyped-decorator]
def _quotients(x, temperature, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, N)
    at = tl.program_id(0) * N + lane
    tl.store(out + at, over_temperature(tl.load(x + at), tl.load(temperature + tl.program_id(0))))


@pytest.mark.parametrize("domain", [0, 1, 5, noise.REDRAW_GROUP])
@pytest.mark.parametrize("index", [0, 3])
def test_words_are_those_of_the_reference_bit_for_bit(
    device: torch.device, domain: int, index: int
) -> None:
    pairs = [(make_stream(s, s), p) for s in (0, -5, 2**63) for p in (0, 9, 2**31, 2**32 - 1)]
    streams = torch.tensor([*(s for s, _ in pairs), -1, 0, -(2**63), 2**63 - 1])
    positions = torch.tensor([*(p for _, p in pairs), 0, 0, 7, 2**31 - 1])
    ids = torch.tensor([0, 1, 31, 32, 65535, 2**18 - 1, 2**18, 2**31 - 1])
    out = torch.zeros((len(streams), len(ids)), dtype=torch.int64, device=device)
    column = torch.tensor([index], device=device)
    _words[(len(streams),)](
        streams.to(device), positions.to(device), column, ids.to(device, torch.int32), out,
        DOMAIN=domain, N=len(ids),
    )  # fmt: skip
    state = noise._state(streams, positions, index)
    want = noise._words(state, torch.full_like(streams, domain), ids)
    assert torch.equal(out.cpu(), want)


def test_domains_are_those_of_the_reference() -> None:
    own = {name: getattr(gpu_noise, name).value for name in DOMAINS if hasattr(gpu_noise, name)}
    assert own == {name: DOMAINS[name] for name in own}
    assert {"TARGET_TOKEN", "REDRAW_TOKEN"} <= own.keys()
    assert gpu_noise.GROUP.value == noise.GROUP


def test_uniforms_and_noise_follow_the_reference_and_stay_finite(device: torch.device) -> None:
    special = torch.tensor([0, 1, 2, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 129, 2**32 - 1])
    # of every size: noise is finest where a word is small, or near the largest
    powers = 2 ** torch.arange(32)
    words = torch.cat([special, powers, 2**32 - powers, torch.randint(0, 2**32, (4096,))])
    words = words[: len(words) // 64 * 64].to(device)
    units, noises = (torch.zeros(len(words), device=device) for _ in range(2))
    _numbers[(len(words) // 64,)](words, units, noises, N=64)
    assert torch.equal(units.cpu(), noise._unit(words.cpu()))
    assert noises.isfinite().all()
    torch.testing.assert_close(noises.cpu(), noise._gumbel(words.cpu()), rtol=2e-6, atol=2e-6)


def _divided(device: torch.device, n: int, temperatures: torch.Tensor) -> Any:
    scale = torch.exp(torch.rand(len(temperatures), n) * 20 - 14)
    x = torch.randn(len(temperatures), n) * scale
    x[:, :3] = torch.tensor([0.0, torch.inf, -torch.inf])
    x, temperatures = x.to(device), temperatures.to(device)
    out = torch.zeros_like(x)
    _quotients[(len(temperatures),)](x, temperatures, out, N=n)
    return out, x / temperatures[:, None]


def test_logits_over_temperature_are_quotients(device: torch.device, interpreted: bool) -> None:
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.5, 1e-3, 1.1, 2.0, 0.99999994])
    out, want = _divided(device, 256, temperatures)
    # the interpreter's multiply-add rounds twice
    spare = 1.3e-7 if interpreted else 0.0
    torch.testing.assert_close(out, want, rtol=spare, atol=0.0)


@pytest.mark.gpu
def test_many_logits_over_temperature_are_rounded_once(device: torch.device) -> None:
    temperatures = torch.cat([torch.rand(4096) * 2 + 0.01, torch.rand(512) * 100 + 1])
    out, want = _divided(device, 4096, temperatures)
    assert torch.equal(out, want)
