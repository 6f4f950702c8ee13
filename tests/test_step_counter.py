"""Counting by slot agrees with counting requests one by one, whatever the steps hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.metrics import SpeculationMetrics
from specdec.step_counter import StepCounter
from specdec.types import SKIP_REASONS, StepReport

K, SLOTS = 3, 4


class Row(NamedTuple):
    """A request's part of a step. emitted None: what its drafts allow."""

    slot: int
    drafted: int = 0
    accepted: int = 0
    decode: bool = True
    reason: str | None = None  # why nothing was drafted
    emitted: int | None = None
    kept: int | None = None

    @property
    def out(self) -> int:
        return self.accepted + 1 if self.emitted is None else self.emitted


def report(*rows: Row) -> StepReport:
    """A step of those requests, with nothing else going on."""

    def ints(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    return StepReport(
        slots=ints([r.slot for r in rows]),
        is_decode=np.array([r.decode for r in rows], dtype=bool),
        drafted=ints([r.drafted for r in rows]),
        accepted=ints([r.accepted for r in rows]),
        emitted=ints([r.out for r in rows]),
        kept=ints([r.out if r.kept is None else r.kept for r in rows]),
        skipped=ints([-1 if r.reason is None else SKIP_REASONS.index(r.reason) for r in rows]),
        changes=None,
        ended=(),
        num_running=len(rows),
        num_waiting=0,
        num_preempted=0,
        free_blocks=1,
        num_blocks=1,
        prompt_tokens=0,
        seconds=0.0,
    )


def counter(*steps: tuple[Row, ...], detailed: bool = False) -> StepCounter:
    counting = StepCounter(SLOTS, K, detailed=detailed)
    for rows in steps:
        counting.step_finished(report(*rows))
    return counting


def of(slot: int, steps: list[tuple[Row, ...]], *, detailed: bool) -> SpeculationMetrics:
    """The numbers of a slot, counted one request and one draft at a time."""
    metrics = SpeculationMetrics(drafted_per_pos=[0] * K, accepted_per_pos=[0] * K)
    single: tuple[list[int], list[int]] = ([], [])
    for row in (r for rows in steps for r in rows if r.slot == slot and r.decode and r.out):
        if row.reason is not None:
            metrics.num_plain_steps += 1
            metrics.skipped[row.reason] = metrics.skipped.get(row.reason, 0) + 1
            continue
        metrics.num_drafts += 1
        metrics.num_draft_tokens += row.drafted
        metrics.num_accepted_tokens += row.accepted
        for i in range(row.drafted):
            metrics.drafted_per_pos[i] += 1
            metrics.accepted_per_pos[i] += i < row.accepted
        single[0].append(row.drafted)
        single[1].append(row.accepted)
    if detailed:
        metrics.per_step_drafted, metrics.per_step_accepted = single
    return metrics


def a_row(slot: int) -> st.SearchStrategy[Row]:
    prompt = st.sampled_from([Row(slot, decode=False, emitted=n) for n in (0, 1)])
    plain = st.sampled_from([Row(slot, reason=reason) for reason in SKIP_REASONS])
    failed = st.just(Row(slot, drafted=K, emitted=0))
    verified = st.sampled_from([Row(slot, d, a) for d in range(1, K + 1) for a in range(d + 1)])
    return st.one_of(verified, plain, prompt, failed)


a_step = st.lists(st.sampled_from(range(SLOTS)), unique=True).flatmap(
    lambda slots: st.tuples(*map(a_row, slots))
)
some_steps = st.lists(a_step, max_size=8)


def same(found: SpeculationMetrics, expected: SpeculationMetrics) -> bool:
    return attrs.asdict(found) == attrs.asdict(expected)


# --- what is counted ------------------------------------------------------


@given(some_steps, st.booleans())
def test_every_slot_has_the_numbers_of_its_own_steps(
    steps: list[tuple[Row, ...]], detailed: bool
) -> None:
    counting = counter(*steps, detailed=detailed)
    for slot in range(SLOTS):
        numbers = counting.take(slot)
        numbers.check(
            emitted=sum(r.out for rows in steps for r in rows if r.slot == slot and r.decode)
        )
        assert same(numbers, of(slot, steps, detailed=detailed))


@given(some_steps, st.lists(st.integers(0, SLOTS - 1), max_size=6))
def test_totals_are_all_that_was_counted_whoever_has_left(
    steps: list[tuple[Row, ...]], leave: list[int]
) -> None:
    counting = counter(*steps, detailed=True)
    expected = SpeculationMetrics()
    for slot in range(SLOTS):
        expected.add(of(slot, steps, detailed=False))
    for slot in leave:
        counting.take(slot)
    counting.totals.check()
    assert same(counting.totals, expected)


def test_drafts_are_counted_before_a_stop_cuts_them() -> None:
    counting = counter((Row(0, drafted=3, accepted=3, kept=1),))
    assert counting.take(0).num_accepted_tokens == 3


@pytest.mark.parametrize(
    "row",
    [
        Row(0, decode=False, emitted=0),
        Row(0, decode=False, emitted=1),
        Row(0, drafted=2, emitted=0),
    ],
    ids=["chunk", "last chunk", "failed"],
)
def test_no_step_is_counted_for(row: Row) -> None:
    assert counter((row,)).totals.num_emitted_tokens == 0


def test_plain_steps_without_a_reason_are_counted_and_not_said_to_be_skipped() -> None:
    counting = StepCounter(SLOTS, 0)
    counting.step_finished(report(Row(0), Row(1)))
    assert counting.totals.num_plain_steps == 2
    assert counting.totals.skipped == {}
    assert counting.totals.accepted_histogram == [0]


def test_every_reason_is_counted_by_its_name() -> None:
    counting = counter(*((Row(2, reason=reason),) for reason in SKIP_REASONS))
    assert counting.take(2).skipped == dict.fromkeys(SKIP_REASONS, 1)


# --- slots ----------------------------------------------------------------


def test_a_taken_slot_starts_anew() -> None:
    counting = counter((Row(1, 3, 2), Row(0, 3, 1)), (Row(1, reason="budget"),), detailed=True)
    assert counting.take(1).num_drafts == 1
    assert same(counting.take(1), of(1, [], detailed=True))
    counting.step_finished(report(Row(1, 2, 2)))
    assert same(counting.take(1), of(1, [(Row(1, 2, 2),)], detailed=True))
    assert counting.take(0).num_accepted_tokens == 1


def test_parts_of_a_preempted_request_add_up_to_the_whole() -> None:
    counting = counter((Row(3, 2, 1),), detailed=True)
    whole = counting.take(3)
    counting.step_finished(report(Row(0, 3, 3), Row(3, 1, 0)))
    whole.add(counting.take(0))
    assert (whole.per_step_drafted, whole.per_step_accepted) == ([2, 3], [1, 3])
    whole.check(emitted=6)


def test_what_was_taken_does_not_change_with_later_steps() -> None:
    counting = counter((Row(0, 3, 2),), detailed=True)
    taken, totals = counting.take(0), counting.totals
    counting.step_finished(report(Row(0, 3, 3)))
    assert taken.per_step_accepted == [2]
    assert taken.accepted_per_pos == totals.accepted_per_pos == [1, 1, 0]


# --- single steps ---------------------------------------------------------


def test_single_steps_of_long_requests_are_all_kept() -> None:
    steps = [(Row(1, 1 + i % K, i % 2), Row(2, reason="policy")) for i in range(300)]
    counting = counter(*steps, detailed=True)
    assert counting.take(1).per_step_drafted == [1 + i % K for i in range(300)]
    assert counting.take(2).per_step_drafted == []


def test_single_steps_are_not_kept_unless_asked_for() -> None:
    assert counter((Row(0, 3, 2),)).take(0).per_step_drafted is None
