"""Are the words of `specdec_kernels.noise` random along each of their keys?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import make_stream, noise

COUNT = 1 << 20
CELLS = 256


def words(stream: Tensor, position: Tensor, index: Tensor, domain: Tensor, ids: Tensor) -> Tensor:
    """The words themselves, which have no public name, one for each of n keys: int64 [n]."""
    return noise._words(noise._state(stream, position, index), domain, ids[:, None]).squeeze(-1)


def sequences() -> dict[str, Tensor]:
    """Words while one part of the key counts up and the others stay."""
    up = torch.arange(COUNT)
    still = torch.zeros_like(up)
    stream, position = still + make_stream(1, 0), still + 1000
    seeds = torch.tensor([make_stream(seed, 0) for seed in range(COUNT)])
    completions = torch.tensor([make_stream(1, index) for index in range(COUNT)])
    return {
        "ids": words(stream, position, still, still, up),
        "positions": words(stream, up, still, still, still),
        "indices": words(stream, position, up, still, still),
        "domains": words(stream, position, still, up, still),
        "raw streams": words(up, position, still, still, still),
        "seeds": words(seeds, position, still, still, still),
        "completions": words(completions, position, still, still, still),
    }


def rows() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of rows of words, over the ids, whose keys differ in one step."""
    up = torch.arange(COUNT)
    still = torch.zeros_like(up)
    stream, position = still + make_stream(1, 0), still + 1000
    row = words(stream, position, still, still, up)
    return {
        "position and the next": (row, words(stream, position + 1, still, still, up)),
        "seed and the next": (row, words(still + make_stream(2, 0), position, still, still, up)),
        "id and its group": (row, words(stream, position, still, still + 1, up)),
        "attempt and the next": (row, words(stream, position, still + 1, still, up)),
    }


def chi_square(cells: Tensor) -> float:
    """How far counts of CELLS equally likely cells lie from even, in standard deviations."""
    expected = len(cells) / CELLS
    statistic = float(((torch.bincount(cells, minlength=CELLS) - expected) ** 2).sum() / expected)
    free = CELLS - 1
    # Wilson and Hilferty 1931: the cube root of a chi-square is nearly normal
    cube: float = (statistic / free) ** (1 / 3)
    return (cube - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def correlation(first: Tensor, second: Tensor) -> float:
    """Of two lists of words, in standard deviations of what independent ones have."""
    pair = torch.stack([first, second]).double()
    return float(torch.corrcoef(pair)[0, 1]) * math.sqrt(pair.shape[1])


def report() -> dict[str, Any]:
    """Every check as a standard normal number: |z| above 4 or so means that something is wrong."""
    found: dict[str, dict[str, float]] = {}
    for name, series in sequences().items():
        top = series >> 28
        found[name] = {
            "high byte": chi_square(series >> 24),
            "low byte": chi_square(series & 255),
            "pairs": chi_square(top[::2] * 16 + top[1::2]),
            "serial correlation": correlation(series[:-1], series[1:]),
        }
    for name, (first, second) in rows().items():
        found[name] = {
            "pairs": chi_square((first >> 28) * 16 + (second >> 28)),
            "correlation": correlation(first, second),
        }
    values = [abs(z) for row in found.values() for z in row.values()]
    return {
        "count": COUNT,
        "z": {name: {k: round(z, 2) for k, z in row.items()} for name, row in found.items()},
        "checks": len(values),
        "above_2": sum(z > 2 for z in values),
        "expected_above_2": round(len(values) * math.erfc(2 / math.sqrt(2)), 1),
        "largest": round(max(values), 2),
    }
