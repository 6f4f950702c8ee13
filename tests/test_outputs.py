"""The numbers of speculation and their ratios."""

from __future__ import annotations

import json

import pytest

from specdec.outputs import SpeculationMetrics


def test_nothing_drafted_has_no_rate_and_one_token_a_step() -> None:
    empty = SpeculationMetrics()
    assert empty.acceptance_rate is None
    assert empty.mean_acceptance_length == 1.0
    assert empty.tokens_per_step == 1.0
    plain = SpeculationMetrics(num_plain_steps=7)
    assert plain.tokens_per_step == 1.0


def test_ratios_count_the_targets_own_token() -> None:
    some = SpeculationMetrics(
        num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6, num_plain_steps=2
    )
    assert some.acceptance_rate == 0.5
    assert some.mean_acceptance_length == 2.5
    assert some.tokens_per_step == 2.0


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
    }
    # the other one is as it was
    assert other.drafted_per_pos == [2, 2, 1]
    assert other.skipped == {"budget": 1, "policy": 3}


def test_the_dict_is_ready_for_json() -> None:
    assert json.loads(json.dumps(SpeculationMetrics().as_dict()))["acceptance_rate"] is None
