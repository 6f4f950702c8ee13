"""Weights in huge pages: which pages are asked for, and that nothing changes but where they lie."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.runner.huge_pages import HUGE, SMALL, use_huge_pages, whole_pages
from specdec.runner.product import available, pack, packed_product

MB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "pages"),
    [
        ([], []),
        ([(0, HUGE)], [(0, HUGE)]),
        ([(64, HUGE)], [(0, HUGE)]),  # the rest of its first page is the allocator's
        ([(SMALL, HUGE)], []),  # over a boundary, whole nowhere
        ([(SMALL, 2 * HUGE)], [(HUGE, 2 * HUGE)]),
        ([(HUGE, MB), (2 * MB + MB, MB)], [(HUGE, 2 * HUGE)]),  # two neighbours fill one page
        ([(3 * MB, MB), (HUGE, MB)], [(HUGE, 2 * HUGE)]),
        ([(HUGE, MB - SMALL), (3 * MB + SMALL, MB)], []),  # with others' memory between them
        ([(0, HUGE), (4 * HUGE, HUGE)], [(0, HUGE), (4 * HUGE, 5 * HUGE)]),
    ],
)
def test_only_whole_pages_of_the_weights_are_moved(
    memory: list[tuple[int, int]], pages: list[tuple[int, int]]
) -> None:
    assert whole_pages(memory) == pages


@given(st.lists(st.tuples(st.integers(0, 20 * HUGE), st.integers(1, 3 * HUGE)), max_size=6))
def test_pages_are_aligned_in_order_and_covered(memory: list[tuple[int, int]]) -> None:
    covered = set()
    for address, size in memory:
        covered |= set(range(address // SMALL, -(-(address + size) // SMALL)))
    last = 0
    for start, end in whole_pages(memory):
        assert start % HUGE == end % HUGE == 0
        assert last <= start < end
        assert covered >= set(range(start // SMALL, end // SMALL))
        last = end


@pytest.mark.skipif(not available(), reason="torch cannot pack here")
def test_moving_changes_no_value() -> None:
    weights = [torch.randn(1024, 1024 + 8 * n) for n in range(4)]  # 4 MB each
    packed, x = [pack(w) for w in weights], [torch.randn(4, w.shape[1]) for w in weights]
    before = [packed_product(v, p, None) for v, p in zip(x, packed, strict=True)]
    moved = use_huge_pages(packed)
    assert moved % HUGE == 0
    after = [packed_product(v, p, None) for v, p in zip(x, packed, strict=True)]
    assert all(map(torch.equal, before, after))
    for weight, p in zip(weights, packed, strict=True):
        assert torch.equal(p.to_dense(), weight)
    if moved:  # the kernel says that it did it
        smaps = Path("/proc/self/smaps").read_text()
        assert sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", smaps))) * 1024 >= moved


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages([torch.zeros(1)]) == 0
