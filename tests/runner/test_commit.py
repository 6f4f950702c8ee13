"""What a verdict does to the slot arrays: where it is cut, and what is appended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.runner.batch import Batch, build
from specdec.runner.commit import Block, Commit, commit, cut
from specdec.runner.scheduler import Schedule
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.types import Verdict

CPU = torch.device("cpu")
K = 3

With = Callable[..., Slots]


@pytest.fixture
def slots_with(new_sequence: Callable[..., Sequence]) -> With:
    """Makes slots of requests that have all but their last token computed."""

    def make(*requests: dict[str, Any]) -> Slots:
        slots = Slots(4, 32, 4, K, CPU)
        for slot, request in enumerate(requests):
            length = request.get("length", 5)
            known = list(range(100, 100 + length))
            prompt = request.get("prompt", length)
            one = new_sequence(
                known[:prompt],
                emitted=known[prompt:],
                max_length=request.get("max_length", 20),
                stream=slot,
                stop_ids=request.get("stops", ()),
            )
            slots.place(slot, one)
            slots.computed[slot] = request.get("computed", length - 1)
            drafts = request.get("drafts", [])
            slots.drafts[slot, : len(drafts)] = drafts
            slots.num_drafts[slot] = len(drafts)
        return slots

    return make


def decoding(slots: Slots, *which: int) -> Batch:
    index = np.array(which)
    ones = np.ones(len(which), dtype=bool)
    schedule = Schedule(index, 1 + slots.num_drafts[index], ~ones, ones, ~ones)
    return build(schedule, slots, device=CPU)


def chunk(slots: Slots, rows: int, *, samples: bool, is_chunk: bool = True) -> Batch:
    """A step of slot 0 in its prompt, or in what it emitted before it was set aside."""
    one = np.ones(1, dtype=bool)
    schedule = Schedule(np.array([0]), np.array([rows]), one, one & samples, one & is_chunk)
    return build(schedule, slots, device=CPU)


def committed(batch: Batch, found: Verdict, slots: Slots) -> tuple[Block, Commit]:
    block = cut(batch, found, slots)
    return block, commit(block, slots)


def verdict(*tokens: list[int], batch: int = 0) -> Verdict:
    rows = [[*t, *[-1] * (K + 1 - len(t))] for t in tokens]
    rows += [[-1] * (K + 1)] * (batch - len(rows))
    count = [len(t) for t in tokens] + [0] * (batch - len(tokens))
    found = torch.tensor(rows)
    return Verdict(found, torch.tensor(count), torch.where(found >= 0, 0, -1))


def test_accepted_drafts_and_the_targets_token_are_appended(slots_with: With) -> None:
    slots = slots_with({"drafts": [7, 8, 9]}, {"length": 3, "drafts": [4]})
    block, done = committed(decoding(slots, 0, 1), verdict([7, 8, 1], [2]), slots)
    assert slots.history[0, 5:8].tolist() == [7, 8, 1]
    assert slots.history[1, 3:4].tolist() == [2]
    assert slots.length[:2].tolist() == [8, 4]
    # one row less than tokens is cached for good: the last token was not processed yet
    assert slots.computed[:2].tolist() == [7, 3]
    assert done.valid_rows.tolist() == [3, 1]
    assert done.next_token.tolist() == [1, 2]
    assert (block.drafted.tolist(), block.accepted.tolist()) == ([3, 1], [2, 0])
    assert block.is_decode.tolist() == [True, True]
    assert not block.stopped.any()
    assert not block.full.any()


def test_nothing_is_appended_before_the_commit(slots_with: With) -> None:
    slots = slots_with({"drafts": [7, 8, 9]})
    block = cut(decoding(slots, 0), verdict([7, 8, 1]), slots)
    assert block.kept.tolist() == [3]
    assert (slots.length[0], slots.computed[0]) == (5, 4)
    assert slots.history[0, 5:].tolist() == [0] * 27


def test_tokens_after_a_stop_are_dropped_and_acceptance_is_counted_before(
    slots_with: With,
) -> None:
    slots = slots_with({"drafts": [7, 8, 9], "stops": (8, 2)})
    block, done = committed(decoding(slots, 0), verdict([7, 8, 9, 1]), slots)
    assert block.kept.tolist() == [2]
    assert block.count.tolist() == [4]
    assert slots.length[0] == 7
    assert block.stopped.tolist() == [True]
    assert block.full.tolist() == [False]
    assert (block.drafted.tolist(), block.accepted.tolist()) == ([3], [3])
    assert done.next_token.tolist() == [8]
    assert done.valid_rows.tolist() == [2]  # the third draft was accepted, but is not kept


def test_tokens_past_the_limit_are_dropped(slots_with: With) -> None:
    slots = slots_with({"drafts": [7, 8, 9], "max_length": 7, "stops": (9,)})
    block, _ = committed(decoding(slots, 0), verdict([7, 8, 9, 1]), slots)
    assert (block.kept.tolist(), block.full.tolist()) == ([2], [True])
    assert block.stopped.tolist() == [False]  # its stop token lies past the limit
    assert slots.length[0] == 7


def test_a_stop_token_as_the_last_allowed_is_a_stop(slots_with: With) -> None:
    slots = slots_with({"drafts": [7], "max_length": 7, "stops": (9,)})
    block, _ = committed(decoding(slots, 0), verdict([7, 9]), slots)
    assert (block.stopped.tolist(), block.full.tolist()) == ([True], [False])


def test_the_filler_of_unused_stop_ids_stops_nobody(slots_with: With) -> None:
    slots = slots_with({"stops": (3,)}, {"stops": (1, 2, 3)})
    block, _ = committed(decoding(slots, 0, 1), verdict([7], [2]), slots)
    assert block.stopped.tolist() == [False, True]


@pytest.mark.parametrize(
    "ends", [{"stops": (9,)}, {"max_length": 8}], ids=["at a stop token", "at the limit"]
)
def test_an_earlier_end_found_by_somebody_else_counts_instead(
    slots_with: With, ends: dict[str, Any]
) -> None:
    slots = slots_with({"drafts": [7, 8, 9], **ends}, {"drafts": [4]})
    block = cut(decoding(slots, 0, 1), verdict([7, 8, 9, 1], [4, 2]), slots)
    assert (block.stopped | block.full).tolist() == [True, False]
    block.end(0, 2)
    done = commit(block, slots)
    assert (block.stopped | block.full).tolist() == [False, False]
    assert slots.history[0, 5:8].tolist() == [7, 8, 0]
    assert (slots.length[:2].tolist(), slots.computed[:2].tolist()) == ([7, 7], [6, 6])
    assert done.next_token.tolist() == [8, 2]
    assert done.valid_rows.tolist() == [2, 2]
    assert block.accepted.tolist() == [3, 1]  # what was accepted is counted before any cut


def test_a_request_of_which_nothing_stands_stays_as_it_was(slots_with: With) -> None:
    slots = slots_with({"drafts": [7, 8]})
    block = cut(decoding(slots, 0), verdict([7, 8, 9]), slots)
    block.end(0, 0)
    done = commit(block, slots)
    assert (slots.length[0], slots.computed[0]) == (5, 4)
    assert (done.valid_rows.tolist(), done.next_token.tolist()) == ([0], [104])


def test_a_chunk_moves_on_in_the_prompt_and_draws_nothing(slots_with: With) -> None:
    slots = slots_with({"length": 9, "computed": 2})
    block, done = committed(chunk(slots, 4, samples=False), verdict([]), slots)
    assert (slots.length[0], slots.computed[0]) == (9, 6)
    assert done.valid_rows.tolist() == [4]
    assert done.next_token.tolist() == [106]  # of the prompt
    assert block.is_decode.tolist() == [False]


def test_the_last_chunk_draws_the_first_token(slots_with: With) -> None:
    slots = slots_with({"length": 9, "computed": 6})
    block, done = committed(chunk(slots, 3, samples=True), verdict([42]), slots)
    assert (slots.length[0], slots.computed[0]) == (10, 9)
    assert (done.valid_rows.tolist(), done.next_token.tolist()) == ([3], [42])
    # a prefill is no step of decoding
    assert block.is_decode.tolist() == [False]
    assert (block.drafted.tolist(), block.accepted.tolist()) == ([0], [0])


@pytest.mark.parametrize("is_chunk", [True, False])
def test_what_was_emitted_before_is_computed_again_like_a_prompt(
    slots_with: With, is_chunk: bool
) -> None:
    slots = slots_with({"length": 9, "prompt": 4, "computed": 4})
    first = chunk(slots, 3, samples=False, is_chunk=is_chunk)
    block, done = committed(first, verdict([]), slots)
    assert (slots.length[0], slots.computed[0]) == (9, 7)
    assert done.next_token.tolist() == [107]  # what it had emitted, not what is drawn
    last = chunk(slots, 2, samples=True, is_chunk=is_chunk)
    block, done = committed(last, verdict([42]), slots)
    assert (slots.length[0], slots.computed[0]) == (10, 9)
    assert done.next_token.tolist() == [42]
    assert block.is_decode.tolist() == [False]


def test_a_request_without_an_answer_stays_as_it_was(slots_with: With) -> None:
    slots = slots_with({"drafts": [7]}, {"drafts": [8]})
    block, _ = committed(decoding(slots, 0, 1), verdict([], [8, 1]), slots)
    assert slots.length[:2].tolist() == [5, 7]
    assert slots.computed[0] == 4
    assert (block.drafted.tolist(), block.accepted.tolist()) == ([0, 1], [0, 1])
    assert block.is_decode.tolist() == [False, True]


def test_padding_is_not_committed(slots_with: With) -> None:
    slots = slots_with({}, {}, {})
    batch = decoding(slots, 0, 1, 2)
    block, _ = committed(batch, verdict([1], [2], [3], batch=batch.step.batch), slots)
    assert batch.step.batch == 4
    assert len(block.kept) == 3
    assert slots.length.tolist() == [6, 6, 6, 0, 0]
