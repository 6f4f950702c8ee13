"""Standard, block and synthetic against the reference, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, reference

METHODS = ["standard", "block", "synthetic"]
LAWS = ["one-hot", "dense", "dense, summed", "sparse"]

Make = Callable[..., Any]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_tiles")
def test_tokens_are_those_of_the_reference(
    kernels: Any, make_call: Make, same: Make, method: str, law: str, seed: int
) -> None:
    dice = random.Random(f"{method} {law} {seed}")
    assert same(kernels, make_call(dice=dice, law=law, wild=False, truncate=False), method)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("small_tiles")
def test_excluded_nan_and_infinite_logits_and_truncation_change_nothing_of_that(
    kernels: Any, make_call: Make, same: Make, method: str, law: str, seed: int
) -> None:
    dice = random.Random(f"wild {method} {law} {seed}")
    call = make_call(dice=dice, law=law, wild=True, truncate=True)
    assert same(kernels, call, method, truncate=True)


@pytest.mark.parametrize(
    ("method", "law", "kind"),
    [
        *[(method, law, "plain") for method in ("standard", "block") for law in LAWS],
        *[("block", law, "wild") for law in LAWS],
        ("standard", "dense, summed", "wide"),
        ("block", "dense", "wide"),
        ("standard", "one-hot", "cut"),
        ("block", "dense", "cut"),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_tests_that_may_go_either_way_go_as_the_reference_says(
    kernels: Any, make_call: Make, same: Make, method: str, law: str, kind: str
) -> None:
    call = make_call(law=law, kind=kind)
    counts = call.verify(reference, method, truncate=True).count
    assert len(counts.unique()) > 1
    assert same(kernels, call, method, truncate=kind == "cut")


def many(vocab: int, k: int, n: int, law: str) -> tuple[list[Any], Tensor]:
    """n requests of the same logits with drafts drawn from q; the law of the first token."""
    torch.manual_seed(7)
    rows = torch.randn(k + 1, vocab)
    q_rows = rows[:k] + torch.randn(k, vocab)
    if law == "sparse":
        ids = q_rows.topk(3).indices
        weights = torch.full_like(q_rows, -inf).scatter(1, ids, q_rows.gather(1, ids))
    else:
        weights = q_rows
    drafts = weights.softmax(-1).multinomial(n, replacement=True).T.contiguous()
    q: DenseQ | SparseQ = DenseQ(q_rows.expand(n, k, vocab).contiguous())
    if law == "sparse":
        values = q_rows.gather(1, ids)
        q = SparseQ(ids.expand(n, k, 3).contiguous(), values.expand(n, k, 3).contiguous())
    one = torch.ones(n)
    sampling = Sampling(
        torch.randint(-(2**62), 2**62, (n,)), one, torch.zeros(n, dtype=torch.int64), one, 0 * one
    )
    arguments = (
        rows.repeat(n, 1), torch.arange(0, n * (k + 1) + 1, k + 1), drafts,
        torch.arange(k + 1).repeat(n), torch.arange(n), sampling,
    )  # fmt: skip
    return [arguments, q, None], rows[0].softmax(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("law", ["dense", "sparse"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_first_token_has_the_law_of_the_target(
    kernels: Any, make_call: Make, method: str, law: str
) -> None:
    n = 100_000
    parts, p = many(5, 2, n, law)
    out = make_call(*parts).verify(kernels, method, truncate=False)
    seen = out.tokens[:, 0].cpu().bincount(minlength=5).double()
    assert chisquare(seen, p.double() * n / p.double().sum()).pvalue > 1e-4
    assert out.count.float().mean() > 1.2  # drafts are kept at all


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_tokens_are_those_of_the_reference_at_the_size_of_models(
    kernels: Any,
    device: torch.device,
    make_call: Make,
    add_sums: Make,
    method: str,
    law: str,
    vocab: int,
) -> None:
    torch.manual_seed(vocab)
    batch, k = 16, 5
    rows = (torch.randn(batch * (k + 1), vocab, device=device) * 3).bfloat16()
    full = torch.ones(batch, device=device)
    sampling = Sampling(torch.arange(batch, device=device), full, full.long() * 0, full, full * 0)
    cache = rows.view(batch, k + 1, vocab)[:, :k] + 0.5 * torch.randn(
        batch, k, vocab, device=device
    )
    drafts = cache.argmax(-1)
    start = torch.arange(0, len(rows) + 1, k + 1, device=device)
    slots = torch.arange(batch, device=device)
    positions = torch.arange(len(rows), device=device)
    best, ids = cache.topk(64)
    wide = DenseQ(cache.bfloat16())
    laws = {"dense": wide, "dense, summed": add_sums(wide, vocab, sampling)}
    q = {**laws, "sparse": SparseQ(ids, best), "one-hot": None}[law]
    call = make_call((rows, start, drafts, positions, slots, sampling), q, None)
    out = call.verify(kernels, method, truncate=False)
    want = call.verify(reference, method, truncate=False)
    assert (out.tokens != want.tokens).any(1).sum() <= 1  # a near-tie may fall otherwise
