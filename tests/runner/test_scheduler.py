"""Who gets a slot, pages and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import OutOfMemoryError
from specdec.outputs import RequestMetrics
from specdec.runner.kv_cache import BlockPool
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.sampling_params import SamplingParams

BLOCK = 4


def scheduler(
    slots: int = 3, blocks: int = 100, chunk: int = 8, lookahead: int = 0, k: int = 4
) -> Scheduler:
    state = Slots(slots, 64, (64 + lookahead) // BLOCK + 1, k, torch.device("cpu"))
    return Scheduler(state, BlockPool(blocks + 1), BLOCK, chunk, lookahead)


def sequence(name: str, prompt: int, max_length: int | None = None, **values: Any) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        prompt=list(range(1, prompt + 1)),
        params=SamplingParams(),
        stream=1,
        stop_ids=(),
        own_stop_ids=frozenset(),
        max_length=max_length or prompt + 8,
        metrics=RequestMetrics(arrival_time=0.0),
        **values,
    )


def names(found: list[Sequence]) -> list[str]:
    return [s.request_id for s in found]


def computed(scheduler: Scheduler, slot: int, tokens: int) -> None:
    """As if the target had processed so many tokens, and drawn one after the prompt."""
    state = scheduler.slots
    state.computed[slot] = tokens
    state.length[slot] = max(state.length[slot], tokens + 1)


def test_requests_are_admitted_in_order_to_the_lowest_slots() -> None:
    some = scheduler(slots=2)
    for name in "abc":
        some.add(sequence(name, 3))
    assert names(some.admit()) == ["a", "b"]
    assert {s: q.request_id for s, q in some.running.items()} == {0: "a", 1: "b"}
    assert names(list(some.waiting)) == ["c"]
    assert [(r.slot, r.request_id, r.tokens) for r in some.changes.added] == [
        (0, "a", (1, 2, 3)),
        (1, "b", (1, 2, 3)),
    ]


def test_a_slot_that_was_freed_is_used_again_the_lowest_first() -> None:
    some = scheduler(slots=3)
    first = [sequence(name, 3) for name in "abc"]
    for one in first:
        some.add(one)
    some.admit()
    for one in (first[0], first[2]):
        some.retire(one)
    assert some.changes.finished == [0, 2]
    for name in "de":
        some.add(sequence(name, 3))
    some.admit()
    assert {s: q.request_id for s, q in some.running.items()} == {1: "b", 0: "d", 2: "e"}


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    some = scheduler(blocks=6)
    big = sequence("big", 3, max_length=5 * BLOCK)
    for one in (sequence("a", 3, max_length=8), big, sequence("small", 3, max_length=4)):
        some.add(one)
    assert names(some.admit()) == ["a"]
    assert names(list(some.waiting)) == ["big", "small"]
    some.retire(some.running[0])
    assert names(some.admit()) == ["big", "small"]
    assert some.pool.free == 0


def test_pages_cover_the_longest_a_request_can_get_and_the_drafters_look_ahead() -> None:
    assert scheduler().blocks_needed(8) == 2
    assert scheduler().blocks_needed(9) == 3
    assert scheduler(lookahead=4).blocks_needed(8) == 3


def test_a_request_that_could_never_run_is_refused_with_the_size_of_the_cache() -> None:
    some = scheduler(blocks=3, lookahead=2)
    some.check(10, "it")
    with pytest.raises(
        OutOfMemoryError, match="it can grow to 11 tokens, but the key-value cache holds 10;"
    ):
        some.check(11, "it")


def test_pages_come_back_and_a_waiting_request_leaves_the_queue() -> None:
    some = scheduler(slots=1)
    running, waiting, foreign = sequence("a", 3), sequence("b", 3), sequence("c", 3)
    some.add(running)
    some.add(waiting)
    some.admit()
    free = some.pool.free
    some.retire(waiting)
    assert not some.waiting
    assert some.pool.free == free
    some.retire(foreign)  # was never added: nothing to take back
    some.retire(running)
    assert some.pool.free == 100
    assert (running.slot, running.blocks) == (-1, [])


def test_a_slot_keeps_nothing_of_the_request_before() -> None:
    some = scheduler(slots=1)
    first = sequence("a", 9)
    some.add(first)
    some.admit()
    state = some.slots
    state.drafts[0], state.num_drafts[0], state.computed[0] = 5, 3, 9
    state.plain_steps[0], state.drafted[0], state.accepted[0], state.spec_steps[0] = 1, 2, 1, 2
    some.retire(first)
    some.add(sequence("b", 2))
    some.admit()
    assert (state.length[0], state.computed[0], state.num_drafts[0]) == (2, 0, 0)
    assert state.drafts[0].tolist() == [-1] * 4
    for counter in (state.plain_steps, state.drafted, state.accepted, state.spec_steps):
        assert not counter[0].any()


def test_those_that_decode_come_first_with_a_row_for_every_draft() -> None:
    some = scheduler()
    for name, prompt in (("a", 3), ("b", 5), ("c", 2)):
        some.add(sequence(name, prompt))
    some.admit()
    computed(some, 1, 5)
    some.slots.num_drafts[1] = 2
    found = some.schedule()
    assert found.slots.tolist() == [1, 0, 2]
    assert found.rows.tolist() == [3, 3, 2]
    assert found.is_prefill.tolist() == [False, True, True]
    assert found.samples.tolist() == [True, True, True]


def test_prompts_are_cut_into_chunks_that_start_at_multiples_of_the_chunk_size() -> None:
    some = scheduler(chunk=8)
    some.add(sequence("a", 19))
    some.add(sequence("b", 3))
    some.admit()
    seen = []
    for _ in range(3):
        found = some.schedule()
        seen.append((found.slots.tolist(), found.rows.tolist(), found.samples.tolist()))
        some.slots.computed[found.slots] += found.rows
        some.slots.length[found.slots[found.samples]] += 1
    # the last chunk of a, 3 tokens, leaves room for the whole of b
    assert seen == [([0], [8], [False]), ([0], [8], [False]), ([0, 1], [3, 3], [True, True])]


def test_chunks_of_several_prompts_share_the_budget_in_order_of_arrival() -> None:
    some = scheduler(chunk=8)
    for name, prompt in (("a", 3), ("b", 6), ("c", 1)):
        some.add(sequence(name, prompt))
    some.admit()
    found = some.schedule()
    # b does not fit beside a, and c does not overtake it
    assert found.slots.tolist() == [0]


def test_nothing_running_is_an_empty_schedule() -> None:
    assert len(scheduler().schedule().slots) == 0
