"""Each fault put into a copy of these kernels shows against the reference.

Faults are replacements in the source text, so they follow it: where a line has changed, its fault
is to be written anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

Make = Callable[..., Any]


class Fault(NamedTuple):
    """A replacement in a file, and the call that shows it."""

    file: str
    old: str
    new: str
    call: str  # method, law, kind


FAULTS = {
    "one uniform for all drafts": Fault(
        "rejection", "position, column, ACCEPT", "position, column * 0, ACCEPT",
        "standard dense plain",
    ),
    "uniforms of another stream": Fault(
        "rejection", "column, ACCEPT)", "column, ACCEPT + 1)", "standard dense plain"
    ),
    "tests that always pass": Fault(
        "rejection", "ratio > tl.log2(uniform)", "ratio > -99.0", "standard dense plain"
    ),
    "tests past a failure": Fault(
        "rejection", "tl.min(tl.where(passed, KP, column))",
        "tl.max(tl.where(passed, column + 1, 0))", "standard dense plain",
    ),
    "a block's first failure": Fault(
        "rejection", "accepted = tl.max(tl.where(passed, column + 1, 0))",
        "accepted = tl.min(tl.where(passed, KP, column))", "block dense plain",
    ),
    "a ratio of the block above 1": Fault(
        "rejection", "tl.minimum(tl.maximum(more, -3.0e38), 0.0)", "tl.maximum(more, -3.0e38)",
        "block dense plain",
    ),
    "a ratio of 0 that is brought back": Fault(
        "rejection", "tl.where(carried <= -1.0e38, carried,", "tl.where(carried > 1, carried,",
        "block sparse wild",
    ),
    "thresholds without what is missing": Fault(
        "rejection", "missing = mass + one_less_exp2(after)", "missing = mass", "block dense plain"
    ),
    "other exponents": Fault(
        "rejection", "tl.maximum(x, -200.0) *", "tl.maximum(x, -200.0) +", "block dense plain"
    ),
    "the mass of the draft's own row": Fault(
        "rejection", "(at + column + 1).to", "(at + column).to", "block dense plain"
    ),
    "the mass of a certain q with its draft": Fault(
        "rejection", "tl.exp2(after) * one_less_exp2(tl.minimum(following, 0.0))",
        "tl.exp2(after)", "block one-hot plain",
    ),
    "the last threshold everywhere": Fault(
        "rejection", "tl.where(ahead, threshold, tl.exp2(after))", "tl.exp2(after)",
        "block dense plain",
    ),
    "tokens past the count": Fault(
        "rejection", "emitted = active & (column <= accepted)", "emitted = active",
        "standard dense plain",
    ),
    "a given sum in every tile": Fault(
        "rejection", "INFINITE) & (tile == 0)", "INFINITE)", "standard dense, summed wide"
    ),
    "a given sum that is no number": Fault(
        "rejection", "(tl.abs(value) < INFINITE)", "(value == value)", "standard dense, summed wild"
    ),
    "cuts forgotten in sums": Fault(
        "rejection", "z = tl.where(z < tl.load(cuts + at), NOTHING, z)", "pass",
        "standard dense cut",
    ),
    "q left out of the ratio": Fault(
        "laws", "ratio = log_p - log_q", "ratio = log_p", "standard dense plain"
    ),
    "cuts forgotten in the ratio": Fault(
        "laws", "z = tl.where(z < cut, NOTHING, z)\n    log_p", "log_p", "standard dense cut"
    ),
    "wild rows of q taken for tame": Fault(
        "laws", "q_wild & active", "q_wild & (column < 0)", "standard dense wild"
    ),
    "wild rows of p taken for tame": Fault(
        "laws", "row_stride, wild & active,", "row_stride, wild & (column < 0),",
        "standard one-hot wild",
    ),
    "one wild tile that is not seen": Fault(
        "laws", "wild = tl.max((total", "wild = tl.min((total", "standard one-hot wild"
    ),
    "a candidate that is none": Fault(
        "laws", "(ids >= 0) & (ids < vocab)", "(ids >= -1) & (ids < vocab)", "standard sparse wild"
    ),
    "the draft again": Fault(
        "residual", "tl.where(ids == draft, 0.0, p)", "p", "standard one-hot plain"
    ),
    "a residual without q": Fault(
        "residual", "            weight = less(p, log_p, log_q)", "            weight = p",
        "standard dense plain",
    ),
    "a residual without candidates": Fault(
        "residual", "tl.where(ids == id_, less(p, log_p, log_q), weight)", "weight",
        "standard sparse plain",
    ),
    "the residual of another row": Fault(
        "residual", "tl.load(logits_start + request) + column\n        ids",
        "tl.load(logits_start + request)\n        ids", "standard dense wide",
    ),
    "a group's noise for its ids": Fault(
        "residual", "0, RESIDUAL_TOKEN)\n            total",
        "0, RESIDUAL_TOKEN + 1)\n            total", "standard dense plain",
    ),
    "the residual of a block by all of p": Fault(
        "residual", "relative(z, p_top) - p_sum + carried\n    log_p = tl.where(log_p == log_p",
        "relative(z, p_top) - p_sum\n    log_p = tl.where(log_p == log_p", "block sparse plain",
    ),
    "a mass by all of p": Fault("residual", "(p_sum - carried)", "p_sum", "block dense plain"),
    "a mass of p alone": Fault(
        "residual", "tl.maximum(p - q,", "tl.maximum(p,", "block dense plain"
    ),
    "masses below 0": Fault(
        "residual", "tl.maximum(p - q, 0.0, propagate_nan=tl.PropagateNan.ALL)", "p - q",
        "block dense plain",
    ),
    "the mass of another request": Fault(
        "residual", "laws + request * 5", "laws + request * 4", "block dense plain"
    ),
    "wild masses kept": Fault(
        "residual", "if (mass != mass) | (mass == INFINITE) |", "if (mass < 0) |",
        "block dense wild",
    ),
    "a mass of an unknown q": Fault(
        "residual", "| (q_sum == NOTHING):", "| (q_sum != q_sum):", "block dense, summed wild"
    ),
    "a mass of candidates by all of p": Fault(
        "residual", "tl.exp2(carried) - shared", "1.0 - shared", "block sparse plain"
    ),
    "candidates that share too much": Fault(
        "residual", "tl.minimum(log_p, log_q)))", "tl.maximum(log_p, log_q)))", "block sparse plain"
    ),
}  # fmt: skip


@pytest.fixture
def agrees(make_call: Make, same: Make) -> Callable[[Any, str], bool]:
    """Whether kernels give what the reference gives for a call."""

    def agrees(kernels: Any, call: str) -> bool:
        method, law = call.split(maxsplit=1)
        law, kind = law.rsplit(maxsplit=1)
        agreed: bool = same(kernels, make_call(law=law, kind=kind), method, truncate=kind == "cut")
        return agreed

    return agrees


def test_a_faultless_copy_agrees(faulty: Make, agrees: Make) -> None:
    kernels = faulty(None)
    assert agrees(kernels, "standard dense, summed wide")
    assert agrees(kernels, "block sparse wild")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(faulty: Make, agrees: Make, fault: str) -> None:
    assert not agrees(faulty(FAULTS[fault]), FAULTS[fault].call)
