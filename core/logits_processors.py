"""Functions that a request brings along to edit its logits: `SamplingParams(logits_processors=)`.

A processor is called as `f(rows, logits)` and returns logits, the ones it was given or others of
the same shape. A step with drafts has a row for each draft and one more, and row i continues the
drafts before it: ask `rows` for the tokens that a row follows, and for nothing else. What a
processor remembers from other calls is of drafts that may have been refused since, so its answer
has to be a function of its arguments alone.

>>> def never_twice(rows, logits):
...     for i in range(len(rows)):
...         if len(written := rows.output_token_ids(i)):
...             logits[i, int(written[-1])] = float("-inf")
...     return logits
>>> rows = LogitsRows([4, 2, 0], length=3, prompt_length=2, drafts=[1])
>>> run_processors([never_twice], rows, torch.zeros(2, 3))
tensor([[-inf, 0., 0.],
        [0., -inf, 0.]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdec.errors import PLUGIN_ERRORS, ProcessorError, blame

Ints = NDArray[np.int64]


class LogitsRows:
    """The rows of one request in a step. Arrays are read only.

    history: token ids of the prompt and the output so far, in `length` places, and whatever else.
    prompt_length: how many of them are the prompt's. drafts: the ids under test; row i follows
    the first i of them, and there is one row more than drafts.
    """

    __slots__ = ("_length", "_prompt", "_tokens")

    def __init__(
        self, history: ArrayLike, *, length: int, prompt_length: int, drafts: ArrayLike = ()
    ) -> None:
        known = np.asarray(history, dtype=np.int64)[:length]
        self._tokens: Ints = np.concatenate([known, np.asarray(drafts, dtype=np.int64)])
        self._tokens.flags.writeable = False
        self._length = length
        self._prompt = prompt_length

    def __len__(self) -> int:
        return len(self._tokens) - self._length + 1

    @property
    def prompt_token_ids(self) -> Ints:
        """The prompt."""
        return self._tokens[: self._prompt]

    def output_token_ids(self, row: int) -> Ints:
        """The output that the row continues: what was emitted, then the drafts before the row."""
        return self._tokens[self._prompt : self.position(row)]

    def token_ids(self, row: int) -> Ints:
        """The prompt and the output that the row continues."""
        return self._tokens[: self.position(row)]

    def position(self, row: int) -> int:
        """Index in the sequence, prompt included, of the token that the row predicts."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}; rows are 0 to {len(self) - 1}")
        return self._length + row


Processor = Callable[[LogitsRows, Tensor], Tensor]


def run_processors(processors: Iterable[Processor], rows: LogitsRows, logits: Tensor) -> Tensor:
    """Call the processors in turn; return what the last one gave.

    logits: any float dtype [rows, vocab]; left as they are. Processors see a copy of these rows
    alone, in float32 if it is of less precision, and -inf in place of NaN.

    Raises:
        ProcessorError: one raised, or answered with what are no logits, named.
    """
    # never a view: through one a processor could reach the rows of others
    edited = logits.clone(memory_format=torch.contiguous_format)
    if edited.dtype not in (torch.float32, torch.float64):
        edited = edited.to(torch.float32)
    edited = edited.nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)
    shape, dtype, device = edited.shape, edited.dtype, edited.device
    for number, processor in enumerate(processors):
        who = f"logits_processors[{number}] ({_name(processor)})"
        where = _places(rows, range(len(rows)))
        try:
            answer: Any = processor(rows, edited)
        except _WrongRow as error:
            place = _places(rows, [error.row])
            raise ProcessorError(
                f"{who} returned {error.what} for {place}; {error.wanted}"
            ) from None
        except PLUGIN_ERRORS as error:
            raise ProcessorError(blame(who, error, where)) from error
        if wrong := _problem(answer, shape, dtype, device):
            what, wanted = wrong
            raise ProcessorError(f"{who} returned {what} for {where}; {wanted}")
        # the next one may write to what it is given, and who answered may have kept it
        edited = answer if answer is edited else answer.clone()
    return edited


def _places(rows: LogitsRows, which: Sequence[int]) -> str:
    first, last = rows.position(which[0]), rows.position(which[-1])
    if first == last:
        return f"the row at position {first}"
    return f"the rows at positions {first} to {last}"


def _problem(
    answer: object, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[str, str] | None:
    """What is wrong with an answer, if anything, and what it should be."""
    if answer is None:
        return "None", "return the logits, also where they were edited in place"
    if not isinstance(answer, Tensor):
        return f"an object of type {type(answer).__name__}", "expected a tensor"
    if answer.layout != torch.strided:
        return f"a tensor of layout {answer.layout}", "expected a dense one"
    for what, got, wanted in (
        ("shape", list(answer.shape), list(shape)),
        ("dtype", answer.dtype, dtype),
        ("device", answer.device, device),
    ):
        if got != wanted:
            return f"a tensor of {what} {got}", f"expected {wanted}"
    if answer.isnan().any():
        return "NaN", "to exclude a token set its logit to -inf"
    return None


class _WrongRow(Exception):
    """A function that is asked row by row answered this row wrongly."""

    def __init__(self, row: int, what: str, wanted: str) -> None:
        super().__init__(what)
        self.row, self.what, self.wanted = row, what, wanted


class _RowByRow:
    """A processor that asks another one about each row by itself."""

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.processor = processor

    def __call__(self, rows: LogitsRows, logits: Tensor) -> Tensor:
        answers: list[Tensor] = []
        for i in range(len(rows)):
            ids = torch.tensor(rows.token_ids(i), device=logits.device)
            answer: Any = self.processor(ids[None], logits[i : i + 1].clone())
            if not isinstance(answer, Tensor) or answer.shape != logits[:1].shape:
                what = "None" if answer is None else f"an object of type {type(answer).__name__}"
                if isinstance(answer, Tensor):
                    what = f"a tensor of shape {list(answer.shape)}"
                raise _WrongRow(i, what, f"expected scores of shape {list(logits[:1].shape)}")
            answers.append(answer)
        return torch.cat(answers)


def row_by_row(processor: Callable[[Tensor, Tensor], Tensor]) -> Processor:
    """Make a processor of one that looks at one row at a time, such as those of transformers.

    processor: called as `f(input_ids, scores)` once per row, with the prompt and output that the
    row continues, int64 [1, tokens], and float [1, vocab]; returns scores. It is called for
    drafts that may be refused, so it may keep no state from call to call.
    """
    if not callable(processor):
        raise TypeError(f"row_by_row needs a function, not {type(processor).__name__}")
    return _RowByRow(processor)


def _name(processor: object) -> str:
    if isinstance(processor, _RowByRow):
        processor = processor.processor
    return str(getattr(processor, "__qualname__", type(processor).__qualname__))
