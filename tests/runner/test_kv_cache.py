from __future__ import annotations

import pytest
import torch

from specdec.errors import OutOfMemoryError
from specdec.runner.kv_cache import BlockPool, KVSpec, PagedKVCache


def test_a_fresh_pool_counts_upwards_and_keeps_block_zero() -> None:
    pool = BlockPool(5)
    assert pool.free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.free == 0


def test_released_blocks_come_back_first_and_in_the_same_order() -> None:
    pool = BlockPool(10)
    pool.allocate(2)
    taken = pool.allocate(3)
    pool.release(taken)
    assert pool.allocate(3) == taken
    assert pool.allocate(1) == [6]


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


def test_fill_overwrites_every_slot() -> None:
    cache = PagedKVCache([KVSpec(1, 2, 3)], 2, 4, torch.float32, "cpu")
    cache.fill(float("nan"))
    assert cache.k(0).isnan().all()
    assert cache.v(0).isnan().all()
