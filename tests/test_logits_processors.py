"""Processors of a request's own: what they see, what they may answer, and who is blamed."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, logits_processors
from specdec.errors import ProcessorError
from specdec.logits_processors import LogitsRows, Processor, row_by_row, run_processors

VOCAB = 7


def rows_of(drafts: list[int], output: list[int] | None = None) -> LogitsRows:
    history = np.full(20, 99)  # what lies past the known tokens is stale
    known = [1, 2, 3, *(output or [])]
    history[: len(known)] = known
    return LogitsRows(history, length=len(known), prompt_length=3, drafts=drafts)


def logits_of(rows: LogitsRows) -> Tensor:
    return torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))


def repeats_cost(rows: LogitsRows, logits: Tensor) -> Tensor:
    """Edits in place: takes off the number of times that a token was written."""
    for i in range(len(rows)):
        logits[i] -= torch.tensor(np.bincount(rows.output_token_ids(i), minlength=VOCAB))
    return logits


def test_a_row_follows_what_was_emitted_and_the_drafts_before_it() -> None:
    rows = rows_of(drafts=[5, 6], output=[4])
    assert len(rows) == 3
    assert rows.prompt_token_ids.tolist() == [1, 2, 3]
    assert [rows.output_token_ids(i).tolist() for i in range(3)] == [[4], [4, 5], [4, 5, 6]]
    assert rows.token_ids(1).tolist() == [1, 2, 3, 4, 5]
    assert [rows.position(i) for i in range(3)] == [4, 5, 6]
    for row in (-1, 3):
        with pytest.raises(IndexError, match=f"row {row} of 3; rows are 0 to 2"):
            rows.output_token_ids(row)


def test_every_row_gets_what_it_would_get_alone_with_its_drafts_committed() -> None:
    rows = rows_of(drafts=[5, 6, 5], output=[4])
    logits = logits_of(rows)
    edited = run_processors([repeats_cost], rows, logits)
    for i in range(4):
        alone = rows_of(drafts=[], output=[4, 5, 6, 5][: 1 + i])
        expected = run_processors([repeats_cost], alone, logits[i : i + 1])
        assert torch.equal(edited[i : i + 1], expected)
    assert (edited != logits).any(-1).all()


def test_tokens_can_be_read_and_not_written() -> None:
    history = np.array([1, 2, 3, 4])
    rows = LogitsRows(history, length=4, prompt_length=2, drafts=[5])
    history[:] = 0
    assert rows.token_ids(1).tolist() == [1, 2, 3, 4, 5]
    for ids in (rows.prompt_token_ids, rows.output_token_ids(1), rows.token_ids(0)):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 9


def test_processors_run_in_turn_in_place_or_not() -> None:
    rows = rows_of(drafts=[5])
    twice: Processor = lambda rows, logits: logits * 2  # noqa: E731  (a lambda is allowed)
    logits = logits_of(rows)
    both = run_processors([repeats_cost, twice], rows, logits)
    assert torch.equal(both, run_processors([repeats_cost], rows, logits) * 2)
    assert torch.equal(run_processors([], rows, logits), logits)


def test_a_processor_reaches_its_own_rows_and_no_others() -> None:
    everybody = torch.zeros(6, VOCAB)
    seen: list[Tensor] = []

    def reach(rows: LogitsRows, logits: Tensor) -> Tensor:
        seen.append(logits)
        assert logits._base is None
        assert logits.untyped_storage().nbytes() == logits.numel() * logits.element_size()
        logits.fill_(5.0)
        answer = logits.clone()
        logits.resize_(0)
        return answer

    rows = rows_of(drafts=[5])
    edited = run_processors([reach], rows, everybody[2:4])
    assert torch.equal(edited, torch.full((2, VOCAB), 5.0))
    assert seen
    assert everybody.shape == (6, VOCAB)
    assert not everybody.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_processors_see_single_precision_or_better_and_no_nan(dtype: torch.dtype) -> None:
    rows = rows_of(drafts=[])
    given = torch.tensor([[nan, inf, -inf, 1.0]], dtype=dtype)
    edited = run_processors([lambda rows, logits: logits + 0], rows, given)
    assert edited.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert edited.tolist() == [[-inf, inf, -inf, 1.0]]
    assert given.isnan().any()


def resized(rows: LogitsRows, logits: Tensor) -> Tensor:
    return logits.resize_(1, VOCAB)


def failing(rows: LogitsRows, logits: Tensor) -> Tensor:
    raise KeyError("no such grammar")


def leaving(rows: LogitsRows, logits: Tensor) -> Tensor:
    raise SystemExit("enough")


class Silent:
    def __call__(self, rows: Any, logits: Tensor) -> Any:
        logits[:] = 0


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (failing, r"\(failing\) raised KeyError in the rows at positions 4 to 5: 'no such gr"),
        (leaving, r"\(leaving\) raised SystemExit in the rows at positions 4 to 5: enough"),
        (
            Silent(),
            r"\(Silent\) returned None for the rows at positions 4 to 5; return the logits, "
            r"also where they were edited",
        ),
        (resized, r"\(resized\) returned a tensor of shape \[1, 7\] for .*; expected \[2, 7\]$"),
        (lambda r, x: x[:, :-1], r"returned a tensor of shape \[2, 6\] for .*; expected \[2, 7\]"),
        (
            lambda r, x: x.double(),
            r"returned a tensor of dtype torch.float64 for .*; expected torch.f",
        ),
        (lambda r, x: x.to("meta"), r"returned a tensor of device meta for .*; expected cpu"),
        (lambda r, x: x.to_sparse(), r"returned a tensor of layout torch.sparse_coo"),
        (lambda r, x: x.numpy(), r"returned an object of type ndarray for .*; expected a tensor"),
        (lambda r, x: x * nan, r"returned NaN for .*; to exclude a token set its logit to -inf"),
        (
            row_by_row(lambda ids, scores: scores[0]),
            r"returned a tensor of shape \[7\] for the row at position 4; expected scores of",
        ),
        (
            row_by_row(Silent()),
            r"\(Silent\) returned None for the row at position 4; expected scores",
        ),
    ],
)
def test_whoever_raises_or_answers_wrongly_is_named(
    processor: Callable[..., Any], said: str
) -> None:
    rows = rows_of(drafts=[5], output=[4])
    good: Processor = lambda rows, logits: logits  # noqa: E731  (a lambda is allowed)
    with pytest.raises(ProcessorError, match=rf"^logits_processors\[1\] .*{said}"):
        run_processors([good, processor], rows, logits_of(rows))


def test_a_single_row_is_named_by_its_position() -> None:
    rows = rows_of(drafts=[], output=[4])
    with pytest.raises(ProcessorError, match=r"for the row at position 4; expected \[1, 7\]$"):
        run_processors([lambda r, x: x[:, :-1]], rows, logits_of(rows))


def test_row_by_row_names_the_row_that_was_answered_wrongly() -> None:
    rows = rows_of(drafts=[5, 6], output=[4])
    late = row_by_row(lambda ids, scores: scores if ids.shape[1] < 5 else scores[0])
    with pytest.raises(ProcessorError, match=r"shape \[7\] for the row at position 5; expected"):
        run_processors([late], rows, logits_of(rows))


def test_an_interrupt_passes() -> None:
    def interrupted(rows: LogitsRows, logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    rows = rows_of(drafts=[])
    with pytest.raises(KeyboardInterrupt):
        run_processors([interrupted], rows, logits_of(rows))


def test_processors_of_transformers_see_each_row_with_its_own_tokens() -> None:
    from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    rows = rows_of(drafts=[1, 2, 3], output=[2])
    logits = logits_of(rows)
    tokens = [1, 2, 3, 2, 1, 2, 3]
    for own in (NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.5)):
        edited = run_processors([row_by_row(own)], rows, logits)
        for i in range(4):
            alone = own(torch.tensor([tokens[: 4 + i]]), logits[i : i + 1].clone())
            assert torch.equal(edited[i : i + 1], alone)
        assert (edited != logits).any(-1).all()


def test_row_by_row_takes_functions_and_gives_what_parameters_take() -> None:
    with pytest.raises(TypeError, match="row_by_row needs a function, not int"):
        row_by_row(3)  # type: ignore[arg-type]
    wrapped = row_by_row(lambda ids, scores: scores)
    assert SamplingParams(logits_processors=[wrapped]).logits_processors == (wrapped,)


def test_the_example_in_the_docstring_runs() -> None:
    found = doctest.testmod(logits_processors)
    assert found.attempted > 0
    assert found.failed == 0
