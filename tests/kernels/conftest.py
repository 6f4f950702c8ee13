from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec_kernels import Sampling, make_stream

MakeSampling = Callable[..., Sampling]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make_sampling() -> MakeSampling:
    """Parameters of `slots` requests: each a number for all of them, or a list."""

    def make(
        slots: int, *, temperature: float | list[float] = 1.0, **truncation: float
    ) -> Sampling:
        def full(value: float | list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(value, dtype=dtype).expand(slots).clone()

        return Sampling(
            stream=torch.tensor([make_stream(11, i) for i in range(slots)], dtype=torch.int64),
            temperature=full(temperature, torch.float32),
            top_k=full(truncation.get("top_k", 0), torch.int64),
            top_p=full(truncation.get("top_p", 1.0), torch.float32),
            min_p=full(truncation.get("min_p", 0.0), torch.float32),
        )

    return make
