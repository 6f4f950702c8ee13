"""Min-p, top-k and top-p by attempts, without sorting: the reference's tokens."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from specdec_kernels import Sampling, noise, reference

Make = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAWS: dict[str, dict[str, float]] = {
    "min-p": {"min_p": 0.2},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6},
    "min-p, top-k": {"min_p": 0.05, "top_k": 4},
    "min-p, top-p": {"min_p": 0.05, "top_p": 0.7},
    "top-k, top-p": {"top_k": 6, "top_p": 0.7},
    "all": {"min_p": 0.02, "top_k": 8, "top_p": 0.8},
}


@pytest.fixture
def same(kernels: Any, device: torch.device) -> Callable[..., Tensor]:
    """Sample row i as slot i (or as `slots` say); the reference must give the same; the tokens."""

    def check(
        logits: Tensor,
        sampling: Sampling,
        *,
        slots: Tensor | None = None,
        positions: Tensor | None = None,
        near: int = 0,
    ) -> Tensor:
        at = torch.arange(len(logits), device=device)
        given = (
            logits.to(device),
            at if positions is None else positions.to(device),
            at if slots is None else slots.to(device),
            sampling,
        )
        out: Tensor = kernels.sample(*given)
        want = reference.sample(*given)
        wrong = (out != want).nonzero().flatten().tolist()
        assert len(wrong) <= near, [(i, out[i].item(), want[i].item()) for i in wrong[:8]]
        return out.cpu()

    return check


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("vocab", "dtype"), list(zip([37, 128, 200], DTYPES, strict=True)), ids=str
)
@pytest.mark.usefixtures("small_tiles")
def test_each_cut_and_all_of_them_together(
    make_sampling: Make, same: Make, law: str, vocab: int, dtype: torch.dtype
) -> None:
    sampling = make_sampling(4, temperature=[0.7, 1.0, 1.5, 0.3], **LAWS[law])
    same((torch.randn(4, vocab) * 2).to(dtype), sampling)


@pytest.mark.parametrize("law", ["min-p", "top-k", "top-p", "all"])
def test_values_that_tie_at_the_cut_are_all_kept(make_sampling: Make, same: Make, law: str) -> None:
    sampling = make_sampling(5, temperature=1.0, **LAWS[law])
    logits = torch.randn(5, 40).mul(1.5).round()
    logits[0] = 2.0
    same(logits, sampling)


@pytest.mark.parametrize("law", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_tightest_cut_leaves_the_likeliest_id(
    make_sampling: Make, same: Make, law: dict[str, float]
) -> None:
    logits = torch.randn(3, 70)
    out = same(logits, make_sampling(3, temperature=1.5, **law))
    assert torch.equal(out, logits.argmax(-1))


def test_min_p_may_cut_where_top_k_would_keep_much_more(make_sampling: Make, same: Make) -> None:
    logits = torch.linspace(0, 4, 64).expand(4, 64).contiguous()
    assert same(logits, make_sampling(4, top_k=45, min_p=0.99)).tolist() == [63] * 4


@pytest.mark.parametrize("law", [{"top_k": 50}, {"top_k": 2**40}, {}, {"min_p": 0.0, "top_p": 1.0}])
def test_a_cut_that_keeps_all_changes_nothing(
    kernels: Any, make_sampling: Make, same: Make, device: torch.device, law: dict[str, float]
) -> None:
    logits, sampling = torch.randn(4, 50), make_sampling(4, **law)
    at = torch.arange(4, device=device)
    whole = kernels.sample(logits.to(device), at, at, sampling, truncate=False)
    assert torch.equal(same(logits, sampling), whole.cpu())


def test_a_row_whose_attempts_all_fail_is_drawn_from_what_is_kept(
    make_sampling: Make, same: Make
) -> None:
    rows, vocab = 6, 64
    logits = torch.randn(rows, vocab) * 0.1
    sampling = make_sampling(
        rows, top_k=[2, 2, 2, 0, 0, 0], top_p=[1.0, 0.03, 1.0, 0.04, 0.04, 1.0]
    )
    sampling.min_p[5] = 0.99
    stream, at = sampling.stream.cpu(), torch.arange(rows)
    kept = reference.process_logits(logits, at, Sampling(*(x.cpu() for x in sampling)))
    lost = torch.ones(rows, dtype=torch.bool)
    for attempt in range(noise.ATTEMPTS):
        tokens = noise.draw(logits, stream, at, noise.TARGET_TOKEN, attempt)
        lost &= kept.gather(1, tokens[:, None]).squeeze(1) == -inf
    assert lost.sum() >= 4, "the case is to reach the last draw"
    out = same(logits, sampling)
    assert (kept.gather(1, out[:, None]) > -inf).all()


def test_later_attempts_are_reached_one_by_one(make_sampling: Make, same: Make) -> None:
    vocab, candidates = 32, torch.arange(64)
    logits = torch.zeros(vocab)
    logits[: vocab // 2] = 0.01  # half of the mass is cut
    sampling = make_sampling(1, top_k=vocab // 2)
    stream = sampling.stream.cpu().expand(64)
    tries = [
        noise.draw(logits.expand(64, vocab), stream, candidates, noise.TARGET_TOKEN, attempt)
        for attempt in range(noise.ATTEMPTS)
    ]
    first = (torch.stack(tries) < vocab // 2).int().argmax(0)
    positions = torch.stack(
        [candidates[(first == n) & (torch.stack(tries)[n] < 16)][0] for n in range(noise.ATTEMPTS)]
    )
    out = same(
        logits.expand(noise.ATTEMPTS, vocab).contiguous(), sampling,
        slots=torch.zeros(noise.ATTEMPTS, dtype=torch.int64), positions=positions,
    )  # fmt: skip
    assert out.tolist() == [int(tries[n][positions[n]]) for n in range(noise.ATTEMPTS)]


def test_without_truncation_its_parameters_count_for_nothing(
    make_batch: Make, make_sampling: Make, agree: Make
) -> None:
    tight = make_sampling(3, temperature=[0.9, 0.0, 1.2], top_k=1, top_p=0.1, min_p=0.9)
    batch = make_batch([2, 2, 1], 1, torch.randn(5, 60), tight, truncate=False)
    loose = batch._replace(sampling=make_sampling(3, temperature=[0.9, 0.0, 1.2]))
    out = agree(batch, truncate=False)
    assert all(map(torch.equal, out[:3], agree(loose, truncate=False)))


@pytest.mark.usefixtures("small_tiles")
def test_chains_of_requests_that_truncate_and_requests_that_do_not(
    make_batch: Make, make_sampling: Make, agree: Make
) -> None:
    sampling = make_sampling(
        5,
        temperature=[0.7, 0.0, 1.0, 1.5, 1.0],
        top_k=[5, 1, 0, 0, 0],
        top_p=[0.9, 0.1, 0.5, 1.0, 1.0],
        min_p=[0.0, 0.9, 0.0, 0.1, 0.0],
    )
    batch = make_batch([3, 2, 3, 0, 2], 2, torch.randn(10, 150).bfloat16() * 2, sampling, right=0.9)
    batch.slots[1] = -1
    agree(batch)


@pytest.mark.parametrize(
    ("law", "dtype"),
    [
        ("min-p", torch.bfloat16),
        ("top-k", torch.float32),
        ("top-p", torch.float32),
        ("all", torch.bfloat16),
        ("all", torch.float32),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_tiles")
def test_degenerate_rows(make_sampling: Make, same: Make, law: str, dtype: torch.dtype) -> None:
    logits = torch.randn(8, 100)
    logits[0] = -inf
    logits[1] = nan
    logits[2, 3::7] = nan
    logits[3, [70, 99]] = inf
    logits[4] = 0.0
    logits[5, 1:] = -inf
    logits[6, ::2] = -inf
    logits[7] = nan
    logits[7, 80] = -4.0
    out = same(logits.to(dtype), make_sampling(8, temperature=0.7, **LAWS[law]))
    assert out[[0, 1, 5, 7]].tolist() == [0, 0, 0, 80]
    assert out[3] in (70, 99)


def test_negative_and_positive_values_are_ordered_alike(make_sampling: Make, same: Make) -> None:
    # the cut falls among negative values, at zero of either sign, and among tiny ones
    logits = torch.stack(
        [
            -torch.arange(40) * 0.2 - 1,
            torch.tensor([0.0, -0.0] * 20),
            torch.arange(40) * 1e-40,
            torch.randn(40) * 1e-3 - 60,
            torch.cat([torch.full((20,), 1e-3), torch.full((20,), -1e-3)]),
        ]
    )
    same(logits, make_sampling(5, top_k=12, top_p=0.95))


def test_truncated_draws_follow_the_truncated_law(
    kernels: Any, make_sampling: Make, device: torch.device, interpreted: bool
) -> None:
    rows = 80 if interpreted else 200_000
    logits = torch.tensor([1.0, 0.6, 0.3, 0.0, 0.0, -0.2]).to(device).expand(rows, 6)
    at, sampling = torch.arange(rows, device=device), make_sampling(1, min_p=0.45)
    out = kernels.sample(logits, at, at * 0, sampling)
    law = reference.process_logits(logits[:1], at[:1] * 0, sampling)[0].cpu().double().softmax(-1)
    seen = torch.bincount(out.cpu(), minlength=6)
    assert (law == 0).any()
    assert seen[law == 0].sum() == 0
    assert chisquare(seen[law > 0], rows * law[law > 0]).pvalue > 1e-3


@given(data=st.data())
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink a failure takes the interpreter minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_parameters_truncate_as_in_the_reference(
    make_sampling: Make, same: Make, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**20)))

    def each(*values: float) -> list[float]:
        return [data.draw(st.sampled_from(values)) for _ in range(3)]

    sampling = make_sampling(
        3,
        temperature=each(0.0, 0.3, 0.7, 1.0, 1.5),
        top_k=each(0, 0, 1, 2, 7, 1000),
        top_p=each(1.0, 1.0, 1e-6, 0.1, 0.5, 0.95),
        min_p=each(0.0, 0.0, 0.01, 0.3, 1.0),
        seed=data.draw(st.integers()),
    )
    vocab = data.draw(st.sampled_from([1, 2, 31, 33, 97]))
    logits = torch.randn(3, vocab) * data.draw(st.sampled_from([0.1, 3.0, 30.0]))
    if data.draw(st.booleans()):
        logits = logits.round()
    same(logits.to(data.draw(st.sampled_from(DTYPES))), sampling)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
def test_the_vocabularies_of_real_models(
    make_sampling: Make, same: Make, vocab: int, dtype: torch.dtype
) -> None:
    laws = [LAWS[name] for name in LAWS] + [{}]
    n = 8 * len(laws)
    columns = {
        name: [law.get(name, off) * scale for law in laws] * 8
        for name, off, scale in (("top_k", 0, 10), ("top_p", 1.0, 1), ("min_p", 0.0, 1))
    }
    sampling = make_sampling(n, temperature=[0.3, 0.7, 1.0, 1.5] * (n // 4), **columns)
    # a cut by top-p sums in another order than the reference: an id at the edge may fall either way
    same((torch.randn(n, vocab) * 3).to(dtype), sampling, near=2)


@pytest.mark.parametrize(
    ("vocab", "batch"), [(150, 4), pytest.param(151936, 64, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
def test_a_row_without_cuts_keeps_its_tokens_where_no_cuts_are_looked_for(
    kernels: Any, make_batch: Make, make_sampling: Make, method: str, vocab: int, batch: int
) -> None:
    torch.manual_seed(vocab)
    cuts = [0.9 if i % 2 else 1.0 for i in range(batch)]
    logits = (torch.randn(batch * 4, vocab) * 3).bfloat16()
    mixed = make_batch([4] * batch, 3, logits, make_sampling(batch, temperature=0.8, top_p=cuts))
    plain = mixed.of([b for b in range(batch) if cuts[mixed.slots[b]] == 1])
    beside = kernels.verify(*mixed, method=method).tokens
    alone = kernels.verify(*plain, method=method, truncate=False).tokens
    assert torch.equal(alone, beside[[b for b in range(batch) if cuts[mixed.slots[b]] == 1]])
