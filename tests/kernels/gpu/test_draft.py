"""Drafts drawn by the Triton kernels, against `specdec_kernels.candidates.sample_draft`."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from specdec_kernels import Sampling, SparseQ, make_stream, reference
from specdec_kernels.candidates import DraftVocabulary, draft_vocabulary, likeliest
from specdec_kernels.candidates import sample_draft as defined
from specdec_kernels.gpu import rows
from specdec_kernels.gpu.draft import sample_draft

pytestmark = pytest.mark.triton

COLUMNS = 4
UNTOUCHED = 99.0


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", 64)


def sampling_of(temperature: list[float], device: torch.device) -> Sampling:
    n = len(temperature)
    return Sampling(
        stream=torch.tensor([make_stream(5, i) for i in range(n)], device=device),
        temperature=torch.tensor(temperature, device=device),
        top_k=torch.ones(n, dtype=torch.int64, device=device),  # drafts ignore truncation
        top_p=torch.full((n,), 0.1, device=device),
        min_p=torch.full((n,), 0.9, device=device),
    )


class Side:
    """What one implementation returns and writes."""

    def __init__(self, slots: int, logits: Tensor, count: int) -> None:
        device = logits.device
        self.lse = torch.full((slots, COLUMNS), UNTOUCHED, device=device)
        shape = slots, COLUMNS, count
        ids = torch.full(shape, 77, dtype=torch.int64, device=device)
        kept = torch.full(shape, UNTOUCHED, dtype=logits.dtype, device=device)
        self.candidates = SparseQ(ids, kept) if count else None


def assert_agrees(
    logits: Tensor,
    temperature: list[float],
    *,
    how: str,
    count: int = 0,
    slots: Tensor | None = None,
    vocab_map: Tensor | DraftVocabulary | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    n, device = len(logits), logits.device
    slots = torch.arange(n, device=device) if slots is None else slots
    positions = torch.arange(n, device=device) * 3 + 7
    sampling = sampling_of(temperature, device)
    theirs, ours = (Side(len(temperature), logits, count) for _ in range(2))
    expected, actual = (
        op(
            logits,
            positions,
            slots,
            sampling,
            how=how,
            column=2,
            vocab_map=vocab_map,
            vocab_size=vocab_size,
            candidates=side.candidates,
            lse=side.lse,
        )
        for op, side in ((defined, theirs), (sample_draft, ours))
    )
    assert actual.tolist() == expected.tolist()
    assert (ours.lse == UNTOUCHED).equal(theirs.lse == UNTOUCHED)
    torch.testing.assert_close(ours.lse, theirs.lse, atol=1e-5, rtol=1e-6)
    if ours.candidates is not None and theirs.candidates is not None:
        assert ours.candidates.ids.tolist() == theirs.candidates.ids.tolist()
        torch.testing.assert_close(
            ours.candidates.logits, theirs.candidates.logits, atol=0, rtol=0, equal_nan=True
        )
    return actual


HOWS = ["greedy", "coupled", "independent"]
MIXED = [1.0, 0.0, 0.6]
PLACES = [2, -1, 0, 1]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float32), (131, torch.float16), (256, torch.bfloat16), (130, torch.float32)],
)
@pytest.mark.parametrize("count", [0, 5])
def test_drafts_are_those_of_the_reference(
    device: torch.device, how: str, dtype: torch.dtype, vocab: int, count: int
) -> None:
    logits = (torch.randn(4, vocab, device=device) * 3).to(dtype)
    slots = torch.tensor(PLACES, device=device)
    assert_agrees(logits, MIXED, how=how, count=count, slots=slots)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("vocab_size", [1, 100, 500])
@pytest.mark.parametrize("count", [0, 5])
def test_ids_that_the_target_lacks_are_no_part_of_the_law(
    device: torch.device, how: str, vocab_size: int, count: int
) -> None:
    logits = torch.randn(3, 150, device=device)
    logits[:, 140:] = 9.0
    assert_agrees(logits, MIXED, how=how, count=count, vocab_size=vocab_size)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("vocab_size", [150, 301])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("ready", [False, True])
def test_mapped_drafts_are_those_of_the_reference(
    device: torch.device, how: str, vocab_size: int, count: int, ready: bool
) -> None:
    vocab_map = torch.randperm(vocab_size, device=device)[:150]
    logits = torch.randn(4, 150, device=device).bfloat16()
    slots = torch.tensor(PLACES, device=device)
    assert_agrees(
        logits,
        MIXED,
        how=how,
        count=count,
        slots=slots,
        vocab_map=draft_vocabulary(vocab_map, vocab_size) if ready else vocab_map,
        vocab_size=None if ready else vocab_size,
    )


def test_a_few_ids_of_a_large_vocabulary_are_looked_up_in_their_groups_alone(
    device: torch.device,
) -> None:
    vocab_map = torch.tensor([90_000, 65, 89_999, 127_000, 64], device=device)
    table = draft_vocabulary(vocab_map, 128_000)
    assert table.groups.tolist() == [2, 2812, 3968]
    assert table.members.shape == (3, 32)
    for how in HOWS:
        logits = torch.randn(3, 5, device=device)
        logits[2] = -inf
        assert_agrees(logits, MIXED, how=how, vocab_map=table)


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("how", ["greedy", "coupled"])
def test_degenerate_rows_are_those_of_the_reference(
    device: torch.device, how: str, mapped: bool, count: int
) -> None:
    vocab = 200
    logits = torch.randn(18, vocab, device=device)
    logits[0] = -inf
    logits[1] = nan
    logits[2, 130] = inf
    logits[3, 60] = logits[3, 170] = inf
    logits[4, 10] = nan
    logits[5] = -inf
    logits[5, 198:] = -300.0
    logits[6, 70:] = -300.0
    logits[7] = torch.arange(vocab, device=device) % 2
    logits[8] = 0.0
    logits[9] = -3e38
    logits[10, :100] = -inf
    logits[10, 100] = nan
    logits[11, 77] = 3e38
    logits[12] = -0.0
    logits[12, 50] = 0.0
    logits[13] = nan
    logits[13, 3] = 2.0
    logits[14:, 60] = logits[14:, 170] = inf
    vocab_map = torch.randperm(400, device=device)[:vocab] if mapped else None
    temperature = [0.5, 1.0, 1.0, 1.3, 1.0, 0.7, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 1.0] + [1.0] * 4
    assert_agrees(
        logits,
        temperature,
        how=how,
        count=count,
        vocab_map=vocab_map,
        vocab_size=mapped * 400 or None,
    )


@pytest.mark.parametrize("count", [0, 3])
def test_of_equal_logits_a_greedy_draft_is_the_drafters_lowest_id(
    device: torch.device, count: int
) -> None:
    logits = torch.zeros(1, 150, device=device)
    logits[0, [90, 140]] = 1.0
    vocab_map = torch.arange(150, device=device).flip(0)
    drafts = assert_agrees(
        logits, [0.0], how="coupled", count=count, vocab_map=vocab_map, vocab_size=150
    )
    assert drafts.tolist() == [149 - 90]


def test_a_coupled_draft_of_the_targets_logits_is_the_targets_token(device: torch.device) -> None:
    logits = torch.randn(12, 130, device=device).bfloat16()
    sampling, slots = sampling_of([0.8] * 12, device), torch.arange(12, device=device)
    drafts = sample_draft(logits, slots + 9, slots, sampling, how="coupled", column=3)
    own = reference.sample(logits, slots + 9, slots, sampling, truncate=False)
    assert torch.equal(drafts, own)


@pytest.mark.parametrize("op", [defined, sample_draft])
def test_the_log_sum_is_over_the_ids_that_both_have(
    device: torch.device, op: Callable[..., Tensor]
) -> None:
    logits = torch.randn(4, 150, device=device) * 4
    sampling = sampling_of([0.5, 1.0, 0.0, 2.0], device)
    slots = torch.tensor([3, 1, 2, -1], device=device)
    lse = torch.full((4, COLUMNS), UNTOUCHED, device=device)
    op(logits, slots, slots, sampling, how="independent", column=1, vocab_size=120, lse=lse)
    shared = logits[:, :120].double().cpu()
    expected = torch.full((4, COLUMNS), UNTOUCHED, dtype=torch.float64)
    expected[3, 1] = (shared[0] / 2).logsumexp(0)
    expected[1, 1] = shared[1].logsumexp(0)
    torch.testing.assert_close(lse.double().cpu(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 4])
def test_a_draft_depends_on_its_own_row_alone(device: torch.device, count: int) -> None:
    wide = torch.randn(3, 190, device=device)
    wide[1, 8] = nan
    sampling, slots = sampling_of(MIXED, device), torch.arange(3, device=device)
    everything = Side(3, wide, count)
    tokens = sample_draft(
        wide[:, :150], slots, slots, sampling, how="coupled", column=0,
        candidates=everything.candidates, lse=everything.lse,
    )  # fmt: skip
    for i in range(3):
        alone = Side(3, wide, count)
        at = slots[i : i + 1]
        token = sample_draft(
            wide[i : i + 1, :150].contiguous(), at, at, sampling, how="coupled", column=0,
            candidates=alone.candidates, lse=alone.lse,
        )  # fmt: skip
        assert token.item() == tokens[i]
        assert alone.lse[i].equal(everything.lse[i])


def test_outputs_may_lie_at_any_stride(device: torch.device) -> None:
    logits, slots = torch.randn(3, 100, device=device), torch.arange(3, device=device)
    sampling = sampling_of([1.0] * 3, device)
    plain = Side(3, logits, 4)
    assert plain.candidates is not None
    lse = torch.zeros(COLUMNS, 3, device=device).T
    ids = torch.zeros(4, COLUMNS, 3, dtype=torch.int64, device=device).permute(2, 1, 0)
    kept = torch.zeros(COLUMNS, 3, 4, device=device).transpose(0, 1)
    for table, sparse in ((plain.lse, plain.candidates), (lse, SparseQ(ids, kept))):
        sample_draft(
            logits, slots, slots, sampling, how="independent", column=3, candidates=sparse,
            lse=table,
        )  # fmt: skip
    assert lse[:, 3].equal(plain.lse[:, 3])
    assert ids[:, 3].equal(plain.candidates.ids[:, 3])
    assert kept[:, 3].equal(plain.candidates.logits[:, 3])


def test_candidates_come_largest_first_and_of_equal_ones_the_lowest(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 5.0, 1.0, 7.0, 1.0, nan, -inf, 5.0]], device=device)
    zero, sampling = torch.zeros(1, dtype=torch.int64, device=device), sampling_of([2.0], device)
    for op in (defined, sample_draft):
        for count, ids in ((4, [3, 1, 7, 0]), (9, [3, 1, 7, 0, 2, 4, -1, -1, -1])):
            side = Side(1, logits, count)
            op(
                logits, zero, zero, sampling, how="independent", column=1,
                candidates=side.candidates,
            )  # fmt: skip
            assert side.candidates is not None
            assert side.candidates.ids[0, 1].tolist() == ids
            expected = [-inf if i < 0 else logits[0, i].item() for i in ids]
            assert side.candidates.logits[0, 1].tolist() == expected


def test_drafts_among_candidates_follow_their_law() -> None:
    n, device = 20_000, torch.device("cpu")
    logits = torch.zeros(40)
    logits[[3, 17, 38]] = torch.tensor([2.0, 3.0, 1.0])
    sampling, zeros = sampling_of([2.0], device), torch.zeros(n, dtype=torch.int64)
    side = Side(1, logits, 3)
    drafts = defined(
        logits.expand(n, 40), torch.arange(n), zeros, sampling, how="independent", column=0,
        candidates=side.candidates,
    )  # fmt: skip
    counts = torch.bincount(drafts, minlength=40)[[3, 17, 38]]
    assert counts.sum() == n
    expected = n * (torch.tensor([2.0, 3.0, 1.0]).double() / 2).softmax(0)
    assert chisquare(counts, expected).pvalue > 1e-3


@given(
    st.lists(st.sampled_from([-inf, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=20),
    st.integers(1, 25),
)
def test_the_likeliest_are_the_first_of_a_stable_sort(row: list[float], count: int) -> None:
    ids, kept = likeliest(torch.tensor([row, row[::-1]]), count)
    for values, found, mask in zip((row, row[::-1]), ids.tolist(), kept, strict=True):
        expected = sorted(range(len(row)), key=lambda i: -values[i])[:count]
        assert mask.nonzero().squeeze(1).tolist() == sorted(expected)
        real = [i for i in expected if values[i] > -inf]
        assert found == real + [-1] * (count - len(real))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_vocabulary_map_temperature_and_count(
    device: torch.device, data: st.DataObject
) -> None:
    own = data.draw(st.integers(1, 90))
    vocab = data.draw(st.integers(own, 200))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(2, own) * data.draw(st.sampled_from([0.1, 3.0, 40.0]))).to(device)
    vocab_map = torch.randperm(vocab)[:own].to(device) if data.draw(st.booleans()) else None
    assert_agrees(
        logits.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))),
        data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]), min_size=2, max_size=2)),
        how=data.draw(st.sampled_from(HOWS)),
        count=data.draw(st.integers(0, 12)),
        vocab_map=vocab_map,
        vocab_size=vocab,
    )


def test_float64_and_an_empty_batch(device: torch.device) -> None:
    assert_agrees(torch.randn(3, 50, device=device).double(), MIXED, how="coupled", count=3)
    assert_agrees(torch.empty(0, 50, device=device), MIXED, how="coupled", count=3)


def test_a_vocabulary_map_with_ids_twice_or_outside_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than once"):
        draft_vocabulary(torch.tensor([1, 2, 1]), 5)
    with pytest.raises(ValueError, match=r"outside \[0, 5\)"):
        draft_vocabulary(torch.tensor([1, 5]), 5)
