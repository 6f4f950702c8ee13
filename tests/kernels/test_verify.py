from __future__ import annotations

from collections.abc import Callable
from math import inf, log, nan

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import DenseQ, Sampling, SparseQ, Verified, noise, sample, verify

MakeSampling = Callable[..., Sampling]
METHODS = ["coupled", "standard", "block", "synthetic"]
LOSSLESS = METHODS[:3]


class Batch:
    """Requests with `rows[b]` rows each; `mixed` puts greedy ones between sampled ones."""

    def __init__(self, rows: list[int], k: int, vocab: int, *, mixed: bool = True) -> None:
        b = len(rows)
        self.rows, self.k, self.b = rows, k, b
        self.start = torch.tensor([0, *torch.tensor(rows, dtype=torch.int64).cumsum(0).tolist()])
        self.logits = torch.randn(sum(rows), vocab) * 2
        self.drafts = torch.randint(0, vocab, (b, k))
        self.positions = torch.randint(0, 5000, (sum(rows),))
        self.slots = torch.randperm(b + 3)[:b]
        n = b + 3
        temperature = torch.rand(n) + 0.5
        if mixed:
            temperature[::3] = 0
        self.sampling = Sampling(
            torch.randint(-(2**63), 2**63 - 1, (n,)),
            temperature,
            torch.randint(0, 6, (n,)),
            torch.rand(n) * 0.5 + 0.7,
            torch.rand(n) * 0.1,
        )
        self.q = DenseQ(torch.randn(n, k + 1, vocab) * 2)  # a cache wider than the drafts

    def agree(self) -> None:
        """Make most drafts the target's own tokens, so that long prefixes are accepted."""
        row_slots = self.slots.repeat_interleave(torch.tensor(self.rows))
        own = sample(self.logits, self.positions, row_slots, self.sampling)
        for b, n in enumerate(self.rows):
            for i in range(min(n - 1, self.k)):
                if torch.rand(()) < 0.8:
                    self.drafts[b, i] = own[int(self.start[b]) + i]

    def verify(self, method: str, requests: list[int] | None = None, q: bool = True) -> Verified:
        """Verify these requests, in this order."""
        chosen = list(range(self.b)) if requests is None else requests
        rows = [r for b in chosen for r in range(int(self.start[b]), int(self.start[b + 1]))]
        start = torch.tensor([0] + [self.rows[b] for b in chosen], dtype=torch.int64).cumsum(0)
        return verify(
            self.logits[rows],
            start,
            self.drafts[chosen],
            self.positions[rows],
            self.slots[chosen],
            self.sampling,
            method=method,
            q=self.q if q else None,
            acceptance_rates=torch.full((self.k,), 0.7) if method == "synthetic" else None,
        )

    def well_formed(self, out: Verified) -> None:
        column = torch.arange(self.k + 1)
        emitted = column < out.count[:, None]
        valid = (self.drafts >= 0) & (self.drafts < self.logits.shape[1])
        longest = valid.cumprod(1).sum(1).minimum(torch.tensor(self.rows) - 1) + 1
        live = (torch.tensor(self.rows) > 0) & (self.slots >= 0)
        assert torch.equal(out.count > 0, live)
        assert (out.count <= longest.where(live, 0)).all()
        assert ((out.tokens >= 0) == emitted).all()
        assert (out.tokens < self.logits.shape[1]).all()
        assert torch.equal(out.rows, (self.start[:-1, None] + column).where(emitted, -1))
        accepted = column[:-1] < out.count[:, None] - 1
        assert torch.equal(out.tokens[:, :-1][accepted], self.drafts[accepted])


def requests_of(out: Verified, chosen: list[int]) -> tuple[Tensor, Tensor]:
    return out.tokens[chosen], out.count[chosen]


@pytest.mark.parametrize("vocab", [1, 3, 97, 49152])
@pytest.mark.parametrize("method", METHODS)
def test_ragged_mixed_batches_are_well_formed(method: str, vocab: int) -> None:
    batch = Batch([4, 1, 0, 3, 2, 6, 0, 4], 3, vocab)
    batch.agree()
    batch.well_formed(batch.verify(method))
    batch.well_formed(batch.verify(method, q=False))


@pytest.mark.parametrize("vocab", [5, 33, 97])
@pytest.mark.parametrize("method", METHODS)
def test_other_requests_do_not_matter_bit_for_bit(method: str, vocab: int) -> None:
    batch = Batch([4, 1, 4, 3, 0, 2, 4, 4, 2, 4, 4, 4], 3, vocab)
    batch.agree()
    whole = batch.verify(method)
    assert len(set(whole.count.tolist())) > 2
    order = torch.randperm(batch.b).tolist()
    for chosen in (order, order[:5], order[5:], *([b] for b in range(batch.b))):
        part = batch.verify(method, chosen)
        tokens, count = requests_of(whole, chosen)
        assert torch.equal(part.tokens, tokens)
        assert torch.equal(part.count, count)


@pytest.mark.parametrize("method", METHODS)
def test_the_slot_is_only_where_parameters_are_kept(method: str) -> None:
    batch = Batch([3] * 6, 2, 40)
    expected = batch.verify(method)
    order = torch.randperm(len(batch.sampling.stream))
    batch.sampling = Sampling(*(x[order] for x in batch.sampling))
    batch.q = DenseQ(batch.q.logits[order])
    batch.slots = order.argsort()[batch.slots]
    moved = batch.verify(method)
    assert torch.equal(moved.tokens, expected.tokens)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    k=st.integers(0, 4),
    vocab=st.sampled_from([1, 2, 31, 33, 64]),
    seed=st.integers(0, 2**31),
)
def test_coupled_emits_what_plain_sampling_emits(
    rows: list[int], k: int, vocab: int, seed: int
) -> None:
    torch.manual_seed(seed)
    batch = Batch(rows, k, vocab)
    batch.agree()
    batch.drafts[torch.rand(batch.b, k) < 0.1] = -1
    out = batch.verify("coupled")
    batch.well_formed(out)
    row_slots = batch.slots.repeat_interleave(torch.tensor(rows))
    own = sample(batch.logits, batch.positions, row_slots, batch.sampling)
    emitted = out.rows >= 0
    assert torch.equal(out.tokens[emitted], own[out.rows[emitted]])
    # and it stops only where a draft differs, or where there is none
    for b in range(batch.b):
        last = int(out.count[b]) - 1
        if 0 <= last < min(k, rows[b] - 1):
            assert batch.drafts[b, last] != out.tokens[b, last]


@pytest.mark.parametrize("method", LOSSLESS)
def test_without_drafts_every_method_is_plain_sampling(method: str) -> None:
    batch = Batch([1] * 9, 0, 50)
    out = batch.verify(method)
    plain = sample(batch.logits, batch.positions, batch.slots, batch.sampling)
    assert torch.equal(out.tokens[:, 0], plain)
    assert out.tokens.shape == (9, 1)


@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_requests_emit_the_argmax_whatever_q(
    make_sampling: MakeSampling, method: str, temperature: float
) -> None:
    batch = Batch([5] * 30, 4, 7)
    batch.logits = batch.logits.round()  # ties: the lowest id wins
    batch.sampling = make_sampling(33, temperature=temperature, top_k=1, top_p=0.1)
    batch.agree()
    out = batch.verify(method)
    emitted = out.rows >= 0
    assert torch.equal(out.tokens[emitted], batch.logits.argmax(-1)[out.rows[emitted]])
    assert len(set(out.count.tolist())) > 2


def test_greedy_compares_in_the_dtype_of_the_logits(make_sampling: MakeSampling) -> None:
    close = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    at, slots = torch.tensor([0]), torch.tensor([0])
    assert sample(close, at, slots, make_sampling(1, temperature=0.0)).item() == 1
    assert sample(close.float(), at, slots, make_sampling(1, temperature=0.0)).item() == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nothing", [-1, -7, 40, 2**40])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_placeholder_ends_the_drafts_as_if_there_were_fewer(
    method: str, nothing: int, column: int
) -> None:
    batch = Batch([4] * 12, 3, 40)
    batch.agree()
    batch.drafts[:, column] = nothing
    out = batch.verify(method)
    batch.well_formed(out)
    assert out.count.max() == column + 1
    full = [int(batch.start[b]) + column for b in range(12) if out.count[b] == column + 1]
    plain = sample(
        batch.logits[full],
        batch.positions[full],
        batch.slots[out.count == column + 1],
        batch.sampling,
    )
    assert torch.equal(out.tokens[out.count == column + 1, column], plain)


@pytest.mark.parametrize("method", METHODS)
def test_padding_requests_emit_nothing_and_disturb_nothing(method: str) -> None:
    batch = Batch([3] * 8, 2, 40)
    expected = batch.verify(method)
    batch.slots[[0, 5]] = -1
    out = batch.verify(method)
    assert out.count[[0, 5]].tolist() == [0, 0]
    assert (out.tokens[[0, 5]] == -1).all()
    assert (out.rows[[0, 5]] == -1).all()
    rest = [1, 2, 3, 4, 6, 7]
    assert torch.equal(out.tokens[rest], expected.tokens[rest])


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch(method: str) -> None:
    out = Batch([], 3, 40).verify(method)
    assert out.tokens.shape == (0, 4)
    assert out.count.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [nan, -inf, inf])
@pytest.mark.parametrize("form", ["dense", "one-hot"])
def test_hopeless_rows_give_ids_in_range(method: str, value: float, form: str) -> None:
    for where in range(3):
        batch = Batch([3] * 9, 2, 37)
        batch.logits[where::3] = value
        batch.well_formed(batch.verify(method, q=form == "dense"))
    batch = Batch([3] * 9, 2, 37)
    batch.logits[torch.rand_like(batch.logits) < 0.5] = value
    batch.q.logits[torch.rand_like(batch.q.logits) < 0.5] = value
    out = batch.verify(method, q=form == "dense")
    batch.well_formed(out)
    if value != inf:
        last = out.count[:, None] - 1
        row, token = out.rows.gather(1, last), out.tokens.gather(1, last)
        assert batch.logits[row, token].isfinite().all()


@pytest.mark.parametrize("method", LOSSLESS)
def test_rows_that_allow_one_id_emit_it(method: str) -> None:
    batch = Batch([3] * 9, 2, 37)
    only = torch.randint(0, 37, (27,))
    batch.logits = torch.full((27, 37), -inf).scatter(1, only[:, None], 0.5)
    out = batch.verify(method)
    emitted = out.rows >= 0
    assert torch.equal(out.tokens[emitted], only[out.rows[emitted]])


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("nothing", [-inf, nan])
def test_a_draft_from_a_law_without_candidates_counts_as_certain(
    method: str, nothing: float
) -> None:
    batch = Batch([2] * 20, 1, 5, mixed=False)
    batch.q = None  # type: ignore[assignment]
    expected = batch.verify(method)
    batch.q = DenseQ(torch.full((23, 2, 5), nothing))
    assert all(map(torch.equal, batch.verify(method)[:3], expected[:3]))


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_a_given_log_sum_exp_is_the_one_that_rows_would_be_read_for(method: str) -> None:
    batch = Batch([3] * 40, 2, 30, mixed=False)
    expected = batch.verify(method)
    temperature = batch.sampling.temperature.clamp(min=1e-5)[:, None, None]
    lse = (batch.q.logits / temperature).logsumexp(-1)
    batch.q = DenseQ(batch.q.logits, lse)
    assert all(map(torch.equal, batch.verify(method)[:3], expected[:3]))
    # and it is what the law is made of: another sum is another law
    batch.q = DenseQ(batch.q.logits, lse + 2)
    assert not torch.equal(batch.verify(method).tokens, expected.tokens)


@pytest.mark.parametrize("unknown", [-inf, inf, nan])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_draft_whose_sum_is_no_number_counts_as_certain(method: str, unknown: float) -> None:
    batch = Batch([3] * 20, 2, 5, mixed=False)
    logits = batch.q.logits
    batch.q = None  # type: ignore[assignment]
    expected = batch.verify(method)
    batch.q = DenseQ(logits, torch.full((23, 2), unknown))
    assert all(map(torch.equal, batch.verify(method)[:3], expected[:3]))


@pytest.mark.parametrize("method", ["standard", "block"])
def test_equal_laws_accept_everything_and_leave_a_defined_residual(
    make_sampling: MakeSampling, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.randn(1, 8)
    arguments = (table.expand(2, 8), torch.tensor([0, 2]), torch.tensor([[3]]), torch.arange(2))
    q = DenseQ(table.expand(1, 1, 8))
    sampling = make_sampling(1)
    out = verify(*arguments, torch.tensor([0]), sampling, method=method, q=q)
    assert out.count.item() == 2
    # a uniform of 1 and more refuses even so: the residual is empty, the target answers
    monkeypatch.setattr(noise, "uniform", lambda *_: torch.full((1, 1), 2.0))
    out = verify(*arguments, torch.tensor([0]), sampling, method=method, q=q)
    assert out.count.item() == 1
    assert 0 <= out.tokens[0, 0] < 8


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("width", [3, 5, 9])
def test_q_of_another_width_is_the_law_over_the_common_ids(method: str, width: int) -> None:
    batch = Batch([3] * 40, 2, 5, mixed=False)
    batch.drafts = torch.randint(0, min(width, 5), (40, 2))
    logits = torch.randn(43, 2, width)
    batch.q = DenseQ(logits)
    out = batch.verify(method)
    same = torch.full((43, 2, 5), -inf)
    same[..., : min(width, 5)] = logits[..., :5]
    batch.q = DenseQ(same)
    assert torch.equal(out.tokens, batch.verify(method).tokens)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sparse_q_is_dense_q_with_the_rest_excluded(method: str) -> None:
    batch = Batch([4] * 60, 3, 8, mixed=False)
    ids = torch.rand(63, 3, 8).argsort(-1)[..., :4]
    ids[:, :, 3] = torch.where(torch.rand(63, 3) < 0.5, -1, ids[:, :, 3])
    logits = torch.randn(63, 3, 4)
    batch.drafts = ids[batch.slots, :, 1]
    dense = torch.full((63, 3, 9), -inf)
    dense.scatter_(2, ids.where(ids >= 0, 8), logits)
    batch.q = DenseQ(dense[..., :8].contiguous())
    expected = batch.verify(method)
    out = verify(
        batch.logits,
        batch.start,
        batch.drafts,
        batch.positions,
        batch.slots,
        batch.sampling,
        method=method,
        q=SparseQ(ids, logits),
    )
    assert torch.equal(out.tokens, expected.tokens)
    assert len(set(out.count.tolist())) > 2


def test_the_refused_one_hot_draft_is_never_the_replacement() -> None:
    for method in ("standard", "block", "coupled"):
        batch = Batch([2] * 3000, 1, 4, mixed=False)
        out = batch.verify(method, q=False)
        refused = out.count == 1
        assert refused.any()
        assert (out.tokens[refused, 0] != batch.drafts[refused, 0]).all()


def test_strided_logits_are_read_as_they_lie() -> None:
    batch = Batch([3] * 5, 2, 40)
    expected = batch.verify("standard")
    padded = torch.full((15, 64), nan)
    padded[:, :40] = batch.logits
    out = verify(
        padded[:, :40],
        batch.start,
        batch.drafts,
        batch.positions,
        batch.slots,
        batch.sampling,
        method="standard",
        q=batch.q,
    )
    assert torch.equal(out.tokens, expected.tokens)


def run_golden(
    monkeypatch: pytest.MonkeyPatch,
    p: list[list[float]],
    q: list[list[float]] | None,
    drafts: list[int],
    u: list[float],
    method: str,
) -> tuple[int, Tensor]:
    """Accepted drafts, and the law of the token after them, for given probabilities."""
    caught: list[Tensor] = []

    def catch(weights: Tensor, *_: object) -> Tensor:
        caught.append(weights.softmax(-1))
        return torch.zeros(len(weights), dtype=torch.int64)

    monkeypatch.setattr(noise, "uniform", lambda *_: torch.tensor([u]))
    monkeypatch.setattr(noise, "draw", catch)
    one = torch.ones(1)
    out = verify(
        torch.tensor([[log(x) if x else -inf for x in row] for row in p]),
        torch.tensor([0, len(p)]),
        torch.tensor([drafts]),
        torch.arange(len(p)),
        torch.tensor([0]),
        Sampling(torch.tensor([1]), one, torch.tensor([0]), one, one * 0),
        method=method,
        q=None if q is None else DenseQ(torch.tensor([q]).log()),
    )
    return int(out.count) - 1, caught[0][0]


P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def test_golden_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_golden(monkeypatch, [P, P], [Q], [1], [0.59], "standard")[0] == 1
    accepted, law = run_golden(monkeypatch, [P, P], [Q], [1], [0.61], "standard")
    assert accepted == 0
    assert torch.equal(law, torch.tensor([1.0, 0.0, 0.0]))


def test_golden_one_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_golden(monkeypatch, [P, P], None, [1], [0.29], "standard")[0] == 1
    accepted, law = run_golden(monkeypatch, [P, P], None, [1], [0.31], "standard")
    assert accepted == 0
    torch.testing.assert_close(law, torch.tensor([5 / 7, 0.0, 2 / 7]))


@pytest.mark.parametrize(
    ("second", "u", "accepted"),
    [
        (0, [1e-6, 0.71], 2),  # the last threshold is rho_2 = 0.72
        (0, [1e-6, 0.73], 0),  # h_1 = 0: the first draft survives only through the second
        (1, [1e-6, 0.47], 2),  # rho_2 = 0.48
        (1, [1e-6, 0.49], 0),
    ],
)
def test_golden_block(
    monkeypatch: pytest.MonkeyPatch, second: int, u: list[float], accepted: int
) -> None:
    p, q = [P, [0.6, 0.4, 0.0], P], [Q, [0.5, 0.5, 0.0]]
    found, law = run_golden(monkeypatch, p, q, [1, second], u, "block")
    assert found == accepted
    if not accepted:
        assert torch.equal(law, torch.tensor([1.0, 0.0, 0.0]))


def test_golden_synthetic(make_sampling: MakeSampling) -> None:
    """A mean length of 2.5 with K = 3: conditional rates 1, 1/2, 0."""
    n = 20_000
    for temperature in (0.0, 1.0):
        out = verify(
            torch.zeros(4 * n, 2),
            torch.arange(n + 1) * 4,
            torch.ones(n, 3, dtype=torch.int64),
            torch.arange(4 * n),
            torch.zeros(n, dtype=torch.int64),
            make_sampling(1, temperature=temperature),
            method="synthetic",
            acceptance_rates=torch.tensor([1.0, 0.5, 0.0]),
        )
        assert set(out.count.tolist()) == {2, 3}
        assert abs(out.count.double().mean() - 2.5) < 0.015
