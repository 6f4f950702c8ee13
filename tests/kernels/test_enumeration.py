"""The exact law of what is emitted, from the code's own thresholds and weights.

Every sequence of drafts is a request of one batch. Its accept thresholds are found by bisection
over uniforms put in place of the hashed ones, and the law of its last token is caught on its way
into the draw. Summed over drafts that must be the target's law, token for token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf, prod

import pytest
import torch
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, noise, verify

V, K = 3, 3
DRAFTS = list(product(range(V), repeat=K))
N = len(DRAFTS)
Prefix = tuple[int, ...]


def prefixes(length: int) -> Iterator[Prefix]:
    for n in range(length + 1):
        yield from product(range(V), repeat=n)


class Case:
    """Random logits after every prefix, and `verify` over all drafts with chosen uniforms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, form: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.p = {x: torch.randn(V, generator=generator) * 1.5 for x in prefixes(K)}
        self.q = {x: torch.randn(V, generator=generator) * 1.5 for x in prefixes(K - 1)}
        if form == "sparse":  # two candidates of three
            for row in self.q.values():
                row[int(torch.randint(V, (1,), generator=generator))] = -inf
        self.method, self.form = method, form
        monkeypatch.setattr(noise, "uniform", lambda *_: self.u)
        monkeypatch.setattr(noise, "draw", self._caught)

    def _caught(self, weights: Tensor, *_: object) -> Tensor:
        self.law = weights.double().softmax(-1)
        return torch.zeros(len(weights), dtype=torch.int64)

    def accepted(self, u: Tensor) -> Tensor:
        self.u = u
        ones = torch.ones(N)
        dense = torch.stack([torch.stack([self.q[d[:i]] for i in range(K)]) for d in DRAFTS])
        best, ids = dense.topk(2)
        q = {"dense": DenseQ(dense), "sparse": SparseQ(ids, best), "one-hot": None}[self.form]
        return (
            verify(
                torch.stack([self.p[d[:i]] for d in DRAFTS for i in range(K + 1)]),
                torch.arange(N + 1) * (K + 1),
                torch.tensor(DRAFTS),
                torch.arange(N * (K + 1)),
                torch.arange(N),
                Sampling(torch.arange(N), ones, torch.zeros(N).long(), ones, ones * 0),
                method=self.method,
                q=q,
            ).count
            - 1
        )

    def thresholds(self) -> Tensor:
        """The probability that test i alone succeeds: float64 [N, K]."""
        found = torch.zeros(N, K, dtype=torch.float64)
        for i in range(K):
            low, high = torch.zeros(N), torch.ones(N)
            for _ in range(26):
                u = torch.full((N, K), inf)
                u[:, :i] = 0 if self.method == "standard" else inf
                u[:, i] = (low + high) / 2
                passed = self.accepted(u) == i + 1
                low, high = low.where(~passed, u[:, i]), high.where(passed, u[:, i])
            found[:, i] = low
        return found

    def emitted_law(self) -> Tensor:
        """The law of the first K + 1 tokens, if plain sampling goes on after the step."""
        law = torch.zeros((V,) * (K + 1), dtype=torch.float64)
        passes = self.thresholds()
        for count in range(K + 1):
            u = torch.full((N, K), inf)
            u[:, :count] = 0
            assert (self.accepted(u) == count).all()
            for request, drafts in enumerate(DRAFTS):
                drawn = prod(
                    self.q[drafts[:i]].double().softmax(-1)[drafts[i]].item() for i in range(K)
                )
                t = passes[request]
                if self.method == "standard":
                    chance = t[:count].prod() * (1 - t[count : count + 1]).prod()
                else:
                    chance = t[count - 1 : count].prod() * (1 - t[count:]).prod()
                for x in range(V):
                    mass = drawn * chance.item() * self.law[request, x].item()
                    self._complete(law, (*drafts[:count], x), mass)
        return law

    def _complete(self, law: Tensor, prefix: Prefix, mass: float) -> None:
        if len(prefix) == K + 1:
            law[prefix] += mass
        elif mass:
            for x, p in enumerate(self.p[prefix].double().softmax(-1).tolist()):
                self._complete(law, (*prefix, x), mass * p)

    def target_law(self) -> Tensor:
        law = torch.zeros((V,) * (K + 1), dtype=torch.float64)
        self._complete(law, (), 1.0)
        return law


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_emitted_law_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, method: str, form: str, seed: int
) -> None:
    case = Case(monkeypatch, method, form, seed)
    distance = (case.emitted_law() - case.target_law()).abs().sum() / 2
    assert distance < 2e-6  # float32 thresholds
