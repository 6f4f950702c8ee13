from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from specdec_kernels import Sampling, sample, sample_draft

MakeSampling = Callable[..., Sampling]


def test_a_coupled_draft_of_the_targets_logits_is_the_targets_token(
    make_sampling: MakeSampling,
) -> None:
    logits, slots = torch.randn(40, 90).bfloat16(), torch.arange(40)
    sampling = make_sampling(40, temperature=0.8)
    drafts = sample_draft(logits, slots + 7, slots, sampling, how="coupled", column=3)
    assert torch.equal(drafts, sample(logits, slots + 7, slots, sampling))


def test_a_mapped_coupled_draft_uses_the_noise_of_the_target_ids(
    make_sampling: MakeSampling,
) -> None:
    slots, vocab_map = torch.arange(60), torch.randperm(90)[:20]
    logits, sampling = torch.randn(60, 20), make_sampling(60)
    drafts = sample_draft(
        logits, slots, slots, sampling, how="coupled", column=0, vocab_map=vocab_map, vocab_size=90
    )
    everywhere = torch.full((60, 90), -torch.inf)
    everywhere[:, vocab_map] = logits
    assert torch.equal(drafts, sample(everywhere, slots, slots, sampling))


@pytest.mark.parametrize("how", ["greedy", "coupled", "independent"])
def test_greedy_requests_and_greedy_drafts_take_the_argmax(
    make_sampling: MakeSampling, how: str
) -> None:
    logits, slots = torch.randn(10, 20).round(), torch.arange(10)
    sampling = make_sampling(10, temperature=1.0 if how == "greedy" else 0.0)
    vocab_map = torch.randperm(90)[:20]
    plain = sample_draft(logits, slots, slots, sampling, how=how, column=1)
    assert torch.equal(plain, logits.argmax(-1))
    mapped = sample_draft(
        logits, slots, slots, sampling, how=how, column=1, vocab_map=vocab_map, vocab_size=90
    )
    assert torch.equal(mapped, vocab_map[plain])


def test_independent_drafts_differ_by_position_and_column_and_from_the_target(
    make_sampling: MakeSampling,
) -> None:
    n = 4000
    logits, zeros = torch.zeros(n, 1000), torch.zeros(n, dtype=torch.int64)
    sampling, at = make_sampling(1), torch.arange(n)
    first = sample_draft(logits, at, zeros, sampling, how="independent", column=0)
    second = sample_draft(logits, at, zeros, sampling, how="independent", column=1)
    target = sample(logits, at, zeros, sampling)
    for one, other in ((first, second), (first, target), (second, target), (first[1:], first[:-1])):
        assert (one == other).sum() < 20  # 4 expected


def test_independent_drafts_follow_the_tempered_law_and_ignore_truncation(
    make_sampling: MakeSampling,
) -> None:
    n = 20_000
    logits, zeros = torch.tensor([0.0, 1.0, -1.0, 0.5]), torch.zeros(n, dtype=torch.int64)
    sampling = make_sampling(1, temperature=2.0, top_k=1, top_p=0.1, min_p=0.9)
    drafts = sample_draft(
        logits.expand(n, 4), torch.arange(n), zeros, sampling, how="independent", column=0
    )
    expected = n * (logits.double() / 2).softmax(-1)
    assert chisquare(torch.bincount(drafts, minlength=4), expected).pvalue > 1e-3


@pytest.mark.parametrize("how", ["greedy", "coupled", "independent"])
def test_ids_that_the_target_lacks_are_never_drafted(make_sampling: MakeSampling, how: str) -> None:
    logits, slots = torch.zeros(50, 40), torch.arange(50)
    logits[:, 30:] = 9.0
    for temperature in (0.0, 1.0):
        sampling = make_sampling(50, temperature=temperature)
        drafts = sample_draft(logits, slots, slots, sampling, how=how, column=0, vocab_size=30)
        assert (drafts < 30).all()


@pytest.mark.parametrize("how", ["greedy", "coupled", "independent"])
def test_padding_and_neighbours(make_sampling: MakeSampling, how: str) -> None:
    logits, slots = torch.randn(9, 50), torch.arange(9)
    sampling = make_sampling(9, temperature=[0.0, 1.0, 0.5] * 3)
    whole = sample_draft(logits, slots, slots, sampling, how=how, column=2)
    slots[[1, 4]] = -1
    out = sample_draft(logits, torch.arange(9), slots, sampling, how=how, column=2)
    assert out[[1, 4]].tolist() == [-1, -1]
    rest = [0, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[rest], whole[rest])
    assert sample(logits, torch.arange(9), slots, sampling)[[1, 4]].tolist() == [-1, -1]
    empty = torch.empty(0, dtype=torch.int64)
    none = sample_draft(torch.empty(0, 50), empty, empty, sampling, how=how, column=0)
    assert none.shape == (0,)
