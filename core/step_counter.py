"""Counting speculation step by step, for every slot at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.hookspecs import hookimpl
from specdec.metrics import SpeculationMetrics
from specdec.types import SKIP_REASONS

if TYPE_CHECKING:
    from specdec.types import StepReport

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@attrs.frozen(eq=False)
class Tally:
    """Decode steps counted by what happened in them, [..., width]; rows add up.

    drafted, accepted: [..., K + 1] verified steps that had, or accepted, exactly i drafts.
    plain: [..., reasons + 1] steps without drafts by index into `SKIP_REASONS`; the last column,
        which -1 is an index to, counts those without a reason.
    """

    drafted: Ints
    accepted: Ints
    plain: Ints

    @classmethod
    def zeros(cls, k: int, *rows: int) -> Tally:
        """Nothing counted yet, for up to k drafts a step."""
        return cls(
            drafted=np.zeros((*rows, k + 1), np.int64),
            accepted=np.zeros((*rows, k + 1), np.int64),
            plain=np.zeros((*rows, len(SKIP_REASONS) + 1), np.int64),
        )

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints]:
        """The three, to do the same to each."""
        return self.drafted, self.accepted, self.plain

    def metrics(self) -> SpeculationMetrics:
        """The numbers of a single row."""
        drafted, accepted = _at_least(self.drafted), _at_least(self.accepted)
        reasons = zip(SKIP_REASONS, self.plain.tolist(), strict=False)
        return SpeculationMetrics(
            num_drafts=int(self.drafted.sum()),
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            num_plain_steps=int(self.plain.sum()),
            drafted_per_pos=drafted,
            accepted_per_pos=accepted,
            skipped={reason: count for reason, count in reasons if count},
        )


def decodes(report: StepReport) -> tuple[Flags, Flags]:
    """Which requests of a step are counted: those that verified drafts, those without any.

    Neither holds for a chunk of a prompt, or for a request that failed and drew no token.
    """
    drew = report.is_decode & (report.emitted > 0)
    return drew & (report.drafted > 0), drew & (report.drafted == 0)


def _at_least(exactly: Ints) -> list[int]:
    """From steps with exactly i drafts to steps with more than i: the numbers by position."""
    steps: list[int] = exactly[:0:-1].cumsum()[::-1].tolist()
    return steps


class StepCounter:
    """Counts the steps of every slot: an observer.

    num_slots: places for requests. k: the most drafts of a step, 0 without a speculator.
    detailed: keep what every verified step drafted and accepted; memory is 8 bytes for every slot
        and step of the longest request.
    """

    def __init__(self, num_slots: int, k: int, *, detailed: bool = False) -> None:
        self._live = Tally.zeros(k, num_slots)
        self._gone = Tally.zeros(k)
        self._steps = np.zeros((2, num_slots, 64), np.int32) if detailed else None
        self._num_steps = np.zeros(num_slots, np.int64)

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Count every request that drew a token in a decode step."""
        verified, plain = decodes(report)
        # a slot is in a step once, so adding by index loses nothing
        slots, drafted = report.slots[verified], report.drafted[verified]
        accepted = report.accepted[verified]
        self._live.drafted[slots, drafted] += 1
        self._live.accepted[slots, accepted] += 1
        if self._steps is not None and len(slots):
            self._record(self._steps, slots, drafted, accepted)
        self._live.plain[report.slots[plain], report.skipped[plain]] += 1

    def take(self, slot: int) -> SpeculationMetrics:
        """Return the numbers of the slot's request and forget it; they stay in the totals."""
        metrics = self.peek(slot)
        self._num_steps[slot] = 0
        for gone, live in zip(self._gone.arrays, self._live.arrays, strict=True):
            gone += live[slot]
            live[slot] = 0
        return metrics

    def peek(self, slot: int) -> SpeculationMetrics:
        """The numbers of the slot's request so far."""
        metrics = Tally(*(live[slot] for live in self._live.arrays)).metrics()
        if self._steps is not None:
            steps = self._steps[:, slot, : self._num_steps[slot]]
            metrics.per_step_drafted, metrics.per_step_accepted = steps.tolist()
        return metrics

    @property
    def totals(self) -> SpeculationMetrics:
        """Everything counted so far, by requests that still run as well; no single steps."""
        both = zip(self._gone.arrays, self._live.arrays, strict=True)
        return Tally(*(gone + live.sum(axis=0) for gone, live in both)).metrics()

    def _record(self, steps: NDArray[np.int32], slots: Ints, drafted: Ints, accepted: Ints) -> None:
        at = self._num_steps[slots]
        if at.max() == steps.shape[2]:
            self._steps = steps = np.concatenate((steps, np.zeros_like(steps)), axis=2)
        steps[:, slots, at] = drafted, accepted
        self._num_steps[slots] += 1
