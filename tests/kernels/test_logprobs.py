"""Log-probabilities and ranks of tokens, against definitions in double precision."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import logprobs
from specdec_kernels.logprobs import token_logprobs

V = 49152
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logprobs_are_those_of_a_log_softmax_in_double_precision(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, V, dtype=torch.float64) * 4 + 30).to(dtype)
    tokens = torch.randint(0, V, (5,))
    found = token_logprobs(logits, tokens, 7)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        found.logprob.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=0
    )
    best = torch.sort(exact, dim=-1, descending=True, stable=True)
    assert found.top_ids.tolist() == best.indices[:, :7].tolist()
    torch.testing.assert_close(found.top_logprobs.double(), best.values[:, :7], atol=1e-4, rtol=0)
    assert found.logprob.dtype == found.top_logprobs.dtype == torch.float32
    assert found.rank.dtype == found.top_ids.dtype == found.top_ranks.dtype == torch.int64


def naive(row: list[float], n: int) -> list[int]:
    clean = [-inf if x != x else x for x in row]
    return sorted(range(len(row)), key=lambda i: (-clean[i], i))[:n]


values = st.sampled_from([-inf, nan, -2.0, 0.0, -0.0, 0.5, 0.5, 1.0])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 12), dtype=st.sampled_from(FLOATS))
def test_ties_go_to_the_lowest_id_and_all_of_them_count_in_a_rank(
    data: st.DataObject, vocab: int, dtype: torch.dtype
) -> None:
    row = st.lists(values, min_size=vocab, max_size=vocab)
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in rows]
    n = data.draw(st.integers(0, vocab))
    found = token_logprobs(torch.tensor(rows, dtype=dtype), torch.tensor(tokens), n)
    clean = [[-inf if x != x else x for x in row] for row in rows]

    def rank(row: list[float], token: int) -> int:
        return sum(x >= row[token] for x in row)

    assert found.rank.tolist() == [rank(r, t) for r, t in zip(clean, tokens, strict=True)]
    assert found.top_ids.tolist() == [naive(row, n) for row in rows]
    expected = [[rank(r, i) for i in naive(r, n)] for r in clean]
    assert found.top_ranks.tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ties_across_the_cut_of_a_large_vocabulary_go_to_the_lowest_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, V, dtype=dtype)
    logits[0, [9, 40000, 41000]] = 1
    found = token_logprobs(logits, torch.tensor([41000, 5]), 5)
    assert found.top_ids.tolist() == [[9, 40000, 41000, 0, 1], [0, 1, 2, 3, 4]]
    assert found.top_ranks.tolist() == [[3, 3, 3, V, V], [V] * 5]
    assert found.rank.tolist() == [3, V]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_other_rows_nor_on_threads(
    dtype: torch.dtype, threads: None
) -> None:
    logits = torch.randn(9, V).to(dtype)
    tokens = torch.randint(0, V, (9,))
    torch.set_num_threads(1)
    alone = [token_logprobs(logits[i : i + 1], tokens[i : i + 1], 4) for i in range(9)]
    for number in (1, 2, 4):
        torch.set_num_threads(number)
        found = token_logprobs(logits, tokens, 4)
        lone = token_logprobs(logits[3:4], tokens[3:4], 4)
        for field in found._fields:
            together = getattr(found, field)
            assert torch.equal(together, torch.cat([getattr(x, field) for x in alone])), field
            assert torch.equal(getattr(lone, field), together[3:4]), field


def test_fewer_of_the_likeliest_are_the_first_of_more() -> None:
    logits = torch.randint(0, 4, (6, 30)).to(torch.bfloat16)
    tokens = torch.zeros(6, dtype=torch.int64)
    every = token_logprobs(logits, tokens, 30)
    for n in range(30):
        some = token_logprobs(logits, tokens, n)
        assert torch.equal(some.top_ids, every.top_ids[:, :n])
        assert torch.equal(some.top_logprobs, every.top_logprobs[:, :n])
        assert torch.equal(some.top_ranks, every.top_ranks[:, :n])


def test_ranks_compare_logits_in_their_own_dtype() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    found = token_logprobs(logits, torch.tensor([1]), 1)
    assert (found.rank.item(), found.top_ids.item()) == (1, 1)
    assert token_logprobs(logits.float(), torch.tensor([1]), 1).top_ids.item() == 0


def test_nan_is_excluded_and_infinity_is_certain() -> None:
    logits = torch.tensor([[nan, 1.0, nan], [0.0, inf, 5.0]])
    found = token_logprobs(logits, torch.tensor([1, 1]), 3)
    assert found.logprob.tolist() == [0.0, 0.0]
    assert found.top_ids.tolist() == [[1, 0, 2], [1, 2, 0]]
    assert found.top_logprobs[0].tolist() == [0.0, -inf, -inf]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_float_stays_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([[torch.finfo(dtype).max, inf, 0.0]], dtype=dtype)
    found = token_logprobs(logits, torch.tensor([1]), 2)
    assert found.logprob.item() == pytest.approx(-0.6931, abs=1e-3)
    assert found.top_ids.tolist() == [[0, 1]]


def test_a_row_that_excludes_everything_gives_minus_infinity() -> None:
    logits = torch.tensor([[-inf, nan, -inf], [0.0, 0.0, 0.0]])
    found = token_logprobs(logits, torch.tensor([2, 0]), 2)
    assert found.logprob[0].item() == -inf
    assert found.top_logprobs[0].tolist() == [-inf, -inf]
    assert found.top_ids[0].tolist() == [0, 1]
    assert found.rank[0].item() == 3


def test_ids_outside_the_vocabulary_are_padding() -> None:
    found = token_logprobs(torch.zeros(3, 4), torch.tensor([-1, 4, 0]), 1)
    assert found.logprob.tolist() == [-inf, -inf, pytest.approx(-1.3863, abs=1e-3)]
    assert found.rank.tolist() == [0, 0, 4]


def test_no_rows_and_no_likeliest_are_allowed() -> None:
    found = token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2)
    assert [tuple(x.shape) for x in found] == [(0,), (0,), (0, 2), (0, 2), (0, 2)]
    found = token_logprobs(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 0)
    assert [tuple(x.shape) for x in found] == [(3,), (3,), (3, 0), (3, 0), (3, 0)]


def test_the_logits_are_left_as_they_are() -> None:
    for dtype in FLOATS:
        logits = torch.tensor([[nan, inf, -1.0]], dtype=dtype)
        before = logits.clone()
        token_logprobs(logits, torch.tensor([0]), 2)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        assert logits.isnan().any()


def test_rows_at_any_stride_are_read() -> None:
    wide = torch.randn(4, 50)
    part = wide[::2, 10:30]
    tokens = torch.tensor([3, 7])
    for one, other in zip(
        token_logprobs(part, tokens, 3), token_logprobs(part.clone(), tokens, 3), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("logits", "tokens", "n", "error", "said"),
    [
        ([[0.0]], torch.tensor([0]), 0, TypeError, "logits must be a tensor, not list"),
        (torch.zeros(2), torch.tensor([0]), 0, ValueError, r"logits has shape \(2,\)"),
        (torch.zeros(1, 0), torch.tensor([0]), 0, ValueError, "logits has no columns"),
        (torch.zeros(2, 3), torch.tensor([0]), 0, ValueError, r"tokens has shape \(1,\); .* R=2"),
        (torch.zeros(1, 3), torch.zeros(1), 0, TypeError, "tokens has dtype torch.float32"),
        (torch.zeros(1, 3), torch.tensor([0]), 4, ValueError, "n is 4; expected 0 to V=3"),
        (torch.zeros(1, 3), torch.tensor([0]), -1, ValueError, "n is -1; expected 0 to V=3"),
        (torch.zeros(1, 3), torch.tensor([0]), 1.0, TypeError, r"n must be an int, not float"),
        (torch.zeros(1, 3), torch.tensor([0]), True, TypeError, r"n must be an int, not bool"),
    ],
)
def test_a_wrong_argument_is_named(
    logits: torch.Tensor, tokens: torch.Tensor, n: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^token_logprobs: {said}"):
        token_logprobs(logits, tokens, n)


def test_the_example_in_the_docstring_runs() -> None:
    found = doctest.testmod(logprobs)
    assert found.attempted > 0
    assert found.failed == 0
