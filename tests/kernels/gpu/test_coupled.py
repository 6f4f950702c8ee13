"""`verify` by the coupled method and `sample`, nothing truncated: the reference's tokens."""

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

from specdec_kernels import Sampling, Verified, reference

Make = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MIXED = [0.7, 0.0, 1.0, 1.5, 0.3, 0.0]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [*zip([1, 31, 32, 64, 37], DTYPES * 2, strict=False), *((331, x) for x in DTYPES)],
    ids=str,
)
@pytest.mark.usefixtures("small_tiles")
def test_greedy_and_sampled_requests_side_by_side(
    make_batch: Make, make_sampling: Make, agree: Make, vocab: int, dtype: torch.dtype
) -> None:
    sampling = make_sampling(6, temperature=MIXED)
    logits = (torch.randn(11, vocab) * 3).to(dtype)
    agree(make_batch([4, 3, 1, 3], 3, logits, sampling), truncate=False)


@pytest.mark.parametrize("k", range(17))
def test_ragged_chains_of_every_length(
    make_batch: Make, make_sampling: Make, agree: Make, k: int
) -> None:
    # fewer rows than drafts, as many, one more, and more than can be used
    rows = [1, 0, k + 1, min(k, 3), k + 3]
    sampling = make_sampling(6, temperature=[0.0, 0.0, 0.9, 0.0, 0.0, 0.0])
    batch = make_batch(rows, k, torch.randn(sum(rows), 40), sampling, right=0.95)
    out = agree(batch, truncate=False)
    assert out.tokens.shape == (5, k + 1)
    assert out.count[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_drafts_are_kept_where_all_are_right_and_none_where_the_first_is_wrong(
    make_batch: Make, make_sampling: Make, agree: Make, temperature: float
) -> None:
    batch = make_batch(
        [5, 5], 4, torch.randn(10, 50), make_sampling(2, temperature=temperature), truncate=False,
        right=1.0,
    )  # fmt: skip
    batch.draft_tokens[1, 0] = (batch.draft_tokens[1, 0] + 1) % 50
    assert agree(batch, truncate=False).count.tolist() == [5, 1]


@pytest.mark.parametrize("nothing", [-1, -(2**40), 50, 2**32 + 3])
def test_what_is_no_draft_ends_the_chain(
    make_batch: Make, make_sampling: Make, agree: Make, nothing: int
) -> None:
    sampling = make_sampling(3, temperature=[0.0, 0.9, 0.0])
    batch = make_batch(
        [4, 4, 4], 3, torch.randn(12, 50), sampling, truncate=False, right=1.0
    )  # fmt: skip
    for request, column in enumerate((0, 1, 2)):
        batch.draft_tokens[request, column] = nothing
    assert agree(batch, truncate=False).count.tolist() == [1, 2, 3]


def test_padding_and_requests_without_rows_give_nothing(
    make_batch: Make, make_sampling: Make, agree: Make
) -> None:
    batch = make_batch([2, 0, 3, 0], 2, torch.randn(5, 40), make_sampling(5))
    batch.slots[0] = batch.slots[3] = -1
    out = agree(batch, truncate=False)
    assert out.count[[0, 1, 3]].tolist() == [0, 0, 0]
    assert (out.tokens[[0, 1, 3]] == -1).all()
    assert (out.rows[[0, 1, 3]] == -1).all()


@pytest.mark.parametrize("truncate", [False, True])
def test_a_batch_of_nobody(
    kernels: Any, make_sampling: Make, device: torch.device, truncate: bool
) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    start, logits = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, 40)
    out = kernels.verify(
        logits.to(device), start, none.view(0, 3), none, none, make_sampling(1),
        method="coupled", truncate=truncate,
    )  # fmt: skip
    assert [x.shape for x in out[:3]] == [(0, 4), (0,), (0, 4)]
    tokens = kernels.sample(logits.to(device), none, none, make_sampling(1), truncate=truncate)
    assert tokens.shape == (0,)


def test_rows_may_lie_at_any_stride_and_drafts_too(
    kernels: Any, make_batch: Make, make_sampling: Make, agree: Make
) -> None:
    batch = make_batch([3, 2], 2, torch.randn(5, 70), make_sampling(2, temperature=[0.0, 0.6]))
    wide = torch.full((5, 131), nan, device=batch.logits.device)
    wide[:, 9:79] = batch.logits
    drafts = torch.full((2, 7), 3, device=batch.logits.device)
    drafts[:, 2:4] = batch.draft_tokens
    spread = batch._replace(logits=wide[:, 9:79], draft_tokens=drafts[:, 2:4])
    packed = agree(batch, truncate=False)
    assert all(map(torch.equal, packed[:3], agree(spread, truncate=False)))


def degenerate(vocab: int) -> Tensor:
    """Every row of the README's table, and what tiles can make of them."""
    rows = torch.randn(18, vocab)
    rows[0] = -inf
    rows[1] = -inf
    rows[1, vocab - 1] = -3.0
    rows[2] = nan
    rows[3, 5] = nan
    rows[4, vocab - 2] = inf
    rows[5, [3, vocab - 1]] = inf
    rows[6] = 0.0
    rows[7, [4, vocab // 2, vocab - 1]] = 9.0
    rows[8] = nan
    rows[8, 7] = -50.0
    rows[9] = inf
    rows[10, : vocab // 2] = -inf
    rows[11, vocab // 3 :] = -inf
    rows[12] = torch.linspace(-3e4, 3e4, vocab)  # all but one weigh nothing
    rows[13] = -6e4
    rows[13, 1] = nan
    rows[14, ::2] = -inf
    rows[14, 1] = inf
    rows[15] = -0.0
    rows[15, vocab // 2 :] = 0.0
    rows[16, 5] = 3e38  # finite, but not in powers of two
    rows[17] = -3e38
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.usefixtures("small_tiles")
def test_degenerate_rows(
    kernels: Any, make_sampling: Make, device: torch.device, dtype: torch.dtype, temperature: float
) -> None:
    logits = degenerate(150).to(device, dtype)
    sampling, slots = make_sampling(1, temperature=temperature), torch.zeros(18, dtype=torch.int64)
    at, slots = torch.arange(18).to(device), slots.to(device)
    given = logits, at, slots, sampling
    out = kernels.sample(*given, truncate=False)
    assert torch.equal(out, reference.sample(*given, truncate=False))
    assert out[[0, 1, 2, 4, 8]].tolist() == [0, 149, 0, 148, 7]
    if not temperature:
        assert out[[5, 6, 7, 9, 15]].tolist() == [3, 0, 4, 0, 0]


def test_values_that_float32_tells_apart_and_the_dtype_does_not_tie(
    kernels: Any, make_sampling: Make, device: torch.device
) -> None:
    logits = torch.tensor([[1.0, 1.001, 1.002, 0.5]]).to(device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    greedy = make_sampling(1, temperature=0.0)
    for dtype, best in ((torch.float32, 2), (torch.bfloat16, 0)):
        out = kernels.sample(logits.to(dtype), one, one, greedy, truncate=False)
        assert out.tolist() == [best]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("truncate", [False, True])
def test_a_request_does_not_depend_on_its_batch(
    kernels: Any, make_batch: Make, make_sampling: Make, truncate: bool
) -> None:
    sampling = make_sampling(5, temperature=[0.7, 0.0, 1.0, 1.5, 0.3])
    batch = make_batch([3, 1, 2, 2], 2, torch.randn(8, 150).bfloat16(), sampling)
    verify: Callable[[Any], Verified] = lambda b: kernels.verify(  # noqa: E731
        *b, method="coupled", truncate=truncate
    )
    together = verify(batch)
    for order in ([3, 1, 0, 2], [2], [0, 0, 0]):
        some = verify(batch.of(order))
        assert torch.equal(some.tokens, together.tokens[order])
        assert torch.equal(some.count, together.count[order])
    padded = verify(
        batch._replace(slots=torch.where(batch.slots == batch.slots[1], -1, batch.slots))
    )
    assert torch.equal(padded.tokens[[0, 2, 3]], together.tokens[[0, 2, 3]])
    more = torch.full((4, 3), -1, device=batch.slots.device)
    wider = verify(batch._replace(draft_tokens=torch.cat([batch.draft_tokens, more], 1)))
    assert torch.equal(wider.tokens[:, :3], together.tokens)


def test_a_row_without_drafts_is_sampled(
    kernels: Any, make_batch: Make, make_sampling: Make
) -> None:
    sampling = make_sampling(6, temperature=MIXED)
    batch = make_batch([1] * 5, 0, torch.randn(5, 90), sampling)
    out = kernels.verify(*batch, method="coupled", truncate=False)
    own = kernels.sample(batch.logits, batch.positions, batch.slots, sampling, truncate=False)
    assert torch.equal(out.tokens[:, 0], own)
    assert (out.count == 1).all()


def test_padding_is_sampled_as_nothing(
    kernels: Any, make_sampling: Make, device: torch.device
) -> None:
    slots = torch.tensor([0, -1, -1], device=device)
    out = kernels.sample(
        torch.randn(3, 40, device=device), slots + 2, slots, make_sampling(1), truncate=False
    )
    assert out[0] >= 0
    assert out[1:].tolist() == [-1, -1]


def test_drawn_ids_follow_the_softmax(
    kernels: Any, make_sampling: Make, device: torch.device, interpreted: bool
) -> None:
    rows = 150 if interpreted else 200_000
    # two groups, so that both levels of the draw count
    logits = torch.full((34,), -inf)
    logits[[0, 5, 33]] = torch.tensor([0.5, 0.0, 1.0])
    at = torch.arange(rows, device=device)
    out = kernels.sample(
        logits.to(device).expand(rows, 34), at, at * 0, make_sampling(1, temperature=0.8),
        truncate=False,
    )  # fmt: skip
    seen = torch.bincount(out.cpu(), minlength=34)
    law = (logits / 0.8).double().softmax(-1)
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
def test_any_batch_is_judged_as_by_the_reference(
    make_batch: Make, make_sampling: Make, agree: Make, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    k = data.draw(st.integers(0, 4))
    rows = data.draw(st.lists(st.integers(0, k + 2), min_size=1, max_size=4))
    vocab = data.draw(st.sampled_from([1, 2, 33, 63, 97, 200]))
    temperature = [data.draw(st.sampled_from([0.0, 1e-6, 1e-5, 0.3, 1.0, 1.5])) for _ in range(5)]
    sampling: Sampling = make_sampling(5, temperature=temperature, seed=data.draw(st.integers()))
    logits = torch.randn(sum(rows), vocab) * data.draw(st.sampled_from([0.1, 3.0, 100.0]))
    odd = data.draw(st.sampled_from([None, nan, inf, -inf]))
    if odd is not None:
        logits[torch.rand(logits.shape) < 0.1] = odd
    batch = make_batch(rows, k, logits.to(data.draw(st.sampled_from(DTYPES))), sampling)
    if k and data.draw(st.booleans()):
        batch.draft_tokens[:, data.draw(st.integers(0, k - 1))] = -1
    agree(batch, truncate=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
def test_the_vocabularies_of_real_models(
    make_batch: Make, make_sampling: Make, agree: Make, vocab: int, dtype: torch.dtype
) -> None:
    sampling = make_sampling(48, temperature=(MIXED * 8))
    rows = [6, 1, 4, 0, 6, 8] * 6
    logits = (torch.randn(sum(rows), vocab) * 3).to(dtype)
    agree(make_batch(rows, 5, logits, sampling, right=0.9), truncate=False, near=1)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements(
    kernels: Any, make_sampling: Make, device: torch.device
) -> None:
    rows, vocab = 9000, 262144
    logits = torch.full((rows, vocab), -5.0, dtype=torch.bfloat16, device=device)
    at = torch.arange(rows, device=device)
    best = at * 29 % vocab
    logits[at, best] = 60.0
    for temperature in (0.0, 0.9):
        sampling = make_sampling(1, temperature=temperature)
        assert torch.equal(kernels.sample(logits, at, at * 0, sampling, truncate=False), best)


@pytest.mark.usefixtures("small_tiles")
def test_more_requests_than_a_launch_takes_are_verified_in_parts(
    kernels: Any, make_batch: Any, make_sampling: Any, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST", 2)
    batch = make_batch([3, 1, 2, 0, 3], 2, torch.randn(9, 70), make_sampling(5))
    agree(batch, truncate=False)
    given = batch.logits, batch.positions, batch.row_slots(), batch.sampling
    assert torch.equal(kernels.sample(*given), reference.sample(*given))
