"""Who gets a slot, pages and rows; who is set aside when there are not enough."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import OutOfMemoryError
from specdec.runner.kv_cache import BlockPool
from specdec.runner.scheduler import Schedule, Scheduler
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import SKIP_REASONS, RequestChanges

BLOCK = 4
LONGEST = 64
New = Callable[..., Sequence]


def scheduler(
    slots: int = 3, blocks: int = 100, budget: int = 16, lookahead: int = 0, k: int = 4, **how: Any
) -> Scheduler:
    state = Slots(slots, LONGEST, -(-(LONGEST + lookahead) // BLOCK), k, torch.device("cpu"))
    return Scheduler(state, BlockPool(blocks + 1), BLOCK, budget, lookahead, **how)


@pytest.fixture
def queue(new_sequence: New) -> Callable[..., list[Sequence]]:
    """Adds requests by name, with the length of their prompts, in this order."""
    arrivals = itertools.count()

    def add(
        some: Scheduler, fields: dict[str, Any] | None = None, **prompts: int
    ) -> list[Sequence]:
        made = [
            new_sequence(
                range(1, 1 + tokens), request_id=name, arrival=next(arrivals), **(fields or {})
            )
            for name, tokens in prompts.items()
        ]
        for sequence in made:
            some.add(sequence)
        return made

    return add


Queue = Callable[..., list[Sequence]]


def names(found: Any) -> list[str]:
    return [s.request_id for s in found]


def running(some: Scheduler) -> dict[int, str]:
    return {slot: sequence.request_id for slot, sequence in sorted(some.running.items())}


def prefilled(some: Scheduler, *sequences: Sequence, drafts: int = 0) -> None:
    """As if the target had processed their prompts and drawn a token; so many drafts follow."""
    state = some.slots
    for sequence in sequences:
        assert sequence.slot >= 0
        state.computed[sequence.slot] = state.length[sequence.slot]
        state.length[sequence.slot] += 1
        state.num_drafts[sequence.slot] = drafts


def grown(some: Scheduler, sequence: Sequence, tokens: int) -> None:
    """As if it had emitted so many tokens more, one by one: they are its length, as numbers."""
    state, slot = some.slots, sequence.slot
    assert slot >= 0
    for _ in range(tokens):
        length = int(state.length[slot])
        state.history[slot, length] = length
        state.length[slot] = length + 1
        state.computed[slot] = length


def synced(some: Scheduler) -> None:
    """Bring `emitted` up to date when a slot is lost, as the engine does."""

    def leaving(sequence: Sequence) -> None:
        known = len(sequence.prompt) + len(sequence.emitted)
        slot = sequence.slot
        sequence.emitted += some.slots.history[slot, known : some.slots.length[slot]].tolist()

    some.leaving = leaving


# -- slots -------------------------------------------------------------------


def test_requests_are_admitted_in_order_to_the_lowest_slots(queue: Queue) -> None:
    some = scheduler(slots=2)
    queue(some, a=3, b=3, c=3)
    assert names(some.admit()) == ["a", "b"]
    assert running(some) == {0: "a", 1: "b"}
    assert names(some.waiting) == ["c"]
    assert [(r.slot, r.request_id, r.tokens) for r in some.changes.added] == [
        (0, "a", (1, 2, 3)),
        (1, "b", (1, 2, 3)),
    ]


def test_a_slot_that_was_freed_is_used_again_the_lowest_first(queue: Queue) -> None:
    some = scheduler(slots=3)
    first = queue(some, a=3, b=3, c=3)
    some.admit()
    for one in (first[2], first[0]):
        some.retire(one)
    assert some.changes.finished == [2, 0]
    queue(some, d=3, e=3)
    some.admit()
    assert running(some) == {0: "d", 1: "b", 2: "e"}


def test_a_slot_keeps_nothing_of_the_request_before(queue: Queue) -> None:
    some = scheduler(slots=1)
    (first,) = queue(some, {"stop_ids": (5, 6), "watched": True}, a=9)
    some.admit()
    state = some.slots
    state.drafts[0], state.num_drafts[0], state.computed[0] = 5, 3, 9
    state.skip[0], state.first_time[0], state.logprobs[0], state.prompt_logprobs[0] = 2, 1.5, 3, 3
    state.has_stop_strings[0] = True
    some.retire(first)
    queue(some, b=2)
    some.admit()
    assert (state.length[0], state.computed[0], state.num_drafts[0]) == (2, 0, 0)
    assert (state.prompt_length[0], state.num_blocks[0]) == (2, 1)
    assert state.drafts[0].tolist() == [-1] * 4
    assert set(state.stop_ids[0].tolist()) == {-1}
    assert (state.skip[0], state.first_time[0]) == (0, 0)
    assert (state.logprobs[0], state.prompt_logprobs[0]) == (-1, -1)
    assert not state.watched[0]
    assert not state.has_stop_strings[0]


def test_no_more_run_than_a_step_has_rows_for(queue: Queue) -> None:
    for budget, fixed, most in ((2, False, 2), (1, False, 1), (5, True, 3), (1, True, 1)):
        some = scheduler(slots=8, budget=budget, fixed_chunks=fixed)
        queue(some, a=1, b=1, c=1, d=1, e=1)
        assert len(some.admit()) == most
        prefilled(some, *some.running.values(), drafts=2)
        found = some.choose()
        assert len(found.slots) == most
        assert found.rows.sum() <= budget


def test_leaving_is_told_while_the_request_still_has_its_slot(queue: Queue) -> None:
    some = scheduler(slots=2)
    left = []
    some.leaving = lambda sequence: left.append((sequence.request_id, sequence.slot))
    a, b, c = queue(some, a=3, b=3, c=3)
    some.admit()
    some.preempt(b)
    some.retire(a)
    some.retire(c)  # it never had one
    assert left == [("b", 1), ("a", 0)]


# -- pages -------------------------------------------------------------------


def test_pages_cover_the_tokens_and_the_drafters_look_ahead() -> None:
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


def test_a_request_gets_pages_for_its_prompt_and_one_token_and_more_as_it_grows(
    queue: Queue,
) -> None:
    some = scheduler(lookahead=2)
    (a,) = queue(some, {"max_length": 40}, a=5)
    some.admit()
    held = []
    prefilled(some, a)  # 6 tokens and 2 of look-ahead
    for _ in range(6):
        some.admit()
        held.append((int(some.slots.length[0]), len(a.blocks)))
        grown(some, a, 1)
    assert held == [(6, 2), (7, 3), (8, 3), (9, 3), (10, 3), (11, 4)]
    assert some.slots.block_tables[0, :5].tolist() == [*a.blocks, 0]
    assert some.pool.free == 100 - 4


def test_a_prompt_that_ends_at_the_limit_gets_no_page_for_a_token_it_never_draws(
    queue: Queue,
) -> None:
    some = scheduler(blocks=1)
    queue(some, {"max_length": 4}, a=4)
    assert len(some.admit()) == 1


def test_pages_for_drafts_are_given_where_they_are_there(queue: Queue) -> None:
    some = scheduler(blocks=4)
    a, b = queue(some, a=2, b=2)
    some.admit()
    prefilled(some, a, b, drafts=4)
    some.admit()
    assert [len(a.blocks), len(b.blocks)] == [2, 2]
    assert some.slots.num_drafts[:2].tolist() == [4, 4]


def test_drafts_are_cut_to_the_pages_there_are_before_anybody_is_set_aside(queue: Queue) -> None:
    some = scheduler(blocks=3)
    a, b = queue(some, a=2, b=2)
    some.admit()
    prefilled(some, a, b, drafts=4)
    some.admit()
    # a has the last page; b keeps the one draft that its own page has room for
    assert some.num_preemptions == 0
    assert some.slots.num_drafts[:2].tolist() == [4, 1]
    grown(some, b, 1)
    some.slots.num_drafts[b.slot] = 4
    some.admit()
    assert some.num_preemptions == 0
    assert some.slots.num_drafts[b.slot] == 0
    assert SKIP_REASONS[some.slots.skip[b.slot]] == "memory"


def test_tokens_get_their_pages_before_anybodys_drafts(queue: Queue) -> None:
    some = scheduler(blocks=3)
    a, b = queue(some, a=2, b=3)
    some.admit()
    prefilled(some, a, b)
    grown(some, b, 1)
    some.slots.num_drafts[a.slot] = 4
    some.admit()
    # the last page is for b's token, though a has the better rank
    assert (len(a.blocks), len(b.blocks)) == (1, 2)
    assert some.num_preemptions == 0
    assert some.slots.num_drafts[a.slot] == 1


def test_the_lowest_rank_is_set_aside_when_pages_run_out(queue: Queue) -> None:
    some = scheduler(blocks=5)
    a, b, c = queue(some, a=3, b=2, c=1)
    some.admit()
    prefilled(some, a, b, c)
    grown(some, a, 1)
    grown(some, b, 2)
    some.admit()
    assert some.num_preemptions == 0  # two pages were left
    grown(some, a, 4)
    some.admit()
    assert running(some) == {0: "a", 1: "b"}
    assert names(some.waiting) == ["c"]
    assert (c.slot, c.blocks, c.num_preemptions, some.num_preemptions) == (-1, [], 1, 1)
    assert [len(a.blocks), len(b.blocks)] == [3, 2]


def test_a_request_of_the_lowest_rank_that_lacks_a_page_is_set_aside_itself(queue: Queue) -> None:
    some = scheduler(blocks=3)
    a, b = queue(some, a=2, b=2)
    some.admit()
    prefilled(some, a, b)
    grown(some, a, 2)
    some.admit()
    grown(some, b, 2)
    some.admit()
    assert running(some) == {0: "a"}
    assert names(some.waiting) == ["b"]
    assert b.num_preemptions == 1


def test_the_pages_of_one_request_may_cost_several_their_slots(queue: Queue) -> None:
    some = scheduler(blocks=5)
    a, b, c = queue(some, {"max_length": 20}, a=3, b=1, c=1)
    some.admit()
    prefilled(some, a, b, c)
    grown(some, a, 5)
    some.admit()
    assert (some.pool.free, len(some.running)) == (0, 3)
    grown(some, a, 8)  # two pages, as a step that accepts many drafts may need
    some.admit()
    assert running(some) == {0: "a"}
    assert names(some.waiting) == ["b", "c"]
    assert len(a.blocks) == 5


def test_a_request_set_aside_waits_in_front_of_those_that_came_later(queue: Queue) -> None:
    some = scheduler(slots=2)
    _, b = queue(some, a=3, b=3)
    some.admit()
    queue(some, c=3)
    some.preempt(b)
    assert names(some.waiting) == ["b", "c"]


def test_a_request_set_aside_comes_back_with_the_tokens_it_had(queue: Queue) -> None:
    some = scheduler(slots=1)
    synced(some)
    (a,) = queue(some, {"max_length": 30}, a=3)
    some.admit()
    told = some.changes.take()
    assert told is not None
    assert [r.slot for r in told.added] == [0]
    prefilled(some, a)
    some.slots.history[0, 3] = 3
    grown(some, a, 4)
    some.preempt(a)
    assert some.slots.num_drafts[0] == 0
    some.admit()
    told = some.changes.take()
    assert told is not None
    assert told.preempted == (0,)
    assert told.added == ()
    (info,) = told.resumed
    assert (info.slot, info.request_id, info.prompt_length) == (0, "a", 3)
    assert info.tokens == (1, 2, 3, 3, 4, 5, 6, 7)
    state = some.slots
    assert (state.length[0], state.computed[0], state.prompt_length[0]) == (8, 0, 3)
    assert state.history[0, :8].tolist() == [1, 2, 3, 3, 4, 5, 6, 7]
    # it draws its next token from there
    found = some.choose()
    assert (found.rows.tolist(), found.samples.tolist()) == ([8], [True])
    assert found.is_prefill.tolist() == [True]


def test_who_left_a_slot_is_told_before_who_was_given_it(queue: Queue) -> None:
    some = scheduler(slots=1, preempts_for_priority=True)
    queue(some, {"priority": 5}, low=3)
    some.admit()
    some.changes.take()
    queue(some, {"priority": 1}, high=3)
    some.admit()
    told = some.changes.take()
    assert told is not None
    assert told.preempted == (0,)
    assert [(r.slot, r.request_id) for r in told.added] == [(0, "high")]
    assert told.left == (0,)
    assert some.changes.take() is None  # once


def test_a_request_set_aside_is_not_back_before_there_is_a_page_for_everybody(
    queue: Queue,
) -> None:
    some = scheduler(blocks=4)
    a, b = queue(some, {"max_length": 16}, a=7, b=3)
    some.admit()
    prefilled(some, a, b)
    grown(some, a, 1)
    some.admit()
    grown(some, b, 1)
    some.admit()
    # 3 pages are a's; b would need 2 and one is free
    assert running(some) == {0: "a"}
    for _ in range(5):
        some.admit()
        assert running(some) == {0: "a"}
        grown(some, a, 1)
    some.retire(a)
    some.admit()
    assert running(some) == {0: "b"}
    assert some.num_preemptions == 1


def test_nobody_overtakes_a_request_that_waits_for_pages(queue: Queue) -> None:
    some = scheduler(blocks=5)
    a, *_ = queue(some, a=3, big=15, small=1)
    assert names(some.admit()) == ["a"]
    assert names(some.waiting) == ["big", "small"]
    some.retire(a)
    # alone it needs no margin, and then there is none for the next
    assert names(some.admit()) == ["big"]
    assert names(some.waiting) == ["small"]


def test_pages_come_back_and_a_waiting_request_leaves_the_queue(
    queue: Queue, new_sequence: New
) -> None:
    some = scheduler(slots=1)
    running_, waiting = queue(some, a=3, b=3)
    some.admit()
    free = some.pool.free
    some.retire(waiting)
    assert not some.waiting
    assert some.pool.free == free
    some.retire(new_sequence([1]))  # was never added: nothing to take back
    some.retire(running_)
    assert some.pool.free == some.num_blocks == 100
    assert (running_.slot, running_.blocks) == (-1, [])


def test_an_abort_works_wherever_the_request_is(queue: Queue) -> None:
    some = scheduler(slots=2)
    a, b, c = queue(some, a=3, b=3, c=3)
    some.admit()
    some.changes.take()
    some.preempt(b)
    for one in (b, c, a):
        some.retire(one)
    told = some.changes.take()
    # of b the speculator hears once, of c nothing
    assert told == RequestChanges(preempted=(1,), finished=(0,))
    assert not some.waiting
    assert not some.running
    assert some.pool.free == some.num_blocks
    queue(some, d=3, e=3)
    some.admit()
    assert running(some) == {0: "d", 1: "e"}


# -- priorities --------------------------------------------------------------


def test_a_lower_priority_goes_first_and_equals_go_by_arrival(queue: Queue) -> None:
    some = scheduler(slots=2, preempts_for_priority=True)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)):
        queue(some, {"priority": priority}, **{name: 3})
    assert names(some.waiting) == ["d", "b", "e", "a", "c"]
    assert names(some.admit()) == ["d", "b"]


def test_a_waiting_request_sets_aside_the_lowest_one_below_it(queue: Queue) -> None:
    some = scheduler(slots=2, preempts_for_priority=True)
    queue(some, {"priority": 1}, a=3)
    queue(some, {"priority": 2}, b=3)
    some.admit()
    queue(some, {"priority": 0}, urgent=3)
    assert names(some.admit()) == ["urgent"]
    assert running(some) == {0: "a", 1: "urgent"}
    assert names(some.waiting) == ["b"]
    assert some.num_preemptions == 1


def test_nobody_is_set_aside_for_one_of_the_same_priority_or_if_there_is_room(
    queue: Queue,
) -> None:
    some = scheduler(slots=2, preempts_for_priority=True)
    queue(some, {"priority": 1}, a=3)
    some.admit()
    queue(some, {"priority": 0}, b=3)
    some.admit()
    assert some.num_preemptions == 0
    queue(some, {"priority": 1}, c=3)
    some.admit()
    assert running(some) == {0: "a", 1: "b"}
    assert some.num_preemptions == 0


def test_requests_are_set_aside_until_there_are_pages_for_the_urgent_one(queue: Queue) -> None:
    some = scheduler(blocks=6, preempts_for_priority=True)
    queue(some, {"priority": 3}, a=3, b=3)
    some.admit()
    queue(some, {"priority": 1}, urgent=15)
    assert names(some.admit()) == ["urgent"]  # 4 pages, and one more for a
    assert running(some) == {0: "a", 1: "urgent"}
    queue(some, {"priority": 0}, more=20)
    some.admit()
    assert running(some) == {0: "more"}
    assert names(some.waiting) == ["urgent", "a", "b"]


def test_nobody_makes_way_for_one_that_still_would_not_fit(queue: Queue) -> None:
    some = scheduler(blocks=7, budget=32, preempts_for_priority=True)
    (high,) = queue(some, high=15)
    (low,) = queue(some, {"priority": 5}, low=3)
    some.admit()
    prefilled(some, high, low)
    (urgent,) = queue(some, {"priority": 1}, urgent=15)
    assert some.admit() == []
    assert low.slot >= 0
    assert names(some.waiting) == ["urgent"]
    assert urgent.slot == -1


def test_several_urgent_requests_displace_as_many_at_once(queue: Queue) -> None:
    some = scheduler(slots=2, preempts_for_priority=True)
    low = queue(some, {"priority": 5}, a=3, b=3)
    some.admit()
    prefilled(some, *low)
    queue(some, c=3, d=3)
    assert names(some.admit()) == ["c", "d"]
    assert names(some.waiting) == ["a", "b"]


def test_pages_that_only_drafts_had_are_taken_back_before_anybody_is_set_aside(
    queue: Queue,
) -> None:
    some = scheduler(slots=2, blocks=4, budget=32)
    first, second = queue(some, a=3, b=3)
    some.admit()
    prefilled(some, first, second, drafts=0)
    some.slots.num_drafts[first.slot] = 4
    some.admit()
    assert [len(s.blocks) for s in (first, second)] == [2, 1]
    some.slots.num_drafts[first.slot] = 0
    grown(some, second, 5)  # nine tokens: three pages
    assert some.admit() == []
    assert [len(s.blocks) for s in (first, second)] == [1, 3]
    assert some.num_preemptions == 0
    assert some.slots.block_tables[first.slot].tolist()[1:] == [0] * (LONGEST // BLOCK - 1)
    assert some.pool.free == 0


def test_without_the_policy_a_priority_only_orders_the_queue(queue: Queue) -> None:
    some = scheduler(slots=1)
    queue(some, {"priority": 1}, a=3)
    some.admit()
    queue(some, {"priority": 0}, b=3)
    assert some.admit() == []
    assert running(some) == {0: "a"}


# -- rows --------------------------------------------------------------------


def test_those_that_decode_come_first_with_a_row_for_every_draft(queue: Queue) -> None:
    some = scheduler()
    _, b, _ = queue(some, a=3, b=5, c=2)
    some.admit()
    prefilled(some, b, drafts=2)
    found = some.choose()
    assert found.slots.tolist() == [1, 0, 2]
    assert found.rows.tolist() == [3, 3, 2]
    assert found.is_prefill.tolist() == [False, True, True]
    assert found.samples.tolist() == [True, True, True]
    assert found.is_chunk.tolist() == [False, True, True]


def test_prompts_take_what_the_step_has_left_by_rank(queue: Queue) -> None:
    some = scheduler(budget=8)
    queue(some, {"priority": 1}, a=9)
    queue(some, {"priority": 0}, b=5)
    some.admit()
    found = some.choose()
    assert found.slots.tolist() == [0, 1]  # b has slot 0
    assert found.rows.tolist() == [5, 3]
    assert found.samples.tolist() == [True, False]
    some.slots.computed[:2] += [5, 3]
    some.slots.length[0] += 1
    found = some.choose()
    assert (found.slots.tolist(), found.rows.tolist()) == ([0, 1], [1, 6])
    assert found.samples.tolist() == [True, True]


def test_drafts_leave_half_the_budget_to_prompts_that_wait_for_it(queue: Queue) -> None:
    some = scheduler(slots=4, budget=12)
    a, b, *_ = queue(some, a=3, b=3, c=30)
    some.admit()
    prefilled(some, a, b, drafts=4)
    found = some.choose()
    # 6 rows are the prompt's; 2 tokens, and 2 drafts each
    assert found.rows.tolist() == [3, 3, 6]
    assert some.slots.num_drafts[:2].tolist() == [2, 2]


def test_drafts_give_way_to_no_more_than_the_prompts_need(queue: Queue) -> None:
    some = scheduler(slots=4, budget=12)
    a, b, *_ = queue(some, a=3, b=3, c=2)
    some.admit()
    prefilled(some, a, b, drafts=4)
    assert some.choose().rows.tolist() == [5, 5, 2]


def test_drafts_without_a_row_in_the_step_are_skipped_for_the_batch(queue: Queue) -> None:
    some = scheduler(slots=4, budget=4)
    a, b, *_ = queue(some, a=1, b=1, c=9)
    some.admit()
    prefilled(some, a, b, drafts=3)
    found = some.choose()
    assert found.rows.tolist() == [1, 1, 2]
    skipped = some.slots.skip[:2].tolist()
    assert [SKIP_REASONS[reason] for reason in skipped] == ["batch", "batch"]


def test_the_longest_drafts_are_cut_first(queue: Queue) -> None:
    some = scheduler(slots=3, budget=8)
    a, b, c = queue(some, a=1, b=1, c=1)
    some.admit()
    prefilled(some, a, b, c)
    some.slots.num_drafts[:3] = [4, 1, 2]
    some.choose()
    assert some.slots.num_drafts[:3].tolist() == [2, 1, 2]


def test_fixed_chunks_are_cut_at_multiples_of_half_the_budget(queue: Queue) -> None:
    some = scheduler(budget=16, fixed_chunks=True)
    queue(some, a=19, b=9)
    some.admit()
    seen = []
    for _ in range(3):
        found = some.choose()
        chunks = found.is_prefill
        seen.append([x[chunks].tolist() for x in (found.slots, found.rows, found.samples)])
        some.slots.computed[found.slots] += found.rows
        some.slots.length[found.slots[found.samples]] += 1
    assert seen == [
        [[0, 1], [8, 8], [False, False]],
        [[0, 1], [8, 1], [False, True]],
        [[0], [3], [True]],
    ]


def test_fixed_chunks_run_whole_or_not_at_all_and_do_not_overtake(queue: Queue) -> None:
    some = scheduler(slots=4, budget=8, fixed_chunks=True)
    queue(some, a=3, b=4, c=4, d=1)
    some.admit()
    # c does not fit beside a and b, and d does not overtake it
    assert some.choose().slots.tolist() == [0, 1]


def test_fixed_chunks_of_a_resumed_request_leave_out_what_it_emitted(queue: Queue) -> None:
    some = scheduler(budget=8, fixed_chunks=True)
    synced(some)
    (a,) = queue(some, {"max_length": 40}, a=6)
    some.admit()
    prefilled(some, a)
    grown(some, a, 5)
    some.preempt(a)
    some.admit()
    seen = []
    for _ in range(4):
        found = some.choose()
        seen.append([x.tolist() for x in (found.rows, found.is_chunk, found.samples)])
        some.slots.computed[0] += found.rows[0]
    # the chunks are those of the prompt alone; what it emitted comes as rows that decode
    assert seen == [
        [[4], [True], [False]],
        [[2], [True], [False]],
        [[4], [False], [False]],
        [[2], [False], [True]],
    ]


def test_nothing_running_is_an_empty_schedule() -> None:
    assert len(scheduler().choose().slots) == 0


# -- any mix -----------------------------------------------------------------


class Run:
    """A scheduler at work, with chance in place of a target: checks what has to hold every step."""

    def __init__(self, some: Scheduler, sequences: list[Sequence], k: int, seed: int) -> None:
        synced(some)
        self.some = some
        self.k = k
        self.chance = random.Random(seed)
        self.to_come = list(sequences)
        self.sequences = sequences
        self.told: dict[int, str] = {}  # what a speculator knows of: slot → request
        self.chunks: dict[str, list[list[tuple[int, int]]]] = {s.request_id: [] for s in sequences}
        self.done: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.to_come or self.some.waiting or self.some.running)

    def finish(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.busy:
                break
            self.step()
        assert not self.busy, "requests are stuck"
        assert self.some.pool.free == self.some.num_blocks
        assert self.some._free == sorted(self.some._free, reverse=True)
        assert len(self.some._free) == self.some.slots.max_num_seqs

    def abort(self, sequence: Sequence) -> None:
        self.to_come = [s for s in self.to_come if s is not sequence]
        self.some.retire(sequence)
        self.done.append(sequence.request_id)

    def step(self) -> Schedule:
        some, state = self.some, self.some.slots
        while self.to_come and (self.chance.random() < 0.5 or not (some.waiting or some.running)):
            sequence = self.to_come.pop(0)
            some.check(sequence.max_length, "it")
            some.add(sequence)
        wanted = state.num_drafts.copy()
        before = some.num_preemptions
        for sequence in some.admit():
            self.chunks[sequence.request_id].append([])
        self.check_changes()
        after_memory = state.num_drafts.copy()
        found = some.choose()
        self.check_rows(found, after_memory)
        self.check_pages(found)
        assert (state.num_drafts <= wanted).all(), "drafts are only ever cut"
        if before == some.num_preemptions:  # else what was cut may have lacked pages before
            cut = np.array([s for s in some.running if after_memory[s] < wanted[s]], dtype=np.int64)
            lacking = some._lacking(cut, wanted[cut])
            assert (lacking > some.pool.free).all(), "there were pages for the drafts"
        self.commit(found)
        return found

    def check_changes(self) -> None:
        told = self.some.changes.take()
        if told is not None:
            for slot in told.left:
                del self.told[slot]
            for info in told.arrived:
                assert info.slot not in self.told
                self.told[info.slot] = info.request_id
                sequence = self.some.running[info.slot]
                assert info.tokens == tuple(sequence.prompt + sequence.emitted)
                assert info.prompt_length == len(sequence.prompt)
                assert (info in told.resumed) == bool(sequence.num_preemptions)
        assert self.told == running(self.some)
        assert len(self.told) <= self.some.max_running

    def check_rows(self, found: Schedule, drafts: Any) -> None:
        some, state = self.some, self.some.slots
        slots, rows, prefill = found.slots, found.rows, found.is_prefill
        assert len(set(slots.tolist())) == len(slots)
        assert (rows > 0).all()
        assert rows.sum() <= some.budget
        decoding = slots[~prefill]
        assert (rows[~prefill] == 1 + state.num_drafts[decoding]).all()
        assert not found.is_chunk[~prefill].any()
        assert found.samples[~prefill].all()
        left = {
            slot: int(state.length[slot] - state.computed[slot])
            for slot in some.running
            if slot not in decoding.tolist()
        }
        assert set(slots[prefill].tolist()) <= set(left)
        if left:  # nobody who decodes keeps a prompt from going on
            pending = min(sum(left.values()), some.reserve, some.budget - len(decoding))
            computed = int(rows[prefill].sum())
            assert computed >= (1 if some.fixed_chunks else pending)
            assert some._by_rank(np.array(list(left)))[0] in slots[prefill]
        room = some.budget - len(decoding) - min(sum(left.values()), some.reserve)
        if drafts[decoding].sum() <= room:
            assert (state.num_drafts[decoding] == drafts[decoding]).all(), "there was room"
        if some.running:
            assert len(slots), "something always runs"
        for slot, count, is_chunk, samples in zip(
            slots[prefill], rows[prefill], found.is_chunk[prefill], found.samples[prefill],
            strict=True,
        ):  # fmt: skip
            assert samples == (count == left[slot])
            if is_chunk:
                start = int(state.computed[slot])
                self.chunks[some.running[slot].request_id][-1].append((start, int(count)))

    def check_pages(self, found: Schedule) -> None:
        some, state = self.some, self.some.slots
        held: list[int] = []
        for slot, sequence in some.running.items():
            assert sequence.slot == slot
            count = len(sequence.blocks)
            assert state.num_blocks[slot] == count
            assert state.block_tables[slot, :count].tolist() == sequence.blocks
            held += sequence.blocks
        assert len(set(held)) == len(held)
        assert 0 not in held
        assert len(held) + some.pool.free == some.num_blocks
        for slot, rows, is_prefill in zip(found.slots, found.rows, found.is_prefill, strict=True):
            end = state.computed[slot] + rows + (0 if is_prefill else some.lookahead)
            assert end <= state.num_blocks[slot] * BLOCK, "a row has no place in the cache"

    def commit(self, found: Schedule) -> None:
        some, state = self.some, self.some.slots
        for slot, rows, is_prefill, samples in zip(
            found.slots.tolist(), found.rows, found.is_prefill, found.samples, strict=True
        ):
            sequence = some.running[slot]
            length, room = int(state.length[slot]), int(state.max_length[slot] - state.length[slot])
            kept = int(samples) if is_prefill else 1 + self.chance.randrange(int(rows))
            kept = min(kept, room)
            state.history[slot, length : length + kept] = range(length, length + kept)
            state.length[slot] += kept
            state.computed[slot] += rows if is_prefill else kept
            if state.length[slot] == sequence.max_length:
                some.retire(sequence)
                self.done.append(sequence.request_id)
                # tokens are numbered by their place: none was lost or made twice
                assert sequence.known[len(sequence.prompt) :] == list(
                    range(len(sequence.prompt), sequence.max_length)
                )
            elif samples:
                most = min(self.k, sequence.max_length - int(state.length[slot]) - 1)
                state.num_drafts[slot] = self.chance.randint(0, max(most, 0))


mixes = st.fixed_dictionaries(
    {
        "lengths": st.lists(
            st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2)),
            min_size=1,
            max_size=7,
        ),
        "blocks": st.integers(1, 20),
        "slots": st.integers(1, 5),
        "budget": st.integers(1, 20),
        "k": st.sampled_from([0, 2, 7]),
        "lookahead": st.sampled_from([0, 3]),
        "fixed": st.booleans(),
        "by_priority": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


def mixed(new: New, mix: dict[str, Any]) -> Run:
    """A run of requests that could each be served alone."""
    some = scheduler(
        mix["slots"], mix["blocks"], mix["budget"], mix["lookahead"], max(mix["k"], 1),
        fixed_chunks=mix["fixed"], preempts_for_priority=mix["by_priority"],
    )  # fmt: skip
    most = mix["blocks"] * BLOCK - mix["lookahead"]
    sequences = [
        new(
            range(min(prompt, most - 1)),
            request_id=str(number),
            max_length=min(min(prompt, most - 1) + more, most, LONGEST),
            priority=priority if mix["by_priority"] else 0,
            arrival=number,
        )
        for number, (prompt, more, priority) in enumerate(mix["lengths"])
        if most > 1
    ]
    return Run(some, sequences, mix["k"], mix["seed"])


@settings(max_examples=150, deadline=None)
@given(mix=mixes)
def test_any_mix_of_requests_keeps_to_the_budget_ends_and_leaks_nothing(
    new_sequence: New, mix: dict[str, Any]
) -> None:
    run = mixed(new_sequence, mix)
    run.finish(most_steps=20_000)
    assert sorted(run.done) == sorted(s.request_id for s in run.sequences)


@settings(max_examples=60, deadline=None)
@given(mix=mixes)
def test_fixed_chunks_are_the_same_in_any_company_with_drafts_and_after_preemption(
    new_sequence: New, mix: dict[str, Any]
) -> None:
    run = mixed(new_sequence, {**mix, "fixed": True})
    run.finish(most_steps=20_000)
    for sequence in run.sequences:
        size, prompt = run.some.reserve, len(sequence.prompt)
        alone = [(start, min(size, prompt - start)) for start in range(0, prompt, size)]
        *before, last = run.chunks[sequence.request_id]
        assert last == alone
        for broken_off in before:
            assert broken_off == alone[: len(broken_off)]


@settings(max_examples=60, deadline=None)
@given(mix=mixes, data=st.data())
def test_requests_may_be_aborted_at_any_time(
    new_sequence: New, mix: dict[str, Any], data: st.DataObject
) -> None:
    run = mixed(new_sequence, mix)
    for _ in range(data.draw(st.integers(0, 30), label="steps")):
        run.step()
    left = [s for s in run.sequences if s.request_id not in run.done]
    if left:
        for sequence in data.draw(st.lists(st.sampled_from(left), unique_by=id), label="aborted"):
            run.abort(sequence)
    run.finish(most_steps=20_000)


def test_the_random_mixes_do_run_out_of_pages(new_sequence: New) -> None:
    base = {
        "lengths": [(9, 20, n % 3) for n in range(6)], "blocks": 14, "slots": 4, "budget": 12,
        "k": 2, "lookahead": 3, "seed": 0,
    }  # fmt: skip
    for fixed, by_priority in itertools.product((False, True), repeat=2):
        run = mixed(new_sequence, {**base, "fixed": fixed, "by_priority": by_priority})
        run.finish(most_steps=2000)
        assert run.some.num_preemptions > 0


def test_a_request_whose_length_was_checked_goes_on_alone_to_its_end(new_sequence: New) -> None:
    some = scheduler(blocks=5, budget=3, lookahead=3, k=7)
    one = new_sequence(range(6), max_length=5 * BLOCK - 3)
    Run(some, [one], k=7, seed=0).finish(most_steps=40)
    assert one.num_preemptions == 0
