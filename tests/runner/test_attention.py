"""The attention function against a loop over query rows, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specdec.errors import TargetError
from specdec.runner.attention import AttentionContext, attending, paged_attention
from specdec.runner.attention_plan import AttentionPlan, plan_attention
from specdec.runner.kv_cache import KVSpec, PagedKVCache

BLOCK = 4
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 5},
    "window_of_one": {"sliding_window": 1},
    "chunk": {"chunk": 6},
    "softcap": {"softcap": 0.7, "sliding_window": 5},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.3])},
    "scaling": {"scaling": 1.3},
}


class Layer(nn.Module):
    layer_idx = 0


class Batch:
    """Requests of given contexts whose last rows are computed now; keys before are cached."""

    def __init__(
        self,
        counts: list[int],
        contexts: list[int],
        *,
        heads: int,
        kv: int,
        runs: list[bool] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.counts, self.contexts = counts, contexts
        self.q = [normal(n, heads, 8) for n in counts]
        self.k = [normal(c, kv, 8) for c in contexts]
        self.v = [normal(c, kv, 6) for c in contexts]
        blocks = -(-max(contexts) // BLOCK)
        order = torch.randperm(blocks * len(counts), generator=generator) + 1
        self.tables = order.view(len(counts), blocks)
        for i, run in enumerate(runs or []):
            if run:
                self.tables[i] = torch.arange(1, blocks + 1) + (i + 1) * blocks * len(counts)
        self.cache = PagedKVCache(
            [KVSpec(kv, 8, 6)], int(self.tables.max()) + 1, BLOCK, torch.float64, "cpu"
        )
        self.cache.fill(float("nan"))
        for i, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            p = torch.arange(context - count)
            slots = self.tables[i, p // BLOCK] * BLOCK + p % BLOCK
            self.cache.k(0)[slots] = self.k[i][: context - count]
            self.cache.v(0)[slots] = self.v[i][: context - count]

    def run(
        self,
        rule: dict[str, Any],
        *,
        deterministic: bool,
        padding: int = 2,
        is_prefill: list[bool] | None = None,
    ) -> list[Tensor]:
        pad = torch.zeros(padding, dtype=torch.int64)
        start = [sum(self.counts[:i]) for i in range(len(self.counts) + 1)]
        pairs = list(zip(self.counts, self.contexts, strict=True))
        plan = plan_attention(
            torch.cat([torch.arange(c - n, c) for n, c in pairs] + [pad]),
            start,
            self.contexts,
            self.tables,
            BLOCK,
            deterministic=deterministic,
            is_prefill=is_prefill,
        )
        new = [(n, c) for n, c in pairs]
        tail = torch.ones(padding, 1, 1, dtype=torch.float64)
        q = torch.cat([*self.q, tail.expand(-1, *self.q[0].shape[1:])])
        k = torch.cat([k[c - n :] for k, (n, c) in zip(self.k, new, strict=True)])
        v = torch.cat([v[c - n :] for v, (n, c) in zip(self.v, new, strict=True)])
        k = torch.cat([k, tail.expand(-1, *k.shape[1:])])
        v = torch.cat([v, tail.expand(-1, *v.shape[1:])])
        rule = dict(rule)
        chunk = rule.pop("chunk", None)
        context = AttentionContext("Test", self.cache, plan, [chunk], deterministic)
        with attending(context):
            pq, pk, pv = (t.transpose(0, 1)[None] for t in (q, k, v))
            out, weights = paged_attention(Layer(), pq, pk, pv, None, **rule)
        assert weights is None
        assert context.calls == 1
        assert out.isfinite().all()
        return list(torch.split(out[0][: start[-1]], self.counts))

    def expected(self, rule: dict[str, Any]) -> list[Tensor]:
        return [self._request(i, **rule) for i in range(len(self.counts))]

    def _request(
        self,
        i: int,
        *,
        scaling: float = 8**-0.5,
        sliding_window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        count, context = self.counts[i], self.contexts[i]
        heads, kv = self.q[i].shape[1], self.k[i].shape[1]
        out = torch.zeros(count, heads, 6, dtype=torch.float64)
        for row in range(count):
            position = context - count + row
            seen = [
                key
                for key in range(position + 1)
                if (sliding_window is None or key > position - sliding_window)
                and (chunk is None or key // chunk == position // chunk)
            ]
            for head in range(heads):
                own = head // (heads // kv)
                scores = [
                    float(self.q[i][row, head] @ self.k[i][key, own]) * scaling for key in seen
                ]
                if softcap is not None:
                    scores = [math.tanh(score / softcap) * softcap for score in scores]
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0.0 if s_aux is None else math.exp(float(s_aux[head])))
                for key, weight in zip(seen, weights, strict=True):
                    out[row, head] += weight / total * self.v[i][key, own]
        return out


# A first chunk, a later chunk, decode, verification; contexts far enough apart for two tiles.
MIXED = ([20, 18, 1, 4, 7], [20, 30, 9, 4, 23])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_mixed_batch_attends_as_written_out(rule: str, deterministic: bool) -> None:
    batch = Batch(*MIXED, heads=6, kv=2)
    got = batch.run(RULES[rule], deterministic=deterministic)
    for have, want in zip(got, batch.expected(RULES[rule]), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([1], [1]),
        ([1], [13]),
        ([3, 0, 2], [3, 9, 11]),
        ([0, 0], [5, 4]),
        ([16], [20]),
        ([17], [17]),
        ([2, 2, 2], [260, 600, 5]),
        ([9, 1], [257, 256]),
    ],
)
@pytest.mark.parametrize("kv", [1, 6])
def test_shapes_at_the_edges(
    counts: list[int], contexts: list[int], kv: int, deterministic: bool
) -> None:
    batch = Batch(counts, contexts, heads=6, kv=kv)
    got = batch.run({"sliding_window": 300}, deterministic=deterministic)
    for have, want in zip(got, batch.expected({"sliding_window": 300}), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_drafts_beside_a_chunk_and_a_single_row(deterministic: bool) -> None:
    batch = Batch([21, 20, 1], [30, 20, 9], heads=6, kv=2)
    got = batch.run({}, deterministic=deterministic, is_prefill=[False, True, False])
    for have, want in zip(got, batch.expected({}), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_only_a_long_piece_of_a_prompt_is_a_chunk() -> None:
    tables = torch.arange(1, 31).view(3, 10)
    positions = torch.cat([torch.arange(9, 30), torch.arange(20), torch.arange(4)])
    start, context = [0, 21, 41, 45], [30, 20, 4]

    def tiles(is_prefill: list[bool] | None, deterministic: bool) -> list[tuple[bool, int, int]]:
        plan = plan_attention(
            positions, start, context, tables, BLOCK,
            deterministic=deterministic, is_prefill=is_prefill,
        )  # fmt: skip
        return [(tile.chunk, tile.entries, tile.q) for tile in plan.tiles]

    prefill = [False, True, True]
    assert tiles(prefill, False) == [(True, 1, 20), (False, 2, 21)]
    assert tiles(prefill, True) == [(True, 1, 20), (False, 4, 8)]  # 21 rows are 8 + 8 + 5
    # told nothing, it goes by the number of rows
    assert tiles(None, False) == [(True, 1, 21), (True, 1, 20), (False, 1, 4)]


def plan_of(
    counts: list[int], contexts: list[int], tables: Tensor, *, deterministic: bool = False
) -> AttentionPlan:
    pairs = list(zip(counts, contexts, strict=True))
    return plan_attention(
        torch.cat([torch.arange(c - n, c) for n, c in pairs]),
        np.cumsum([0, *counts]),
        np.array(contexts),
        tables,
        BLOCK,
        deterministic=deterministic,
    )


def scattered(requests: int, blocks: int) -> Tensor:
    """Block tables without two blocks in a row."""
    return torch.arange(1, 2 * requests * blocks, 2).view(requests, blocks)


def test_rows_of_a_padded_tile_are_told_from_padding() -> None:
    plan = plan_of([2, 3, 1], [7, 3, 10], scattered(3, 5))
    (tile,) = plan.tiles
    assert tile.row_slice is None
    assert tile.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert tile.out_from is not None
    assert tile.out_from.tolist() == [0, 1, 3, 4, 5, 6]
    assert plan.order is None


def test_requests_in_one_run_of_slots_are_not_gathered() -> None:
    run, scattered_ = torch.tensor([[3, 4, 5]]), torch.tensor([[5, 3, 4]])
    (tile,) = plan_of([1], [9], run).tiles
    assert tile.spans(None, None) == [(0, 12, 9)]
    assert plan_of([1], [9], scattered_).tiles[0].firsts is None
    # blocks past the context do not matter
    assert plan_of([1], [4], scattered_).tiles[0].firsts is not None


def test_short_requests_are_gathered_together_and_long_ones_read_in_place() -> None:
    tables = torch.arange(1, 1001).view(5, 200)
    plan = plan_of([1, 1, 1, 1, 2], [600, 20, 30, 700, 31], tables)
    assert [(tile.entries, tile.q, tile.firsts is None) for tile in plan.tiles] == [
        (2, 1, False),
        (3, 2, True),
    ]
    assert plan.order is not None
    assert plan.order.tolist() == [0, 2, 3, 1, 4, 5]


def test_two_short_requests_are_not_worth_a_copy() -> None:
    tables = torch.arange(1, 1001).view(5, 200)
    (tile,) = plan_of([1, 1], [20, 30], tables[:2]).tiles
    assert tile.firsts is not None


def test_drafts_do_not_pad_requests_without_them_that_are_read_in_place() -> None:
    tables = torch.arange(1, 1001).view(4, 250)
    plan = plan_of([1, 4, 1, 3], [500, 501, 502, 503], tables)
    assert [(tile.entries, tile.q) for tile in plan.tiles] == [(2, 1), (2, 4)]


def test_keys_out_of_every_rows_reach_are_not_read() -> None:
    tables = torch.arange(1, 251)[None]
    (tile,) = plan_of([3], [500], tables).tiles  # positions 497, 498, 499
    assert tile.spans(10, None) == [(488, 4 + 488, 12)]
    assert tile.spans(None, 64) == [(448, 4 + 448, 52)]
    assert tile.spans(None, None) == [(0, 4, 500)]


def test_few_row_requests_share_a_tile_unless_contexts_are_far_apart() -> None:
    plan = plan_of([1, 1, 1, 1], [100, 120, 900, 1000], scattered(4, 250))
    assert [(tile.entries, tile.keys) for tile in plan.tiles] == [(2, 1000), (2, 120)]


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 40), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    padding=st.integers(0, 3),
    deterministic=st.booleans(),
    rule=st.sampled_from(list(RULES)),
)
@settings(max_examples=60, deadline=None)
def test_any_mix_of_runs_and_scattered_pages_attends_as_written_out(
    requests: list[tuple[int, int, bool, bool]], padding: int, deterministic: bool, rule: str
) -> None:
    counts = [count for count, _, _, _ in requests]
    contexts = [max(count + before, 1) for count, before, _, _ in requests]
    batch = Batch(counts, contexts, heads=6, kv=2, runs=[run for _, _, run, _ in requests])
    is_prefill = [prefill for _, _, _, prefill in requests]
    got = batch.run(
        RULES[rule], deterministic=deterministic, padding=padding, is_prefill=is_prefill
    )
    for have, want in zip(got, batch.expected(RULES[rule]), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("runs", [[True, True, True], [True, False, True]])
def test_long_contexts_attend_as_written_out_wherever_their_pages_are(runs: list[bool]) -> None:
    batch = Batch([1, 3, 2], [300, 290, 270], heads=6, kv=2, runs=runs)
    for rule in ("full", "window", "sinks"):
        got = batch.run(RULES[rule], deterministic=False)
        for have, want in zip(got, batch.expected(RULES[rule]), strict=True):
            torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_masks_are_built_once_per_window() -> None:
    tables = torch.arange(1, 11).view(2, 5)
    plan = plan_attention(
        torch.tensor([3, 4, 9]), [0, 2, 3], [5, 10], tables, BLOCK, deterministic=False
    )
    tile = plan.tiles[0]
    mask = tile.folded_mask(4, None, torch.float32, 2)
    assert tile.folded_mask(4, None, torch.float32, 2) is mask
    assert tile.folded_mask(None, None, torch.float32, 2) is not mask


def test_a_mask_of_the_models_own_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 4)
    context = AttentionContext("Odd", None, None, [None], False)
    with attending(context), pytest.raises(TargetError, match=r"Odd cannot be served: .* mask"):
        paged_attention(Layer(), x, x, x, torch.zeros(1, 1, 1, 1))


def test_outside_a_forward_it_says_where_it_belongs() -> None:
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(TargetError, match=r"only works inside TargetModel\.forward"):
        paged_attention(Layer(), x, x, x, None)
