"""A line of numbers and tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cli_report import summary, table
from specdec.metrics import SpeculationMetrics

CELL = st.text("ab |", max_size=12)


def test_a_summary_tells_tokens_time_and_what_was_accepted() -> None:
    metrics = SpeculationMetrics(
        num_drafts=4,
        num_draft_tokens=8,
        num_accepted_tokens=5,
        num_plain_steps=1,
        drafted_per_pos=[4, 4],
        accepted_per_pos=[3, 2],
    )
    assert summary(11, 0.5, metrics) == (
        "11 tokens in 0.50 s (22.0 tokens/s); 2.00 tokens/step, 5 of 8 drafts accepted; "
        "acceptance by position: 0.75, 0.50"
    )


def test_a_summary_says_why_nothing_was_drafted() -> None:
    metrics = SpeculationMetrics(num_plain_steps=3, skipped={"nothing_proposed": 3})
    assert "nothing was drafted (nothing proposed: 3 steps)" in summary(4, 1.0, metrics)
    once = SpeculationMetrics(num_plain_steps=1, skipped={"budget": 1})
    assert summary(1, 1.0, once).startswith("1 token in 1.00 s")
    assert summary(1, 1.0, once).endswith("(budget: 1 step)")


def test_positions_end_where_nothing_was_drafted() -> None:
    metrics = SpeculationMetrics(
        num_drafts=2,
        num_draft_tokens=3,
        num_accepted_tokens=1,
        drafted_per_pos=[2, 1, 0, 0],
        accepted_per_pos=[1, 0, 0, 0],
    )
    assert summary(3, 1.0, metrics).endswith("acceptance by position: 0.50, 0.00")


def test_plain_decoding_is_summed_up_without_drafts() -> None:
    line = summary(4, 2.0, SpeculationMetrics(num_plain_steps=3))
    assert line == "4 tokens in 2.00 s (2.0 tokens/s)"


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n))))
def test_every_line_of_a_table_is_equally_long_and_has_as_many_cells(rows: list[list[str]]) -> None:
    header = ["name"] * (len(rows[0]) if rows else 2)
    lines = table(header, rows)
    assert len(lines) == 2 + len(rows)
    assert len(set(map(len, lines))) == 1
    for line in lines:
        assert line.replace("\\|", "").count("|") == len(header) + 1


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[2Jb"])
def test_cells_cannot_break_out_of_a_table(text: str) -> None:
    assert all(line.isprintable() for line in table(["x"], [[text]]))


def test_words_stand_left_and_numbers_right() -> None:
    assert table(["name", "n"], [["a", "1"]]) == [
        "| name |   n |",
        "| ---- | --: |",
        "| a    |   1 |",
    ]
