from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from specdec.errors import OutOfMemoryError
from specdec.runner.kv_cache import BlockPool, KVSpec, PagedKVCache


def test_a_fresh_pool_counts_upwards_and_keeps_block_zero() -> None:
    pool = BlockPool(5)
    assert pool.free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.free == 0


def test_what_is_handed_out_depends_on_what_is_free_alone() -> None:
    pool = BlockPool(50)
    pool.allocate(2)
    taken = pool.allocate(3)
    pool.release(pool.allocate(4))
    pool.release(taken[::-1])
    assert pool.allocate(3) == taken


def test_a_request_that_grows_stays_in_one_run_beside_others() -> None:
    pool = BlockPool(1000)
    requests = [pool.allocate(3) for _ in range(8)]
    for _ in range(50):
        for blocks in requests:
            blocks += pool.allocate(1, after=blocks[-1])
    for blocks in requests:
        assert blocks == list(range(blocks[0], blocks[0] + 53))


def test_a_new_request_leaves_room_to_the_one_before_it() -> None:
    pool = BlockPool(12)
    assert pool.allocate(1) == [1]
    assert pool.allocate(2) == [6, 7]  # 2 .. 5 are left to the first, 8 .. 11 to the second
    assert pool.allocate(5, after=1) == [2, 3, 4, 5, 9]  # no more room: where there is some
    assert pool.allocate(3, after=7) == [8, 10, 11]


def test_many_blocks_at_once_take_the_largest_gaps() -> None:
    pool = BlockPool(12)
    held = pool.allocate(11)
    pool.release([b for b in held if b in (2, 3, 5, 8, 9, 10)])
    assert pool.allocate(5) == [8, 9, 10, 2, 3]
    assert pool.allocate(1) == [5]


def test_nothing_follows_a_block_that_is_not_allocated() -> None:
    pool = BlockPool(9)
    pool.allocate(2)
    with pytest.raises(ValueError, match="block 3 is not allocated"):
        pool.allocate(1, after=3)
    assert pool.free == 6


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfMemoryError, match="3 cache blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.free == 2
    assert pool.allocate(0) == []


@pytest.mark.parametrize("blocks", [[0], [3], [1, 1], [1, 99], [-1]])
def test_a_wrong_release_is_refused_and_releases_nothing(blocks: list[int]) -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not allocated, or twice"):
        pool.release(blocks)
    assert pool.free == 2


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(3)
    pool.release(pool.allocate(1))
    with pytest.raises(ValueError, match=r"\[1\]"):
        pool.release([1])


class Pool(RuleBasedStateMachine):
    """Against a set of free blocks."""

    held: Bundle[list[int]] = Bundle("held")

    @initialize(num_blocks=st.integers(1, 60))
    def start(self, num_blocks: int) -> None:
        self.pool, self.open = BlockPool(num_blocks), set(range(1, num_blocks))

    def took(self, blocks: list[int], n: int) -> None:
        assert len(blocks) == len(set(blocks)) == n
        assert set(blocks) <= self.open
        self.open -= set(blocks)

    @rule(target=held, n=st.integers(0, 12))
    def allocate(self, n: int) -> list[int]:
        if n > len(self.open):
            with pytest.raises(OutOfMemoryError):
                self.pool.allocate(n)
            return []
        gaps = "".join("x" if i in self.open else " " for i in range(self.pool.num_blocks)).split()
        blocks = self.pool.allocate(n)
        self.took(blocks, n)
        if any(len(gap) >= n for gap in gaps):
            assert blocks == list(range(blocks[0], blocks[0] + n)) if n else True
        return blocks

    @rule(blocks=held, n=st.integers(0, 4))
    def grow(self, blocks: list[int], n: int) -> None:
        if not blocks or n > len(self.open):
            return
        room = [i for i in range(1, n + 1) if blocks[-1] + i in self.open]
        more = self.pool.allocate(n, after=blocks[-1])
        self.took(more, n)
        runs = next((i for i, j in enumerate(room, 1) if i != j), len(room) + 1) - 1
        assert more[:runs] == list(range(blocks[-1] + 1, blocks[-1] + 1 + runs))
        blocks += more

    @rule(blocks=consumes(held), backwards=st.booleans())
    def release(self, blocks: list[int], backwards: bool) -> None:
        self.pool.release(blocks[::-1] if backwards else blocks)
        self.open |= set(blocks)

    @invariant()
    def free_is_what_is_left(self) -> None:
        assert self.pool.free == len(self.open)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def test_the_list_of_gaps_does_not_grow_with_use() -> None:
    pool = BlockPool(200)
    first, second = pool.allocate(1), pool.allocate(1)
    for _ in range(500):
        pool.release(pool.allocate(1, after=first[-1]))
        pool.release(pool.allocate(3, after=second[-1]))
    assert len(pool._by_size) < 100


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(2).allocate(-1)


def test_the_cache_has_one_row_per_slot_and_each_layer_its_own_shape() -> None:
    specs = [KVSpec(2, 8, 8), KVSpec(3, 12, 10, window=7)]
    cache = PagedKVCache(specs, 4, 16, torch.float16, "cpu")
    assert cache.k(0).shape == (64, 2, 8)
    assert cache.k(1).shape == (64, 3, 12)
    assert cache.v(1).shape == (64, 3, 10)
    assert cache.v(1).dtype == torch.float16
    assert not cache.k(0).any()


def test_bytes_per_block_is_what_the_tensors_take() -> None:
    specs = [KVSpec(2, 8, 8), KVSpec(3, 12, 10)]
    cache = PagedKVCache(specs, 4, 16, torch.float16, "cpu")
    total = sum(t.nbytes for i in range(2) for t in (cache.k(i), cache.v(i)))
    assert PagedKVCache.bytes_per_block(specs, 16, torch.float16) * 4 == total


def test_slots_written_by_token_are_read_by_head() -> None:
    cache = PagedKVCache([KVSpec(2, 3, 4)], 2, 4, torch.float32, "cpu")
    cache.k(0)[5] = torch.arange(6.0).view(2, 3)
    cache.v(0)[5] = torch.arange(8.0).view(2, 4)
    k, v = cache.by_head(0)
    assert k.shape == (2, 1, 8, 3)
    assert torch.equal(k[:, 0, 5], torch.arange(6.0).view(2, 3))
    assert torch.equal(v[:, 0, 5], torch.arange(8.0).view(2, 4))
    assert k.count_nonzero() == 5


def test_a_cache_takes_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("only Linux tells")
    before = resident()
    cache = PagedKVCache([KVSpec(4, 64, 64)] * 4, 4096, 16, torch.float32, "cpu")
    for block in range(0, 4096, 512):
        cache.k(0)[block * 16 : block * 16 + 16] = 1.0
    assert resident() - before < 20 << 20  # of 536 MB


def test_fill_overwrites_every_slot() -> None:
    cache = PagedKVCache([KVSpec(1, 2, 3)], 2, 4, torch.float32, "cpu")
    cache.fill(float("nan"))
    assert cache.k(0).isnan().all()
    assert cache.v(0).isnan().all()
