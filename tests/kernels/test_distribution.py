"""Sampled laws, with production keys over many consecutive steps: what enumeration cannot see.

Thousands of independent requests are one batch. The target is a table of logits by last token, so
the law of every k-gram is known; k-grams are longer than a step can emit, because sharing random
numbers between steps leaves shorter ones untouched.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, noise, sample_draft, verify

MakeSampling = Callable[..., Sampling]


def emit(
    sampling: Sampling,
    p: Tensor,
    q: Tensor,
    *,
    method: str,
    how: str,
    form: str,
    k: int,
    length: int,
) -> Tensor:
    """The first `length` tokens of every request; p and q are logits by last token, [V, V]."""
    n, vocab = len(sampling.stream), len(p)
    written = torch.zeros(n, 1 + length + k, dtype=torch.int64)  # after a token 0
    filled = torch.zeros(n, dtype=torch.int64)
    slots = torch.arange(n)
    columns = torch.arange(k + 1)
    while bool((slots >= 0).any()):
        context, laws = [written.gather(1, filled[:, None]).squeeze(1)], []
        for i in range(k):
            laws.append(q[context[-1]])
            context.append(
                sample_draft(laws[-1], filled + i, slots, sampling, how=how, column=i).clamp(min=0)
            )
        rows, law = torch.stack(context, 1), torch.stack(laws, 1)
        everything = torch.arange(vocab).expand(law.shape)
        forms = {"dense": DenseQ(law), "sparse": SparseQ(everything, law), "one-hot": None}
        out = verify(
            p[rows].view(-1, vocab),
            torch.arange(n + 1) * (k + 1),
            rows[:, 1:],
            (filled[:, None] + columns).view(-1),
            slots,
            sampling,
            method=method,
            q=forms[form],
        )
        emitted = columns < out.count[:, None]
        where = (filled[:, None] + 1 + columns)[emitted]
        written[torch.arange(n)[:, None].expand_as(emitted)[emitted], where] = out.tokens[emitted]
        filled += out.count
        slots = slots.where(filled < length, -1)
    return written[:, 1 : length + 1]


def misfit(tokens: Tensor, p: Tensor) -> float:
    """The p-value of the emitted sequences under the target's law."""
    vocab, length = len(p), tokens.shape[1]
    words = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)
    step = p.double().softmax(-1)
    law = step[0, words[:, 0]]
    for i in range(1, length):
        law = law * step[words[:, i - 1], words[:, i]]
    code = (tokens * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    seen, expected = torch.bincount(code, minlength=len(law)), law * len(tokens)
    assert expected.min() > 5
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum().item(), len(law) - 1))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """A target over three ids, in two noise groups, and a drafter that is often wrong."""
    monkeypatch.setattr(noise, "GROUP", 2)
    p = torch.tensor([[0.0, 0.4, -0.3], [0.8, 0.0, 0.2], [-0.2, 0.5, 0.1]])
    return p, torch.tensor([[0.9, -0.5, 0.0], [0.0, 0.7, 0.0], [0.3, -0.8, 0.6]])


@pytest.mark.parametrize(
    ("method", "how", "form"),
    [
        ("coupled", "coupled", "one-hot"),
        ("coupled", "independent", "one-hot"),
        ("coupled", "greedy", "one-hot"),
        ("standard", "greedy", "one-hot"),
        ("standard", "independent", "one-hot"),
        ("standard", "independent", "dense"),
        ("standard", "independent", "sparse"),
        ("block", "greedy", "one-hot"),
        ("block", "independent", "one-hot"),
        ("block", "independent", "dense"),
        ("block", "independent", "sparse"),
    ],
)
def test_k_grams_over_many_steps_have_the_targets_law(
    make_sampling: MakeSampling, tables: tuple[Tensor, Tensor], method: str, how: str, form: str
) -> None:
    p, q = tables
    sampling = make_sampling(40_000)
    tokens = emit(sampling, p, q, method=method, how=how, form=form, k=3, length=5)
    assert misfit(tokens, p) > 1e-3


@pytest.mark.parametrize(("method", "form"), [("standard", "dense"), ("block", "dense")])
def test_temperature_is_part_of_both_laws(
    make_sampling: MakeSampling, tables: tuple[Tensor, Tensor], method: str, form: str
) -> None:
    p, q = tables
    sampling = make_sampling(40_000, temperature=0.7)
    tokens = emit(sampling, p, q, method=method, how="independent", form=form, k=2, length=4)
    assert misfit(tokens, p / 0.7) > 1e-3
    assert misfit(tokens, p) < 1e-9


NARROW = torch.linspace(-1.5, 1.5, 16).expand(16, 16)


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
@pytest.mark.parametrize("group", [4, 32])
def test_drafts_from_the_reversed_law(
    make_sampling: MakeSampling, monkeypatch: pytest.MonkeyPatch, method: str, group: int
) -> None:
    monkeypatch.setattr(noise, "GROUP", group)
    sampling = make_sampling(60_000)
    tokens = emit(
        sampling, NARROW, -NARROW, method=method, how="independent", form="dense", k=1, length=1
    )
    assert misfit(tokens, NARROW) > 1e-3


def test_a_wider_vocabulary_than_a_group(make_sampling: MakeSampling) -> None:
    p = torch.randn(1, 70).expand(70, 70)
    sampling = make_sampling(40_000)
    for method in ("coupled", "standard"):
        tokens = emit(
            sampling, p, p.flip(1), method=method, how="independent", form="dense", k=1, length=1
        )
        assert misfit(tokens, p) > 1e-3


def test_block_accepts_more_than_standard(
    make_sampling: MakeSampling, tables: tuple[Tensor, Tensor]
) -> None:
    p, q = tables
    n, k, vocab = 20_000, 3, 3
    sampling, slots, context = make_sampling(n), torch.arange(n), [torch.zeros(n).long()]
    for i in range(k):
        law = q[context[-1]]
        context.append(
            sample_draft(law, slots * 0 + i, slots, sampling, how="independent", column=i)
        )
    rows = torch.stack(context, 1)
    mean = {
        method: verify(
            p[rows].view(-1, vocab),
            torch.arange(n + 1) * (k + 1),
            rows[:, 1:],
            torch.arange(k + 1).repeat(n),
            slots,
            sampling,
            method=method,
            q=DenseQ(q[rows[:, :-1]]),
        )
        .count.double()
        .mean()
        for method in ("standard", "block", "coupled")
    }
    assert mean["block"] > mean["standard"] + 0.01
    assert mean["standard"] > mean["coupled"]


# What the rules on random numbers are for: each test breaks one and must see the bias.


@pytest.mark.parametrize("method", ["standard", "block"])
def test_bias_if_the_residual_shares_the_drafts_noise(
    make_sampling: MakeSampling, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sampling = make_sampling(60_000)
    arguments = {"method": method, "how": "coupled", "form": "dense"}
    assert misfit(emit(sampling, NARROW, -NARROW, k=1, length=1, **arguments), NARROW) > 1e-3
    monkeypatch.setattr(noise, "RESIDUAL_TOKEN", noise.TARGET_TOKEN)
    assert misfit(emit(sampling, NARROW, -NARROW, k=1, length=1, **arguments), NARROW) < 1e-9


def coin(make_sampling: MakeSampling, n: int) -> tuple[Sampling, Tensor, Tensor]:
    p = torch.tensor([0.5, 0.5]).log().expand(2, 2)
    return make_sampling(n), p, torch.tensor([0.8, 0.2]).log().expand(2, 2)


def test_bias_if_block_meets_a_positions_uniform_in_two_steps(
    make_sampling: MakeSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "GROUP", 2)
    sampling, p, q = coin(make_sampling, 100_000)
    arguments = {"method": "block", "how": "independent", "form": "dense"}
    assert misfit(emit(sampling, p, q, k=4, length=5, **arguments), p) > 1e-3
    keyed = noise.uniform

    def without_column(stream: Tensor, position: Tensor, domain: int, _: Tensor) -> Tensor:
        return keyed(stream, position, domain, 0)

    monkeypatch.setattr(noise, "uniform", without_column)
    assert misfit(emit(sampling, p, q, k=4, length=5, **arguments), p) < 1e-9


def test_bias_if_coupled_drafts_are_judged_by_block(
    make_sampling: MakeSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "GROUP", 2)
    sampling, p, q = coin(make_sampling, 100_000)
    # A position is drafted with the same noise in every step, and whether block keeps what stands
    # before it depends on that draft.
    tokens = emit(sampling, p, q, method="block", how="coupled", form="dense", k=4, length=5)
    assert misfit(tokens, p) < 1e-9
    # Standard decides from left to right, and its residual has noise of its own.
    tokens = emit(sampling, p, q, method="standard", how="coupled", form="dense", k=4, length=5)
    assert misfit(tokens, p) > 1e-3


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_column_without_a_law_leaves_the_law_of_the_column_before_it(
    make_sampling: MakeSampling, method: str
) -> None:
    n = 40_000
    sampling = make_sampling(n)
    logits = torch.tensor([[0.5, 1.2, -0.4], [1.0, -0.6, 0.4], [-0.3, 0.6, 0.9]])
    draft_logits = torch.tensor([1.5, 0.0, -1.0])
    drafts = torch.stack(
        [torch.multinomial(draft_logits.softmax(0), n, True), torch.randint(0, 3, (n,))], dim=1
    )
    ids = torch.tensor([[0, 1, 2], [-1, -1, -1]]).expand(n, 2, 3).contiguous()
    q = SparseQ(ids, torch.stack([draft_logits, torch.zeros(3)]).expand(n, 2, 3).contiguous())
    out = verify(
        logits.repeat(n, 1),
        torch.arange(n + 1) * 3,
        drafts,
        torch.arange(3).repeat(n) + 5,
        torch.arange(n),
        sampling,
        method=method,
        q=q,
    )
    assert misfit(out.tokens[:, :1], logits) > 1e-3
