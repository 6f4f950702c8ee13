"""Each fault put into a copy of the kernels shows against the reference, in a few small batches.

Faults are replacements in the source text, so they follow it: where a line has changed, its fault
is to be written anew.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import torch

from specdec_kernels import EditInputs, Edits, reference

Make = Callable[..., Any]


class Fault(NamedTuple):
    """A replacement in a file, and the batch that shows it."""

    file: str
    old: str
    new: str
    batch: str = "drafted"


FAULTS = {
    "another shift in the hash": Fault("noise", "word ^ (word >> 15)", "word ^ (word >> 14)"),
    "half of the stream": Fault(
        "noise", "_mix(state ^ (stream >> 32).to(tl.uint32))", "_mix(state)"
    ),
    "one noise for all positions": Fault("noise", "state ^ position.to(tl.uint32)", "state"),
    "one noise for all domains": Fault("noise", "_mix(first ^ domain)", "_mix(first)"),
    "noise upside down": Fault("noise", "return -tl.log(_minus", "return tl.log(_minus"),
    "an unclamped uniform": Fault(
        "noise", "words.to(tl.float32) + 0.5", "words.to(tl.float32) + 2e9"
    ),
    "ids past the vocabulary": Fault(
        "rows", "mask=inside, other=NOTHING", "mask=inside, other=9.0"
    ),
    "no temperature": Fault("rows", "if temperature != 1.0:", "if temperature > 9.0:"),
    "weights relative to nothing": Fault(
        "rows", "tl.exp2(z * LOG2E - reference_of(top))", "tl.exp2(z * LOG2E)"
    ),
    "groups of equal weight": Fault("rows", "mass + gumbel(", "gumbel("),
    "the first tile's noise in every tile": Fault(
        "rows", "groups = tile * GROUPS + tl.arange", "groups = tl.arange"
    ),
    "tiles of equal weight": Fault("coupled", "NOTHING, above + score)", "NOTHING, score)"),
    "a group's noise for its ids": Fault(
        "coupled", "attempt, TARGET_TOKEN + 1)", "attempt, TARGET_TOKEN)"
    ),
    "one id of a tile for all": Fault(
        "coupled", "tl.where(best < vocab, best, tile * TILE)", "tile * TILE", "wild"
    ),
    "the last of greedy ties": Fault(
        "coupled", "best = tl.min(tl.where((", "best = tl.max(tl.where((", "wild"
    ),
    "wild rows taken for tame": Fault("rows", "sums != sums", "sums > sums", "wild"),
    "no token after the drafts": Fault("coupled", "(column <= accepted)", "(column < accepted)"),
    "a count without that token": Fault("coupled", "accepted + 1, 0)", "accepted, 0)"),
    "padding that is decided": Fault("coupled", "tl.where(slot >= 0, length, -1)", "length"),
    "the id at the cut excluded": Fault(
        "coupled", "x < cut[:, None]", "x <= cut[:, None]", "loose"
    ),
    "one id more than top-k": Fault("attempts", "count >= most", "count > most", "loose"),
    "top-p of another mass": Fault(
        "attempts", "mass + own, whole)", "mass + own, whole * 99)", "tight"
    ),
    "ids that count as above a token only by far": Fault(
        "attempts", "higher = z > tl.load", "higher = z > 0.5 + tl.load", "loose"
    ),
    "the last draw with the first one's noise": Fault(
        "retries", "position, 0, REDRAW_TOKEN", "position, 0, TARGET_TOKEN", "tight"
    ),
    "a cut that needs one id more": Fault(
        "survey", "weights, 0.0)) >= target", "weights, 0.0)) > target", "tight"
    ),
    "later attempts with the first one's noise": Fault(
        "retries", "position, attempt, TARGET_TOKEN + 1", "position, 0, TARGET_TOKEN + 1", "wide"
    ),
    "negative values in reverse": Fault(
        "truncation", "(bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT", "bits >> SHIFT", "tight"
    ),
    "the first row's edits in every row": Fault(
        "coupled",
        "tl.program_id(2), tl.program_id(1))\n        if",
        "tl.program_id(2), 0)\n        if",
        "edited",
    ),
    "the first row's grammar in every row": Fault(
        "edit_values", "(mask + local) *", "mask *", "edited"
    ),
    "edited values by another number": Fault(
        "edit_values",
        "popcount(bits[:, None] & (one - 1))",
        "popcount(bits[:, None] & one)",
        "edited",
    ),
    "every row taken for empty": Fault("coupled", "(top > NOTHING)", "(top > INFINITE)", "edited"),
    "no row taken for empty": Fault("coupled", "(top > NOTHING)", "(top >= NOTHING)", "edited"),
    "a group drawn from by what the logits were": Fault(
        "coupled", "temperature, mine)\n    x =", "temperature, None)\n    x =", "edited"
    ),
}


def edits_of(slots: int) -> EditInputs:
    """An id so likely that every row takes it, and a penalty that lets none take it twice.

    Of three requests, the second's last of three rows excludes every id of less than 160.
    """
    none = torch.zeros(slots)
    ids = torch.full((slots, 0), -1)
    return EditInputs(
        torch.arange(5).expand(slots, 5),
        torch.zeros(slots, dtype=torch.int64),
        Edits(
            repetition_penalty=none + 1,
            presence_penalty=none,
            frequency_penalty=none + 300.0,
            bias_ids=torch.full((slots, 1), 80),
            bias=torch.full((slots, 1), 200.0),
            allowed_ids=ids,
            stop_ids=ids,
            min_length=torch.zeros(slots, dtype=torch.int64),
            bad_words=ids[:, None],
        ),
        grammar=torch.tensor([[-1], [-1], [0]], dtype=torch.int32).repeat(1, 5),
        grammar_start=torch.tensor([-1, 0, -1]),
    )


Run = Callable[[Any], Any]  # of a module: what it gives for a batch


class Batches:
    """By name: what a module gives for a batch of requests."""

    def __init__(self, make_batch: Make, make_sampling: Make) -> None:
        self.make_batch, self.make_sampling = make_batch, make_sampling
        self.plain = make_sampling(4, temperature=[0.3, 0.0, 2.5, 1.8], seed=2**40)

    def chains(self) -> Any:
        """Drafts that the target draws too; and padding."""
        batch = self.make_batch(
            [3, 3, 2], 2, torch.randn(8, 150) * 2 - 300, self.plain, truncate=False, right=1.0
        )
        batch.slots[2] = -1
        return batch

    def drafted(self) -> Run:
        batch = self.chains()
        return lambda op: op.verify(*batch, method="coupled", truncate=False)[:3]

    def edited(self) -> Run:
        """Drafts at the places where edits show."""
        inputs, batch = edits_of(4), self.chains()
        batch = batch._replace(positions=torch.tensor([3, 4, 5, 3, 4, 5, 3, 4]))
        for _ in range(2):
            own = reference.verify(*batch, method="coupled", truncate=False, edits=inputs).tokens
            drafts = own[:, :2].where(own[:, :2] >= 0, batch.draft_tokens)
            batch = batch._replace(draft_tokens=drafts)
        return lambda op: op.verify(*batch, method="coupled", truncate=False, edits=inputs)

    def wild(self) -> Run:
        logits, rows = torch.randn(4, 150), torch.arange(4)
        logits[0, 149], logits[1, 70], logits[2, 140] = inf, nan, nan
        logits[3, [100, 120]] = 9.0
        mixed = self.plain._replace(temperature=torch.tensor([0.8, 1.0, 3.0, 0.0]))
        return lambda op: [op.sample(logits, rows, rows, mixed, truncate=False)]

    def tight(self) -> Run:
        """Hardly an attempt is kept."""
        logits, rows = torch.randn(6, 70) * 0.3 - 2, torch.arange(6)
        sampling = self.make_sampling(
            6, top_k=[1, 1, 2, 0, 0, 2], top_p=[1, 1, 1, 0.03, 1, 0.5], min_p=[0, 0, 0, 0, 0.95, 0]
        )
        return lambda op: [op.sample(logits, rows, rows, sampling)]

    def loose(self) -> Run:
        """Attempts are kept, or fall just below a cut."""
        logits, rows = torch.randn(8, 4) * 0.3, torch.arange(8)
        sampling = self.make_sampling(
            8, top_k=[1, 1, 1, 2, 2, 0, 0, 0], top_p=[1, 1, 1, 1, 0.6, 0.3, 0.3, 1],
            min_p=[0, 0, 0, 0, 0, 0, 0.98, 0.98],
        )  # fmt: skip
        return lambda op: [op.sample(logits, rows, rows, sampling)]

    def wide(self) -> Run:
        """Half of all attempts are kept."""
        logits, rows = torch.randn(6, 150) * 0.1, torch.arange(6)
        sampling = self.make_sampling(6, top_k=75)
        return lambda op: [op.sample(logits, rows, rows, sampling)]


BATCHES = ("drafted", "wild", "tight", "loose", "wide", "edited")
KNOWN: dict[str, tuple[Run, Any]] = {}  # by batch, and what the reference gives for it


@pytest.fixture
def agrees(make_batch: Make, make_sampling: Make) -> Callable[[Any, str], bool]:
    """Whether a module's results of a batch are the reference's."""
    if not KNOWN:  # all of them at once, so that they are the same whichever test is first
        batches = Batches(make_batch, make_sampling)
        for name in BATCHES:
            run: Run = getattr(batches, name)()
            KNOWN[name] = run, run(reference)

    def agrees(kernels: Any, batch: str) -> bool:
        run, expected = KNOWN[batch]
        return all(map(torch.equal, run(kernels), expected))

    return agrees


def test_a_faultless_copy_agrees(faulty: Make, agrees: Make) -> None:
    kernels = faulty(None)
    for batch in BATCHES:
        assert agrees(kernels, batch)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(faulty: Make, agrees: Make, fault: str) -> None:
    assert not agrees(faulty(FAULTS[fault]), FAULTS[fault].batch)
