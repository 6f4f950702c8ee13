"""Calls of the rules that compare laws, of every kind that there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, reference

SEED = 10  # of calls that show every fault of theirs
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


def ragged(dice: random.Random, *, law: str, wild: bool, truncate: bool) -> Call:
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
    return Call((logits, start, drafts, positions, at, sampling), q, torch.rand(k + 1))


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


def close(law: str, kind: str) -> Call:
    """Requests of three drafts with q near p, five ids likely: most tests may go either way.

    kind: "plain"; "wide", in two tiles; "wild", in two tiles, and ids that count for nothing are
    NaN; "cut", every other request's top-k leaves three ids.
    """
    torch.manual_seed(SEED)
    batch, k = (40 if kind == "plain" else 10), 3
    vocab, live = 5, torch.arange(5)
    if kind in ("wide", "wild"):
        vocab, live = 70, torch.tensor([0, 5, 40, 64, 69])
    logits = torch.full((batch, k + 1, vocab), -20.0)
    logits[..., live] = torch.randn(batch, k + 1, 5)
    rows = logits[:, :k]
    cache = rows.clone()
    cache[..., live] += 1.5 * torch.randn(batch, k, 5)
    drawn = (2 * rows if law == "one-hot" else cache).softmax(-1)
    if law == "sparse":
        drawn = drawn.where(drawn >= drawn.topk(4).values[..., -1:], 0.0)
    drafts = drawn.view(-1, vocab).multinomial(1).view(batch, k)
    if kind == "wild":
        logits[::2, :, 66] = nan
        cache[1::3, :, 1] = nan
        logits[0, 0, drafts[0, 0]] = -inf
    one = torch.ones(batch)
    top_k = torch.arange(batch) % 2 * 3 if kind == "cut" else one.long() * 0
    slots = torch.arange(batch).roll(1)
    sampling = Sampling(torch.arange(batch) + 2**40, 0.9 * one, top_k, one, 0 * one)
    start = torch.arange(0, batch * (k + 1) + 1, k + 1)
    arguments = (
        logits.view(-1, vocab), start, drafts, torch.arange(batch * (k + 1)), slots, sampling
    )  # fmt: skip
    cache = cache[slots.argsort()]
    q: DenseQ | SparseQ | None = None
    if law == "sparse":
        best, ids = cache.nan_to_num(nan=-inf).topk(4)
        if kind == "wild":  # candidates that are none, even the draft after one of no chance
            ids[1::2, :, 0] = -1
            ids[slots[0], 1] = ids[slots[0], 1].where(ids[slots[0], 1] != drafts[0, 1], -1)
        q = SparseQ(ids, best)
    elif law != "one-hot":
        q = DenseQ(cache)
        if law == "dense, summed":
            q = summed(q, vocab, sampling)
            assert q.lse is not None
            if kind == "wild":
                q.lse[:9] = torch.tensor([-inf, inf, nan]).repeat(3)[:, None]
    return Call(arguments, q, torch.rand(k))


def moved(value: Any, device: torch.device) -> Any:
    """The same on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Sampling | DenseQ | SparseQ):
        fields: list[Any] = [None if x is None else moved(x, device) for x in value]
        return type(value)(*fields)
    return tuple(moved(x, device) for x in value) if isinstance(value, tuple) else value


@pytest.fixture
def make_call(device: torch.device) -> Callable[..., Call]:
    """A call on the device of the kernels: of these parts, a `close` one, or one by `dice`."""

    def make(*parts: Any, dice: random.Random | None = None, **how: Any) -> Call:
        if dice is not None:
            parts = ragged(dice, **how)
        elif not parts:
            parts = close(**how)
        return Call(*(moved(part, device) for part in parts))

    return make


@pytest.fixture
def add_sums() -> Callable[[DenseQ, int, Sampling], DenseQ]:
    """What gives a law the log-sum-exp of its rows."""
    return summed


@pytest.fixture
def same() -> Callable[..., bool]:
    """Whether kernels give what the reference gives."""

    def compare(kernels: Any, call: Call, method: str, *, truncate: bool = False) -> bool:
        out = call.verify(kernels, method, truncate=truncate)
        want = call.verify(reference, method, truncate=truncate)
        return all(map(torch.equal, out[:3], want[:3]))

    return compare
