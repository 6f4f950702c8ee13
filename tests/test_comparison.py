"""Tokens with and without speculation, side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import CompletionOutput, RequestOutput
from specdec.comparison import Comparison, first_difference
from specdec.outputs import RequestMetrics

TOKENS = st.lists(st.integers(0, 2), max_size=5)


def output(*completions: list[int]) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[
            CompletionOutput(index=i, text="", token_ids=ids) for i, ids in enumerate(completions)
        ],
        finished=True,
        metrics=RequestMetrics(arrival_time=0.0),
    )


def compared(
    ours: RequestOutput, plain: RequestOutput, *, lossless: bool = True, repeats: bool = True
) -> Comparison:
    return Comparison.of([ours], [plain], 1.0, 2.0, lossless=lossless, repeats=repeats)


@given(TOKENS, TOKENS)
def test_the_first_difference_is_where_the_common_start_ends(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    assert a[:at] == b[:at]
    assert a[at : at + 1] != b[at : at + 1] or a == b


def test_equal_tokens_are_equal_and_the_gain_is_the_ratio_of_rates() -> None:
    found = compared(output([1, 2], [3]), output([1, 2], [3]))
    assert not found.broken
    assert found.lines() == [
        "plain decoding: 1.5 tokens/s; gain: 2.00x (each ran once)",
        "tokens with and without speculation: equal",
    ]
    assert found.as_dict()["equal"] == 2


@pytest.mark.parametrize(("repeats", "broken"), [(True, True), (False, False)])
def test_a_difference_counts_only_against_a_promise(repeats: bool, broken: bool) -> None:
    found = compared(output([1, 2], [3]), output([1, 4], [3]), repeats=repeats)
    assert found.broken is broken
    assert found.as_dict()["first_differences"] == {"0/0": 1}
    assert found.as_dict()["equal_expected"] is repeats
    assert ("completion 0/0 differs from token 1 on" in "\n".join(found.lines())) is repeats


def test_a_lossy_rule_is_called_lossy() -> None:
    found = compared(output([1]), output([2]), lossless=False, repeats=False)
    assert "not lossless" in found.lines()[-1]


def test_without_a_token_there_is_no_gain() -> None:
    found = compared(output([]), output([]))
    assert found.as_dict()["gain"] is None
    assert "gain: - " in found.lines()[0]
