"""What a verdict does to the slot arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec.runner.batch import Batch, build
from specdec.runner.commit import commit
from specdec.runner.scheduler import Schedule
from specdec.runner.state import Slots
from specdec.types import Verdict

CPU = torch.device("cpu")
K = 3


def slots_with(*requests: dict[str, Any]) -> Slots:
    slots = Slots(4, 32, 4, K, CPU)
    for slot, request in enumerate(requests):
        length = request.get("length", 5)
        slots.place(
            slot,
            list(range(100, 100 + length)),
            prompt_length=request.get("prompt", length),
            max_length=request.get("max_length", 20),
            stream=slot,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            stop_ids=request.get("stops", ()),
            blocks=(),
        )
        slots.computed[slot] = request.get("computed", length - 1)
        drafts = request.get("drafts", [])
        slots.drafts[slot, : len(drafts)] = drafts
        slots.num_drafts[slot] = len(drafts)
    return slots


def decoding(slots: Slots, *which: int) -> Batch:
    index = np.array(which)
    ones = np.ones(len(which), dtype=bool)
    schedule = Schedule(index, 1 + slots.num_drafts[index], ~ones, ones)
    return build(schedule, slots, pad_rows=1, device=CPU)


def verdict(*tokens: list[int], batch: int = 0) -> Verdict:
    rows = [[*t, *[-1] * (K + 1 - len(t))] for t in tokens]
    rows += [[-1] * (K + 1)] * (batch - len(rows))
    count = [len(t) for t in tokens] + [0] * (batch - len(tokens))
    found = torch.tensor(rows)
    return Verdict(found, torch.tensor(count), torch.where(found >= 0, 0, -1))


def test_accepted_drafts_and_the_targets_token_are_appended() -> None:
    slots = slots_with({"drafts": [7, 8, 9]}, {"length": 3, "drafts": [4]})
    done = commit(decoding(slots, 0, 1), verdict([7, 8, 1], [2]), slots)
    assert slots.history[0, 5:8].tolist() == [7, 8, 1]
    assert slots.history[1, 3:4].tolist() == [2]
    assert slots.length[:2].tolist() == [8, 4]
    # one row less than tokens is cached for good: the last token was not processed yet
    assert slots.computed[:2].tolist() == [7, 3]
    assert done.valid_rows.tolist() == [3, 1]
    assert done.next_token.tolist() == [1, 2]
    assert (done.drafted.tolist(), done.accepted.tolist()) == ([3, 1], [2, 0])
    assert not done.stopped.any()
    assert not done.full.any()


def test_tokens_after_a_stop_are_dropped_and_acceptance_is_counted_before() -> None:
    slots = slots_with({"drafts": [7, 8, 9], "stops": (8, 2)})
    done = commit(decoding(slots, 0), verdict([7, 8, 9, 1]), slots)
    assert done.kept.tolist() == [2]
    assert slots.length[0] == 7
    assert done.stopped.tolist() == [True]
    assert done.full.tolist() == [False]
    assert done.accepted.tolist() == [3]
    assert done.next_token.tolist() == [8]
    assert done.valid_rows.tolist() == [2]  # the third draft was accepted, but is not kept
    assert slots.accepted[0].tolist() == [1, 1, 1]


def test_tokens_past_the_limit_are_dropped() -> None:
    slots = slots_with({"drafts": [7, 8, 9], "max_length": 7, "stops": (9,)})
    done = commit(decoding(slots, 0), verdict([7, 8, 9, 1]), slots)
    assert (done.kept.tolist(), done.full.tolist()) == ([2], [True])
    assert done.stopped.tolist() == [False]  # its stop token lies past the limit


def test_a_stop_token_as_the_last_allowed_is_a_stop() -> None:
    slots = slots_with({"drafts": [7], "max_length": 7, "stops": (9,)})
    done = commit(decoding(slots, 0), verdict([7, 9]), slots)
    assert (done.stopped.tolist(), done.full.tolist()) == ([True], [False])


def test_the_filler_of_unused_stop_ids_stops_nobody() -> None:
    slots = slots_with({"stops": (3,)}, {"stops": (1, 2, 3)})
    done = commit(decoding(slots, 0, 1), verdict([7], [2]), slots)
    assert done.stopped.tolist() == [False, True]


def test_a_chunk_moves_on_in_the_prompt_and_draws_nothing() -> None:
    slots = slots_with({"length": 9, "computed": 2})
    no = np.zeros(1, dtype=bool)
    batch = build(Schedule(np.array([0]), np.array([4]), ~no, no), slots, pad_rows=1, device=CPU)
    done = commit(batch, verdict([]), slots)
    assert (slots.length[0], slots.computed[0]) == (9, 6)
    assert done.valid_rows.tolist() == [4]
    assert done.next_token.tolist() == [106]  # of the prompt
    assert not slots.plain_steps[0].any()


def test_the_last_chunk_draws_the_first_token() -> None:
    slots = slots_with({"length": 9, "computed": 6})
    yes = np.ones(1, dtype=bool)
    batch = build(Schedule(np.array([0]), np.array([3]), yes, yes), slots, pad_rows=1, device=CPU)
    done = commit(batch, verdict([42]), slots)
    assert (slots.length[0], slots.computed[0]) == (10, 9)
    assert (done.valid_rows.tolist(), done.next_token.tolist()) == ([3], [42])
    # a prefill is no step of decoding
    assert not slots.plain_steps[0].any()
    assert slots.spec_steps[0] == 0


def test_a_request_without_an_answer_stays_as_it_was() -> None:
    slots = slots_with({"drafts": [7]}, {"drafts": [8]})
    done = commit(decoding(slots, 0, 1), verdict([], [8, 1]), slots)
    assert slots.length[:2].tolist() == [5, 7]
    assert slots.computed[0] == 4
    assert (done.drafted.tolist(), done.accepted.tolist()) == ([0, 1], [0, 1])
    assert slots.spec_steps[:2].tolist() == [0, 1]


def test_steps_without_drafts_are_counted_by_their_reason() -> None:
    slots = slots_with({}, {"drafts": [8]})
    slots.skip[0] = 2
    for _ in range(2):
        commit(decoding(slots, 0), verdict([1]), slots)
    commit(decoding(slots, 1), verdict([8, 1]), slots)
    assert slots.plain_steps[0].tolist() == [0, 0, 2, 0]
    assert slots.plain_steps[1].sum() == 0
    assert slots.drafted[1].tolist() == [1, 0, 0]


def test_padding_is_not_committed() -> None:
    slots = slots_with({}, {}, {})
    batch = decoding(slots, 0, 1, 2)
    done = commit(batch, verdict([1], [2], [3], batch=batch.step.batch), slots)
    assert batch.step.batch == 4
    assert len(done.kept) == 3
    assert slots.length.tolist() == [6, 6, 6, 0, 0]
