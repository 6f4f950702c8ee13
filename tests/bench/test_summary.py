"""From runs to numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.bench.load import Answer
from specdec.bench.measurement import Run, Setting
from specdec.bench.summary import cells
from specdec.bench.workload import Task
from specdec.metrics import SpeculationMetrics

PLAIN, FAST = Setting("plain", 0.0, 1), Setting("fast", 0.0, 1)


def answer(line: int, tokens: list[int], category: str = "a", **values: Any) -> Answer:
    return Answer(
        **{
            "task": Task(line=line, name=str(line), category=category, turns=("x",)),
            "turn": 0,
            "prompt_tokens": 3,
            "tokens": np.array(tokens, dtype=np.int32),
            "seconds": 1.0,
            "first": 0.25,
            "gaps": [(0.2, 2), (0.1, 1)],
            "finish_reason": "length",
            "error": None,
            "speculation": SpeculationMetrics(
                num_drafts=2, num_draft_tokens=4, num_accepted_tokens=2, num_plain_steps=1,
                drafted_per_pos=[2, 2], accepted_per_pos=[1, 1],
            ),
            **values,
        }
    )  # fmt: skip


def run(
    setting: Setting, repetition: int, seconds: float, *answers: Answer, complete: bool = True
) -> Run:
    return Run(
        setting=setting,
        repetition=repetition,
        seconds=seconds,
        tokens=sum(len(a.tokens) for a in answers),
        answers=answers,
        complete=complete,
    )


def summed(*runs: Run, promised: bool = True, baseline: str | None = "plain") -> list[Any]:
    settings = {r.setting for r in runs}
    return cells(runs, baseline=baseline, repeats=dict.fromkeys(settings, promised))


def test_speed_ups_are_of_the_runs_of_a_repetition() -> None:
    four = answer(1, [1, 2, 3, 4])
    plain, fast = summed(
        run(PLAIN, 0, 4.0, four), run(FAST, 0, 2.0, four),
        run(PLAIN, 1, 40.0, four), run(FAST, 1, 10.0, four),
        run(PLAIN, 2, 4.0, four), run(FAST, 2, 4.0, four),
    )  # fmt: skip
    assert fast["speed_up"] == {"median": 2.0, "min": 1.0, "max": 4.0, "each": [2.0, 4.0, 1.0]}
    assert fast["tokens_per_second"]["median"] == 1.0
    assert fast["tokens_per_second"]["each"] == [2.0, 0.4, 1.0]
    assert plain["speed_up"] is None
    assert plain["equal"] is None


def test_latencies_are_medians_and_late_ones() -> None:
    (cell,) = summed(
        run(FAST, 0, 1.0, answer(1, [1, 2, 3, 4]), answer(2, [1], first=0.75, gaps=[]))
    )
    assert cell["time_to_first_token"]["median"] == 0.5
    assert cell["time_to_first_token"]["p99"] == pytest.approx(0.745)
    # the two tokens of a step took half of it each
    assert cell["inter_token_latency"]["median"] == pytest.approx(0.1)
    assert cell["time_between_outputs"]["median"] == pytest.approx(0.15)


def test_acceptance_is_added_up_over_answers() -> None:
    (cell,) = summed(run(FAST, 0, 1.0, answer(1, [1]), answer(2, [1])))
    speculation = cell["speculation"]
    assert (speculation["num_drafts"], speculation["accepted_per_pos"]) == (4, [2, 2])
    assert speculation["acceptance_rate_per_pos"] == [0.5, 0.5]
    assert speculation["mean_acceptance_length"] == 2.0
    assert speculation["tokens_per_step"] == pytest.approx(1 + 4 / 6)


def test_tokens_are_compared_answer_by_answer_and_failures_left_out() -> None:
    _, fast = summed(
        run(PLAIN, 0, 1.0, answer(1, [1, 2]), answer(2, [3]), answer(3, [4]), answer(4, [5])),
        run(FAST, 0, 1.0, answer(2, [3]), answer(1, [1, 9]), answer(3, [], error="no")),
        promised=False,
    )
    assert fast["equal"] == {"answers": 1, "compared": 2, "promised": False}
    assert (fast["answers"], fast["failed"]) == (3, 1)


def test_categories_stand_in_the_order_of_the_file_with_numbers_of_their_own() -> None:
    plain = run(PLAIN, 0, 1.0, answer(1, [1, 2], "b"), answer(2, [1, 2], "a", seconds=4.0))
    fast = run(FAST, 0, 1.0, answer(2, [1, 2], "a", seconds=1.0), answer(1, [1, 3], "b"))
    *_, cell = summed(plain, fast)
    assert list(cell["categories"]) == ["b", "a"]
    assert cell["categories"]["a"]["tokens_per_second_of_a_request"] == 2.0
    assert cell["categories"]["a"]["speed_up"] == 4.0
    assert cell["categories"]["a"]["equal"]["answers"] == 1
    assert cell["categories"]["b"]["equal"]["answers"] == 0


def test_what_was_broken_off_counts_only_where_there_is_nothing_else() -> None:
    four = answer(1, [1, 2, 3, 4])
    (cell,) = summed(run(FAST, 0, 1.0, four), run(FAST, 1, 9.0, four, complete=False))
    assert (cell["runs"], cell["complete"], cell["tokens_per_second"]["max"]) == (1, True, 4.0)
    (cell,) = summed(run(FAST, 0, 9.0, four, complete=False))
    assert (cell["runs"], cell["complete"]) == (1, False)


def test_without_a_baseline_nothing_is_compared() -> None:
    for cell in summed(
        run(PLAIN, 0, 1.0, answer(1, [1])), run(FAST, 0, 1.0, answer(1, [1])), baseline=None
    ):
        assert cell["speed_up"] is None
        assert cell["equal"] is None


def test_answers_without_a_token_have_no_latency() -> None:
    (cell,) = summed(run(FAST, 0, 1.0, answer(1, [], first=None, gaps=[], error="no")))
    assert cell["time_to_first_token"] is None
    assert cell["inter_token_latency"] is None
    assert cell["tokens_per_second"]["median"] == 0.0
