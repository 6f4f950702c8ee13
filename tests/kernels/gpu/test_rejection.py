"""Standard, block and synthetic against the reference, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = ["standard", "block", "synthetic"]
LAWS = ["one-hot", "dense", "dense, summed", "sparse"]


class Call(NamedTuple):
    """Everything that one verification is given."""

    arguments: tuple[Any, ...]
    q: DenseQ | SparseQ | None
    rates: Tensor | None

    def verify(self, op: Any, method: str, *, truncate: bool) -> Any:
        return op.verify(
            *self.arguments,
            method=method,
            q=self.q,
            acceptance_rates=self.rates if method == "synthetic" else None,
            truncate=truncate,
        )


def spoil(values: Tensor, dice: random.Random, with_: list[float]) -> None:
    """Put a few numbers that are none of the usual into rows."""
    flat = values.view(-1, values.shape[-1])
    for _ in range(3 if len(flat) else 0):
        row, what = dice.randrange(len(flat)), dice.choice([*with_, None])
        if what is None:
            flat[row] = -inf
        else:
            flat[row, dice.randrange(flat.shape[1])] = what


def ragged(dice: random.Random, *, law: str, wild: bool, truncate: bool) -> list[Any]:
    """Requests of any number of rows, placeholders, padding, laws close to each other and apart."""
    seed = dice.randrange(2**31)
    torch.manual_seed(seed)
    vocab, k, batch = dice.choice([1, 5, 37, 150]), dice.choice([0, 1, 3, 5]), dice.choice([1, 3])
    slots = batch + 2
    sizes = [dice.choice([0, 1, k + 1, k + 1, dice.randint(1, k + 1)]) for _ in range(batch)]
    start = torch.tensor([0, *sizes]).cumsum(0)
    logits = (torch.randn(int(start[-1]), vocab) * 2).to(dice.choice(DTYPES))
    if wild:
        # -inf for q and NaN for p; +inf in both would leave 0 / 0 for every other id
        spoil(logits, dice, [nan, -inf, inf] if law == "one-hot" else [nan, -inf])

    def some(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([dice.choice(values) for _ in range(slots)], dtype=dtype)

    sampling = Sampling(
        torch.randint(-(2**62), 2**62, (slots,)),
        some([0.0, 0.7, 1.0, 1.0, 1.5]),
        some([0, 0, 3, vocab] if truncate else [0], torch.int64),
        some([1.0, 0.9, 0.5] if truncate else [1.0]),
        some([0.0, 0.0, 0.1] if truncate else [0.0]),
    )
    at = torch.randperm(slots)[:batch]
    if dice.random() < 0.2:
        at[0] = -1
    drafts = torch.randint(0, vocab, (batch, k))
    q: DenseQ | SparseQ | None = None
    if law.startswith("dense"):
        cache = dense(dice, logits, start, at, k, slots)
        if wild:
            spoil(cache, dice, [nan, -inf])
        q = DenseQ(cache)
        if law == "dense, summed":
            q = summed(q, vocab, sampling)
            assert q.lse is not None
            if wild and k:
                spoil(q.lse, dice, [nan, -inf, inf])
    elif law == "sparse" and k:
        count = dice.choice([1, 2, 5])
        ids = torch.rand(slots, k, max(vocab, count)).argsort(-1)[..., :count]
        q = SparseQ(ids.where(ids < vocab, -1), torch.randn(slots, k, count))
        for b in range(batch):
            if dice.random() < 0.8 and at[b] >= 0:
                drafts[b] = q.ids[at[b], :, 0]
    if k and dice.random() < 0.3:
        drafts[dice.randrange(batch), dice.randrange(k)] = dice.choice([-1, vocab, vocab + 5, -7])
    positions = torch.randint(0, 2**32, (len(logits),))
    return [(logits, start, drafts, positions, at, sampling), q, torch.rand(k + 1)]


def summed(q: DenseQ, vocab: int, sampling: Sampling) -> DenseQ:
    """The same law, with the log-sum-exp of its rows."""
    temperature = sampling.temperature.where(sampling.temperature > 0, 1.0)[:, None, None]
    weights = q.logits[..., :vocab].float() / temperature
    return DenseQ(q.logits, weights.nan_to_num(nan=-inf, neginf=-inf).logsumexp(-1))


def dense(
    dice: random.Random, logits: Tensor, start: Tensor, at: Tensor, k: int, slots: int
) -> Tensor:
    """A cache of q with more columns, and more or fewer ids, than there are; often close to p."""
    vocab = logits.shape[1]
    ids = max(1, vocab + dice.choice([0, -2, 3]))
    shared = min(vocab, ids)
    cache = torch.randn(slots, k + dice.choice([0, 2]), ids) * 2
    for b in range(len(at)):
        for i in range(min(k, int(start[b + 1] - start[b]) - 1)):
            if dice.random() < 0.6 and at[b] >= 0:
                near = logits[start[b] + i, :shared].float().nan_to_num(0.0)
                cache[at[b], i, :shared] = near + torch.randn(shared) * dice.choice([0, 0.3])
    return cache.to(dice.choice(DTYPES[:2]))


def moved(value: Any, device: torch.device) -> Any:
    """The same on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Sampling | DenseQ | SparseQ):
        fields: list[Any] = [None if x is None else moved(x, device) for x in value]
        return type(value)(*fields)
    return tuple(moved(x, device) for x in value) if isinstance(value, tuple) else value


@pytest.fixture
def check(kernels: Any, device: torch.device) -> Callable[..., None]:
    def same(parts: list[Any], method: str, *, truncate: bool) -> None:
        call = Call(*(moved(part, device) for part in parts))
        out = call.verify(kernels, method, truncate=truncate)
        want = call.verify(reference, method, truncate=truncate)
        for got, right in zip(out[:3], want[:3], strict=True):
            assert torch.equal(got, right), (out, want)

    return same


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("small_tiles")
def test_tokens_are_those_of_the_reference(
    check: Callable[..., None], method: str, law: str, seed: int
) -> None:
    dice = random.Random(f"{method} {law} {seed}")
    check(ragged(dice, law=law, wild=False, truncate=False), method, truncate=False)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_tiles")
def test_excluded_nan_and_infinite_logits_and_truncation_change_nothing_of_that(
    check: Callable[..., None], method: str, law: str, seed: int
) -> None:
    dice = random.Random(f"wild {method} {law} {seed}")
    check(ragged(dice, law=law, wild=True, truncate=True), method, truncate=True)


def many(vocab: int, k: int, n: int, law: str, device: torch.device) -> tuple[Call, Tensor]:
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
    call = Call(*(moved(part, device) for part in [arguments, q, None]))
    return call, rows[0].softmax(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("law", ["dense", "sparse"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_first_token_has_the_law_of_the_target(
    kernels: Any, device: torch.device, method: str, law: str
) -> None:
    n = 100_000
    call, p = many(5, 2, n, law, device)
    out = call.verify(kernels, method, truncate=False)
    seen = out.tokens[:, 0].cpu().bincount(minlength=5).double()
    assert chisquare(seen, p.double() * n / p.double().sum()).pvalue > 1e-4
    assert out.count.float().mean() > 1.2  # drafts are kept at all


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_tokens_are_those_of_the_reference_at_the_size_of_models(
    kernels: Any, device: torch.device, method: str, law: str, vocab: int
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
    laws = {"dense": wide, "dense, summed": summed(wide, vocab, sampling)}
    q = {**laws, "sparse": SparseQ(ids, best), "one-hot": None}[law]
    call = Call((rows, start, drafts, positions, slots, sampling), q, None)
    out = call.verify(kernels, method, truncate=False)
    want = call.verify(reference, method, truncate=False)
    assert (out.tokens != want.tokens).any(1).sum() <= 1  # a near-tie may fall otherwise
