"""The numbers of speculation, their ratios, and what has to hold between them."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.metrics import SpeculationMetrics

K = 4
Steps = list[tuple[int, int]]  # drafted and accepted of each decode step; no drafts: a plain one

steps_of_a_request = st.lists(
    st.integers(0, K).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30
)


def counted(steps: Steps, *, detailed: bool = False, reason: str = "policy") -> SpeculationMetrics:
    """The numbers of steps, counted one by one."""
    metrics = SpeculationMetrics(drafted_per_pos=[0] * K, accepted_per_pos=[0] * K)
    if detailed:
        metrics.per_step_drafted, metrics.per_step_accepted = [], []
    for drafted, accepted in steps:
        if not drafted:
            metrics.num_plain_steps += 1
            metrics.skipped[reason] = metrics.skipped.get(reason, 0) + 1
            continue
        metrics.num_drafts += 1
        metrics.num_draft_tokens += drafted
        metrics.num_accepted_tokens += accepted
        for i in range(drafted):
            metrics.drafted_per_pos[i] += 1
            metrics.accepted_per_pos[i] += i < accepted
        if metrics.per_step_drafted is not None and metrics.per_step_accepted is not None:
            metrics.per_step_drafted.append(drafted)
            metrics.per_step_accepted.append(accepted)
    return metrics


# --- ratios ---------------------------------------------------------------


def test_nothing_drafted_has_no_rate_and_one_token_a_step() -> None:
    empty = SpeculationMetrics()
    assert empty.acceptance_rate is None
    assert empty.mean_acceptance_length == 1.0
    assert empty.tokens_per_step == 1.0
    assert empty.acceptance_rate_per_pos == []
    assert empty.accepted_histogram == [0]
    plain = SpeculationMetrics(num_plain_steps=7)
    assert plain.tokens_per_step == 1.0
    assert plain.num_emitted_tokens == 7


def test_ratios_count_the_targets_own_token() -> None:
    some = SpeculationMetrics(
        num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6, num_plain_steps=2
    )
    assert some.acceptance_rate == 0.5
    assert some.mean_acceptance_length == 2.5
    assert some.tokens_per_step == 2.0


def test_rates_by_position_are_of_all_steps_or_of_those_that_came_so_far() -> None:
    some = counted([(4, 4), (4, 2), (3, 2), (2, 0)])
    assert some.acceptance_rate_per_pos == [0.75, 0.75, 0.25, 0.25]
    assert some.conditional_acceptance_rate_per_pos == pytest.approx([3 / 4, 1, 1 / 3, 1])


def test_conditional_rate_of_a_position_that_nobody_reached_is_none() -> None:
    assert counted([(4, 1)]).conditional_acceptance_rate_per_pos == [1.0, 0.0, None, None]


def test_histogram_says_how_many_steps_accepted_exactly_so_many() -> None:
    some = counted([(4, 4), (4, 2), (3, 2), (2, 0), (0, 0)])
    assert some.accepted_histogram == [1, 0, 2, 0, 1]


@given(steps_of_a_request)
def test_histogram_is_that_of_the_single_steps(steps: Steps) -> None:
    accepted = [a for d, a in steps if d]
    histogram = counted(steps).accepted_histogram
    assert histogram == [accepted.count(i) for i in range(K + 1)]


# --- adding ---------------------------------------------------------------


def test_adding_sums_every_number_and_pads_positions() -> None:
    total = SpeculationMetrics(
        num_drafts=1,
        num_draft_tokens=2,
        num_accepted_tokens=1,
        drafted_per_pos=[1, 1],
        accepted_per_pos=[1, 0],
        skipped={"budget": 1},
    )
    other = SpeculationMetrics(
        num_drafts=2,
        num_draft_tokens=5,
        num_accepted_tokens=3,
        num_plain_steps=4,
        drafted_per_pos=[2, 2, 1],
        accepted_per_pos=[2, 1, 0],
        skipped={"budget": 1, "policy": 3},
    )
    total.add(other)
    assert total.as_dict() == {
        "num_drafts": 3,
        "num_draft_tokens": 7,
        "num_accepted_tokens": 4,
        "num_plain_steps": 4,
        "drafted_per_pos": [3, 3, 1],
        "accepted_per_pos": [3, 1, 0],
        "skipped": {"budget": 2, "policy": 3},
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "acceptance_rate": pytest.approx(4 / 7),
        "tokens_per_step": pytest.approx(1 + 4 / 7),
        "accepted_histogram": [0, 2, 1, 0],
        "acceptance_rate_per_pos": pytest.approx([1, 1 / 3, 0]),
        "conditional_acceptance_rate_per_pos": pytest.approx([1, 1 / 3, 0]),
    }
    # the other one is as it was
    assert other.drafted_per_pos == [2, 2, 1]
    assert other.skipped == {"budget": 1, "policy": 3}


@given(steps_of_a_request, steps_of_a_request, st.booleans())
def test_adding_two_parts_is_counting_the_whole(first: Steps, then: Steps, detailed: bool) -> None:
    total = counted(first, detailed=detailed)
    total.add(counted(then, detailed=detailed))
    assert attrs.asdict(total) == attrs.asdict(counted(first + then, detailed=detailed))


def test_single_steps_are_kept_when_added_to_nothing() -> None:
    total = SpeculationMetrics()
    total.add(counted([(2, 1)], detailed=True))
    total.add(SpeculationMetrics())
    assert (total.per_step_drafted, total.per_step_accepted) == ([2], [1])


def test_single_steps_are_dropped_when_some_were_not_recorded() -> None:
    total = counted([(2, 1)], detailed=True)
    total.add(counted([(3, 1)]))
    assert total.per_step_drafted is total.per_step_accepted is None
    total.check()


# --- forms ----------------------------------------------------------------


def test_the_dict_is_ready_for_json() -> None:
    assert json.loads(json.dumps(SpeculationMetrics().as_dict()))["acceptance_rate"] is None
    whole = counted([(4, 2), (0, 0)], detailed=True)
    assert json.loads(json.dumps(whole.as_dict())) == whole.as_dict()


def test_summary_has_vllms_names_for_the_verified_steps() -> None:
    assert counted([(4, 4), (4, 1), (0, 0)]).summary() == {
        "histogram": [0, 1, 0, 0, 1],
        "mean_acceptance_length": 3.5,
        "draft_acceptance_rate": 0.625,
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 8,
        "num_spec_tokens": 4,
    }


def test_detailed_adds_the_single_steps_or_none() -> None:
    steps = [(4, 4), (0, 0), (3, 1)]
    whole = counted(steps, detailed=True)
    assert whole.detailed() == {
        **whole.summary(),
        "per_step_drafted": [4, 3],
        "per_step_accepted": [4, 1],
    }
    assert counted(steps).detailed()["per_step_drafted"] is None


# --- identities -----------------------------------------------------------


@given(steps_of_a_request, st.booleans())
def test_what_is_counted_keeps_the_identities(steps: Steps, detailed: bool) -> None:
    emitted = sum(accepted + 1 for _, accepted in steps)
    counted(steps, detailed=detailed).check(emitted=emitted)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_drafts": 3}, "verified steps have a first draft"),
        ({"num_draft_tokens": 6}, "positions drafted sum to the drafts"),
        ({"num_accepted_tokens": 4}, "positions accepted sum to those accepted"),
        ({"accepted_per_pos": [3, 0, 0, 0]}, "no position accepts more than it drafts"),
        ({"accepted_per_pos": [1, 2]}, "later positions are accepted no more often"),
        ({"drafted_per_pos": [2, 1, 2]}, "later positions are drafted no more often"),
        ({"drafted_per_pos": [2, 3, -1]}, "later positions are drafted no more often"),
        ({"skipped": {"budget": 2}}, "every plain step says why, or none"),
        ({"per_step_drafted": None}, "single steps sum to the whole"),
        ({"per_step_drafted": [3, 3]}, "single steps sum to the whole"),
        ({"per_step_accepted": [3, 0]}, "single steps sum to the whole"),
        ({"per_step_accepted": [0, 3]}, "single steps sum to the whole"),
    ],
)
def test_a_contradiction_is_named(wrong: dict[str, Any], said: str) -> None:
    right = counted([(3, 1), (2, 2), (0, 0)], detailed=True)
    right.check()
    with pytest.raises(AssertionError, match=said):
        attrs.evolve(right, **wrong).check()


def test_tokens_counted_apart_must_agree() -> None:
    some = counted([(3, 1), (0, 0)])
    some.check(emitted=3)
    with pytest.raises(AssertionError, match="steps emit one token and those accepted"):
        some.check(emitted=2)
