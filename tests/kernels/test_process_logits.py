from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_kernels import Sampling, logits, process_logits

MakeSampling = Callable[..., Sampling]


def naive(row: list[float], t: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The kept ids, one row at a time, in double precision."""
    scaled = [x / t for x in row]
    kept = {i for i, x in enumerate(scaled) if not min_p or x >= max(scaled) + log(min_p)}
    if 0 < top_k < len(row):
        cut = sorted((scaled[i] for i in kept), reverse=True)[:top_k][-1]
        kept = {i for i in kept if scaled[i] >= cut}
    if top_p < 1:
        total, mass = sum(exp(scaled[i]) for i in kept), 0.0
        for i in sorted(kept, key=lambda i: -scaled[i]):
            mass += exp(scaled[i]) / total
            if mass >= top_p:
                kept = {j for j in kept if scaled[j] >= scaled[i]}
                break
    return kept


# Logits are quarters, so that values tie; temperatures are exact too. Limits on mass are irrational
# enough that no prefix meets them within rounding.
quarters = st.integers(-16, 16).map(lambda x: x / 4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 40).flatmap(
        lambda vocab: st.lists(
            st.lists(quarters, min_size=vocab, max_size=vocab), min_size=1, max_size=4
        )
    ),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0, 0.31373, 0.70711, 0.95117, 1.0]),
    min_p=st.sampled_from([0.0, 0.012347, 0.31373]),
)
def test_what_is_kept_is_what_a_naive_row_by_row_filter_keeps(
    rows: list[list[float]], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    n = len(rows)
    sampling = Sampling(
        torch.arange(n),
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
    )
    table = torch.tensor(rows)
    out = process_logits(table, torch.arange(n), sampling)
    for row, scaled in zip(rows, out, strict=True):
        kept = naive(row, temperature, top_k, top_p, min_p)
        assert {i for i, x in enumerate(scaled.tolist()) if x > -inf} == kept
    assert torch.equal(out.where(out > -inf, table / temperature), table / temperature)


def test_each_row_has_the_parameters_of_its_slot() -> None:
    table = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(5, 50)
    sampling = Sampling(
        stream=torch.arange(5),
        temperature=torch.tensor([0.0, 0.7, 0.7, 0.7, 0.7]),
        top_k=torch.tensor([3, 0, 3, 0, 0]),
        top_p=torch.tensor([0.5, 1.0, 1.0, 0.5, 1.0]),
        min_p=torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5]),
    )
    slots = torch.tensor([4, 3, 2, 1, 0])
    mixed = process_logits(table, slots, sampling)
    alone = [process_logits(table[:1], slots[i : i + 1], sampling) for i in range(5)]
    assert torch.equal(mixed, torch.cat(alone))
    assert torch.equal(mixed[4], table[4])  # greedy: converted, not truncated
    assert (mixed[2] > -inf).sum() == 3


@pytest.mark.parametrize("first_sorted", [1, 3, 1024])
def test_top_p_is_the_same_however_much_is_sorted_first(
    make_sampling: MakeSampling, monkeypatch: pytest.MonkeyPatch, first_sorted: int
) -> None:
    table = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    sampling = make_sampling(6, temperature=[0.2, 0.5, 1.0, 1.5, 2.0, 9.0], top_p=0.8)
    expected = process_logits(table, torch.arange(6), sampling)
    monkeypatch.setattr(logits, "_FIRST_SORTED", first_sorted)
    assert torch.equal(process_logits(table, torch.arange(6), sampling), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_dtype_becomes_float32_by_true_division(
    make_sampling: MakeSampling, dtype: torch.dtype
) -> None:
    table = torch.randn(3, 33).to(dtype)
    before = table.clone()
    out = process_logits(table, torch.zeros(3).long(), make_sampling(1, temperature=0.7))
    assert out.dtype == torch.float32
    assert torch.equal(out, table.float() / torch.tensor(0.7))
    assert torch.equal(table, before)


@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {}])
def test_nan_and_empty_rows_stay_defined(
    make_sampling: MakeSampling, truncation: dict[str, float]
) -> None:
    table = torch.tensor([[nan] * 4, [-inf] * 4, [nan, 1.0, -inf, 2.0], [-inf, -inf, 3.0, -inf]])
    out = process_logits(table, torch.zeros(4).long(), make_sampling(1, **truncation))
    assert not out.isnan().any()
    assert (out[:2] == -inf).all()
    assert out[2, 3] == 2.0
    assert out[2, 0] == -inf
    assert out[3].tolist() == [-inf, -inf, 3.0, -inf]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_total_does_not_depend_on_the_other_rows(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        table = torch.randn(8, 49152) * 4
        alone = torch.cat([logits.log_total(row[None]) for row in table])
        assert torch.equal(alone, logits.log_total(table))
        torch.testing.assert_close(alone, table.double().logsumexp(-1).float())
    finally:
        torch.set_num_threads(before)


def test_no_rows_and_padding_slots(make_sampling: MakeSampling) -> None:
    sampling = make_sampling(2, top_k=1)
    assert process_logits(torch.empty(0, 5), torch.empty(0).long(), sampling).shape == (0, 5)
    assert process_logits(torch.zeros(1, 5), torch.tensor([-1]), sampling).shape == (1, 5)
