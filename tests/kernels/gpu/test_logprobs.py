"""Log-probabilities by the kernels, against the plain implementation."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import TokenLogprobs, token_logprobs
from specdec_kernels.gpu import logprobs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(logits: Tensor, tokens: Tensor, n: int) -> TokenLogprobs:
    found = logprobs.token_logprobs(logits, tokens, n)
    wanted = token_logprobs(logits.cpu(), tokens.cpu(), n)
    for name, one, other in zip(found._fields, found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        if one.is_floating_point():
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=0, msg=name)
        else:
            assert one.tolist() == other.tolist(), name
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_tokens_are_worth_what_the_reference_says(
    n: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = (torch.randn(3, 9001) * 4 + 30).to(device, dtype)
    tokens = torch.tensor([0, 9000, 4096], device=device)
    check(logits, tokens, n)
    check(logits, logits.argmax(-1), n)


values = st.sampled_from([-inf, nan, inf, -2.0, 0.0, -0.0, 0.5, 0.5, 1.0])


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), vocab=st.integers(1, 150), dtype=st.sampled_from(DTYPES))
def test_ties_and_odd_values_are_those_of_the_reference(
    data: st.DataObject, vocab: int, dtype: torch.dtype, device: torch.device, small_tiles: int
) -> None:
    row = st.lists(values, min_size=vocab, max_size=vocab)
    rows = data.draw(st.lists(row, min_size=1, max_size=2))
    tokens = [data.draw(st.integers(-1, vocab)) for _ in rows]
    n = data.draw(st.integers(0, min(vocab, 40)))
    logits = torch.tensor(rows, dtype=dtype, device=device)
    check(logits, torch.tensor(tokens, device=device), n)


def test_ties_past_the_best_of_a_tile_count_in_the_ranks(
    device: torch.device, small_tiles: int
) -> None:
    logits = torch.zeros(2, 5 * small_tiles, device=device)
    logits[0, [3, 70, 71]] = 1
    found = check(logits, torch.tensor([71, 9], device=device), 5)
    assert found.top_ranks.tolist() == [[3, 3, 3, 320, 320], [320] * 5]


@pytest.mark.parametrize("n", [logprobs.MOST, logprobs.MOST + 1, 200])
def test_many_of_the_likeliest_are_found_as_few_are(
    n: int, device: torch.device, small_tiles: int
) -> None:
    logits = torch.randint(0, 20, (3, 200), device=device).to(torch.bfloat16)
    logits[0] = torch.randn(200)
    logits[1, :190] = nan
    found = check(logits, torch.tensor([5, 195, -1], device=device), n)
    few = logprobs.token_logprobs(logits, torch.tensor([5, 195, -1], device=device), 4)
    assert torch.equal(found.top_ids[:, :4], few.top_ids)
    assert torch.equal(found.top_ranks[:, :4], few.top_ranks)
    torch.testing.assert_close(found.top_logprobs[:, :4], few.top_logprobs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_float_stays_finite(dtype: torch.dtype, device: torch.device) -> None:
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[largest, inf, 0.0, -largest]], dtype=dtype, device=device)
    found = check(logits, torch.tensor([1], device=device), 2)
    assert found.logprob.item() == pytest.approx(-0.6931, abs=1e-3)


def test_a_row_that_excludes_everything_gives_minus_infinity(device: torch.device) -> None:
    logits = torch.tensor([[-inf, nan, -inf], [0.0, 0.0, 0.0]], device=device)
    found = check(logits, torch.tensor([2, 0], device=device), 2)
    assert found.top_logprobs[0].tolist() == [-inf, -inf]


def test_a_row_does_not_depend_on_other_rows(device: torch.device, small_tiles: int) -> None:
    logits = torch.randn(4, 300, device=device)
    tokens = torch.tensor([1, 2, 3, 299], device=device)
    together = logprobs.token_logprobs(logits, tokens, 3)
    for i in range(4):
        alone = logprobs.token_logprobs(logits[i : i + 1], tokens[i : i + 1], 3)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[i])


def test_rows_at_any_stride_are_read_and_there_may_be_none(device: torch.device) -> None:
    wide = torch.randn(4, 50, device=device)
    check(wide[::2, 10:30], torch.tensor([3, 7], device=device), 3)
    check(wide[:0], torch.zeros(0, dtype=torch.int64, device=device), 3)
