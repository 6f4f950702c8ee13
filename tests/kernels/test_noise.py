from __future__ import annotations

from math import inf, nan

import pytest
import torch
from scipy.stats import chi2, kstest

from specdec_kernels import make_stream, noise

MASK = 0xFFFFFFFF


def mix(word: int) -> int:
    word ^= word >> 16
    word = word * 0x7FEB352D & MASK
    word ^= word >> 15
    word = word * 0x846CA68B & MASK
    return word ^ word >> 16


def word_of(stream: int, position: int, index: int, domain: int, token: int) -> int:
    first, second = 0x9E3779B9, 2 * 0x9E3779B9 & MASK
    for part in (stream & MASK, stream >> 32 & MASK, position & MASK, index, domain):
        first, second = mix(first ^ part), mix(second ^ part)
    return mix(mix(token ^ first) + second & MASK)


def streams(n: int) -> torch.Tensor:
    return torch.tensor([make_stream(3, i) for i in range(n)])


def test_words_are_those_of_unbounded_integer_arithmetic() -> None:
    keys = [(make_stream(s, i), p) for s in (0, -5, 2**63) for i in (0, 1) for p in (0, 9, 2**31)]
    state = noise._state(torch.tensor([s for s, _ in keys]), torch.tensor([p for _, p in keys]), 2)
    ids = torch.tensor([0, 1, 31, 262143])
    words = noise._words(state, torch.full((len(keys),), 5), ids)
    assert words.tolist() == [[word_of(s, p, 2, 5, int(x)) for x in ids] for s, p in keys]


def test_rows_are_not_permutations_of_each_other() -> None:
    state = noise._state(streams(500), torch.zeros(500, dtype=torch.int64), 0)
    words = noise._words(state, torch.zeros(500, dtype=torch.int64), torch.arange(64))
    assert (
        len(set(words.flatten().tolist())) == words.numel()
    )  # one collision would be a 1 in 8 chance


def test_streams_differ_by_index_and_fit_int64() -> None:
    made = [make_stream(seed, index) for seed in (-1, 0, 7, 2**64 - 2) for index in range(200)]
    assert len(set(made)) == len(made)
    assert all(-(2**63) <= stream < 2**63 for stream in made)
    assert make_stream(7, 1) == make_stream(7 + 2**64, 1)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_extreme_words_give_finite_noise_and_uniforms_inside_the_interval(word: int) -> None:
    assert noise._gumbel(torch.tensor([word])).isfinite().all()
    assert 0 < noise._unit(torch.tensor([word])).item() < 1


def test_uniforms_are_uniform_and_differ_by_every_key() -> None:
    stream, position = streams(4)[:, None, None], torch.arange(100)[:, None]
    values = noise.uniform(stream, position, noise.ACCEPT, torch.arange(50))
    assert values.shape == (4, 100, 50)
    assert values.dtype == torch.float32
    assert (
        len(set(values.flatten().tolist())) > 0.998 * values.numel()
    )  # float32 has 2**24 or so of them
    assert kstest(values.flatten().double().numpy(), "uniform").pvalue > 1e-3
    other = noise.uniform(stream, position, noise.DRAFT_TOKEN, torch.arange(50))
    assert not (values == other).all(-1).any()


@pytest.mark.parametrize(("group", "vocab"), [(1, 7), (2, 7), (3, 9), (32, 70)])
def test_draw_follows_the_weights(monkeypatch: pytest.MonkeyPatch, group: int, vocab: int) -> None:
    monkeypatch.setattr(noise, "GROUP", group)
    n = 40_000
    weights = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    weights[3] = -inf
    stream = torch.full((n,), make_stream(0, 0))
    drawn = noise.draw(weights.expand(n, vocab), stream, torch.arange(n), noise.TARGET_TOKEN)
    expected = n * weights.softmax(-1)
    seen = torch.bincount(drawn, minlength=vocab)
    assert seen[3] == 0
    kept = expected > 0
    statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert chi2.sf(statistic, int(kept.sum()) - 1) > 1e-3


def test_groups_of_one_are_a_flat_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "GROUP", 1)
    weights, stream, position = torch.randn(50, 33), streams(50), torch.arange(50)
    state = noise._state(stream, position, 0)
    domain = torch.full((50,), noise.DRAFT_GROUP)
    flat = weights + noise._gumbel(noise._words(state, domain, torch.arange(33)))
    drawn = noise.draw(weights, stream, position, noise.DRAFT_TOKEN)
    assert torch.equal(drawn, flat.argmax(-1))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97, 49152])
def test_draw_ignores_the_other_rows_bit_for_bit(vocab: int) -> None:
    weights, stream, position = torch.randn(24, vocab), streams(24), torch.arange(24)
    drawn = noise.draw(weights, stream, position, noise.TARGET_TOKEN)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    again = noise.draw(weights[order], stream[order], position[order], noise.TARGET_TOKEN)
    assert torch.equal(again, drawn[order])
    for size in (1, 5):
        chunks = [
            noise.draw(weights[at], stream[at], position[at], noise.TARGET_TOKEN)
            for at in (slice(i, i + size) for i in range(0, 24, size))
        ]
        assert torch.equal(torch.cat(chunks), drawn)


def test_a_domain_per_row_is_that_domain() -> None:
    weights, stream, position = torch.randn(8, 40), streams(8), torch.arange(8)
    domain = torch.tensor([noise.TARGET_TOKEN, noise.RESIDUAL_TOKEN] * 4)
    mixed = noise.draw(weights, stream, position, domain)
    for name in (noise.TARGET_TOKEN, noise.RESIDUAL_TOKEN):
        alone = noise.draw(weights, stream, position, name)
        assert torch.equal(mixed[domain == name], alone[domain == name])


@pytest.mark.parametrize("vocab", [1, 5, 33, 97])
def test_only_an_id_with_weight_is_drawn(vocab: int) -> None:
    weights = torch.full((vocab, vocab), -inf).fill_diagonal_(-1e30)
    drawn = noise.draw(weights, streams(vocab), torch.zeros(vocab).long(), noise.TARGET_TOKEN)
    assert torch.equal(drawn, torch.arange(vocab))


@pytest.mark.parametrize("value", [-inf, nan])
def test_a_row_without_any_weight_gives_id_0(value: float) -> None:
    weights = torch.full((3, 70), value)
    drawn = noise.draw(weights, streams(3), torch.arange(3), noise.TARGET_TOKEN)
    assert drawn.tolist() == [0, 0, 0]


def test_nan_excludes_its_group_and_no_other() -> None:
    weights = torch.full((200, 70), nan)
    weights[:, 40:44] = 0.0  # beside a NaN
    weights[:, 64:70] = 0.0
    drawn = noise.draw(weights, streams(200), torch.arange(200), noise.TARGET_TOKEN)
    assert set(drawn.tolist()) == set(range(64, 70))


def test_an_infinite_weight_wins() -> None:
    weights = torch.zeros(2, 70)
    weights[:, 68] = inf
    drawn = noise.draw(weights, streams(2), torch.arange(2), noise.TARGET_TOKEN)
    assert drawn.tolist() == [68, 68]


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e5])
def test_an_offset_of_the_whole_row_does_not_swallow_the_noise(offset: float) -> None:
    n = 20_000
    weights = (torch.tensor([0.0, 1.0]) + offset).expand(n, 2)
    drawn = noise.draw(weights, torch.arange(n), torch.zeros(n, dtype=torch.int64), 0)
    expected = torch.tensor([0.0, 1.0]).softmax(0)[1].item()
    assert abs(drawn.double().mean().item() - expected) < 0.015
