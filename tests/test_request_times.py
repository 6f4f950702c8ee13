"""Times of requests, told from reports alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from specdec.request_times import EndedTimes, RequestTimes
from specdec.types import EndedRequest, RequestChanges, RequestInfo, StepReport


def info(slot: int, name: str) -> RequestInfo:
    return RequestInfo(slot=slot, request_id=name, tokens=(1,), prompt_length=1)


def report(
    kept: dict[int, int],
    *,
    ended: Iterable[tuple[int, str]] = (),
    seconds: float = 1.0,
    **changes: Any,
) -> StepReport:
    """A step in which slots were given so many tokens."""
    slots = np.array(list(kept), dtype=np.int64)
    tokens = np.array(list(kept.values()), dtype=np.int64)
    none = np.zeros_like(slots)
    return StepReport(
        slots=slots,
        is_decode=tokens > 0,
        drafted=none,
        accepted=none,
        emitted=tokens,
        kept=tokens,
        skipped=none - 1,
        changes=RequestChanges(**changes) if changes else None,
        ended=tuple(
            EndedRequest(slot=slot, request_id=name, finish_reason="stop") for slot, name in ended
        ),
        num_running=0,
        num_waiting=0,
        num_preempted=0,
        free_blocks=1,
        num_blocks=1,
        prompt_tokens=0,
        seconds=seconds,
    )


def test_a_request_is_timed_from_the_start_of_its_first_step() -> None:
    times = RequestTimes()
    assert times.observe(report({0: 0}, added=(info(0, "a"),), seconds=2), 12.0)[1] == []
    times.observe(report({0: 1}), 13.0)
    times.observe(report({0: 3}), 15.0)
    _, ended = times.observe(report({0: 2}, ended=[(0, "a")]), 18.0)
    assert ended == [EndedTimes(prefill=3.0, decode=5.0, inference=8.0, per_token=1.0)]


def test_gaps_are_those_between_steps_that_gave_tokens() -> None:
    times = RequestTimes()
    gaps, _ = times.observe(report({0: 1, 1: 0}, added=(info(0, "a"), info(1, "b"))), 1.0)
    assert gaps.tolist() == []
    gaps, _ = times.observe(report({1: 1, 0: 4}), 3.0)
    assert gaps.tolist() == [2.0]
    gaps, _ = times.observe(report({0: 0, 1: 2}), 4.0)
    assert gaps.tolist() == [1.0]
    gaps, _ = times.observe(report({0: 1, 1: 1}), 7.0)
    assert gaps.tolist() == [4.0, 3.0]


def test_one_token_has_no_time_per_token_and_none_has_no_times() -> None:
    times = RequestTimes()
    arrived = (info(0, "a"), info(1, "b"))
    _, ended = times.observe(report({0: 1, 1: 0}, added=arrived, ended=[(0, "a"), (1, "b")]), 2.0)
    (one,) = ended
    assert one[:3] == (1.0, 0.0, 1.0)
    assert math.isnan(one.per_token)


def test_a_slot_given_to_another_request_starts_anew() -> None:
    times = RequestTimes()
    times.observe(report({5: 2}, added=(info(5, "a"),), ended=[(5, "a")]), 1.0)
    gaps, _ = times.observe(report({5: 1}, finished=(5,), added=(info(5, "b"),)), 9.0)
    assert gaps.tolist() == []
    _, ended = times.observe(report({5: 1}, ended=[(5, "b")]), 10.0)
    assert [t.inference for t in ended] == [2.0]


@pytest.mark.parametrize("other", [3, 40])
def test_a_preempted_request_keeps_its_times_in_another_slot(other: int) -> None:
    times = RequestTimes()
    times.observe(report({3: 1}, added=(info(3, "a"),)), 1.0)
    times.observe(report({3: 1}, preempted=(3,), added=(info(3, "b"),)), 2.0)
    times.observe(report({3: 1}, ended=[(3, "b")]), 3.0)
    gaps, _ = times.observe(report({other: 1}, finished=(3,), resumed=(info(other, "a"),)), 6.0)
    assert gaps.tolist() == [5.0]
    _, ended = times.observe(report({other: 1}, ended=[(other, "a")]), 7.0)
    assert ended == [EndedTimes(prefill=1.0, decode=6.0, inference=7.0, per_token=3.0)]


def test_a_request_that_ends_while_set_aside_has_the_times_of_its_tokens() -> None:
    times = RequestTimes()
    times.observe(report({0: 2}, added=(info(0, "a"),)), 1.0)
    times.observe(report({0: 2}), 2.0)
    _, ended = times.observe(report({}, preempted=(0,), ended=[(-1, "a")]), 9.0)
    assert [t.inference for t in ended] == [2.0]


def test_a_request_that_never_had_a_slot_has_no_times() -> None:
    times = RequestTimes()
    times.observe(report({0: 1}, added=(info(0, "a"),)), 1.0)
    assert times.observe(report({0: 1}, ended=[(-1, "b")]), 2.0)[1] == []


def test_an_abort_between_steps_is_not_taken_for_the_request_that_came_after() -> None:
    times = RequestTimes()
    times.observe(report({0: 1}, added=(info(0, "a"),)), 1.0)
    changes: dict[str, Any] = {"finished": (0,), "added": (info(0, "b"),)}
    _, ended = times.observe(report({0: 1}, ended=[(0, "a")], **changes), 5.0)
    assert [t.inference for t in ended] == [1.0]  # to its last token, which came before
    _, ended = times.observe(report({0: 1}, ended=[(0, "b")]), 6.0)
    assert [t.inference for t in ended] == [2.0]
