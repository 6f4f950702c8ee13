"""Checks that pass for what is lossless and fail for what is not.

That they fail for lossy rules and wrong laws in the loop is shown by
`tests/runner/test_verification_law.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec import Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl
from specdec.testing import (
    RaisingSpeculator,
    assert_lossless,
    assert_same_tokens,
    emitted,
    fixtures,
    tiny_target,
    toy_target,
)
from specdec.testing.checks import chi_square, default_table

# as `pytest_plugins = ["specdec.testing.fixtures"]` in a conftest.py would
lossless = fixtures.lossless


class Doubling(Speculator):
    """Drafts twice the last token; two at most."""

    def capabilities(self) -> Capabilities:
        return Capabilities(max_drafts=2)

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=(2 * step.next_token[:, None]).repeat(1, k) % 61)


class Meddling(Doubling):
    """Changes what it may only read."""

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        step.state.temperature.fill_(1.5)
        return super().propose(step, k)


def test_a_speculator_that_keeps_its_hands_still_passes() -> None:
    assert_same_tokens(
        tiny_target(),
        {"method": Doubling},
        [[1, 2], [3]],
        SamplingParams(temperature=0.5, seed=1, max_tokens=9),
    )


def test_one_that_changes_the_state_is_caught() -> None:
    with pytest.raises(AssertionError, match="prompt 0 with"):
        assert_same_tokens(
            tiny_target(),
            {"method": Meddling},
            [[1, 2]],
            SamplingParams(temperature=0.1, seed=1, max_tokens=30),
        )
    with pytest.raises(AssertionError, match="together, k=1"):
        assert_lossless({"method": Meddling}, drafts=(1,))


def test_numbers_of_drafts_beyond_the_speculators_are_skipped(
    lossless: Callable[..., None],
) -> None:
    lossless({"method": Doubling}, drafts=(1, 6), max_tokens=8)
    with pytest.raises(AssertionError, match=r"can draft none of the numbers \[3, 6\]"):
        lossless({"method": Doubling}, drafts=(3, 6), max_tokens=8)


def test_a_failed_request_fails_the_check_with_its_reason() -> None:
    with pytest.raises(AssertionError, match="the token 4 was met"):
        emitted(
            toy_target(torch.eye(8).roll(1, dims=1) * 20),
            [[1]],
            SamplingParams(temperature=0, max_tokens=6),
            {"method": RaisingSpeculator, "token": 4},
        )


def test_other_errors_are_not_swallowed() -> None:
    class Odd(Doubling):
        def capabilities(self) -> Any:
            return None

    with pytest.raises(Exception, match="gave NoneType"):
        assert_lossless({"method": Odd}, drafts=(1,))


def draws(law: torch.Tensor, count: int, length: int, last: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((count,), last)
    columns = []
    for _ in range(length):
        rows = torch.multinomial(law[rows], 1, generator=generator).squeeze(1)
        columns.append(rows)
    return torch.stack(columns, dim=1).tolist()


def test_the_statistic_is_near_its_degrees_of_freedom_for_the_right_law_only() -> None:
    logits = default_table().double()
    right = draws(logits.softmax(-1), 4000, 3, last=1)
    statistic, freedom = chi_square(right, logits, 1)
    assert freedom == 26
    assert statistic < 60
    slightly_off = draws((logits * 1.25).softmax(-1), 4000, 3, last=1)
    assert chi_square(slightly_off, logits, 1)[0] > 100
    # the law of the first token depends on the last of the prompt
    assert chi_square(right, logits, 0)[0] > 100


def test_rare_cells_are_counted_as_one() -> None:
    logits = torch.tensor([[0.0, -9.0], [0.0, -9.0]], dtype=torch.float64)
    statistic, freedom = chi_square(draws(logits.softmax(-1), 500, 3, last=0), logits, 0)
    assert freedom == 1
    assert statistic < 10
