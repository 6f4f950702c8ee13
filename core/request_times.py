"""When the request of every slot started and was given tokens, told from step reports alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specdec.types import EndedRequest, StepReport

_STARTED, _FIRST, _LAST, _TOKENS = range(4)


class EndedTimes(NamedTuple):
    """Seconds of a request that ended with one token or more.

    prefill: from its first slot to its first token. decode: from there to its last token.
    inference: both. per_token: decode by the tokens after the first; nan if there are none.
    """

    prefill: float
    decode: float
    inference: float
    per_token: float


class RequestTimes:
    """Follows requests from their first slot to their end, also through preemptions.

    What a report does not say is not here: how long a request waited for its first slot.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((8, 4))  # by slot
        self._names: dict[int, str] = {}
        self._aside: dict[str, NDArray[np.float64]] = {}  # rows of preempted requests

    def observe(
        self, report: StepReport, now: float
    ) -> tuple[NDArray[np.float64], list[EndedTimes]]:
        """Take in a step that ended `now`.

        Return the seconds between its tokens and those before, for every request that was given
        some, and the times of those that ended.
        """
        # those that ended between steps have left their slots by now
        left = () if report.changes is None else report.changes.finished
        between = [e for e in report.ended if e.slot in left and self._name_of(e)]
        times = self._end(between)
        self._move(report, now - report.seconds)
        given = report.kept > 0
        slots, tokens = report.slots[given], report.kept[given]
        self._reach(int(slots.max(initial=0)))
        rows = self._rows[slots]
        again = rows[:, _TOKENS] > 0
        rows[:, _FIRST] = np.where(again, rows[:, _FIRST], now)
        gaps = now - rows[again, _LAST]
        rows[:, _LAST] = now
        rows[:, _TOKENS] += tokens
        self._rows[slots] = rows
        return gaps, times + self._end(e for e in report.ended if e not in between)

    def _move(self, report: StepReport, start: float) -> None:
        """Follow who left a slot and who got one, before the forward that began at `start`."""
        changes = report.changes
        if changes is None:
            return
        for slot in changes.finished:
            self._names.pop(slot, None)
        for slot in changes.preempted:
            name = self._names.pop(slot, None)
            if name is not None:
                self._aside[name] = self._rows[slot].copy()
        for info in changes.arrived:
            self._reach(info.slot)
            row = self._aside.pop(info.request_id, None)
            self._rows[info.slot] = (start, 0, 0, 0) if row is None else row
            self._names[info.slot] = info.request_id

    def _name_of(self, ended: EndedRequest) -> bool:
        """Whether the slot that it had is still known as its."""
        return self._names.get(ended.slot) == ended.request_id

    def _end(self, requests: Iterable[EndedRequest]) -> list[EndedTimes]:
        times = []
        for ended in requests:
            row = self._aside.pop(ended.request_id, None)
            if self._name_of(ended):
                del self._names[ended.slot]
                row = self._rows[ended.slot]
            if row is None or not row[_TOKENS]:
                continue
            started, first, last, tokens = row.tolist()
            times.append(
                EndedTimes(
                    prefill=first - started,
                    decode=last - first,
                    inference=last - started,
                    per_token=(last - first) / (tokens - 1) if tokens > 1 else math.nan,
                )
            )
        return times

    def _reach(self, slot: int) -> None:
        """Make room for the slot."""
        short = slot + 1 - len(self._rows)
        if short > 0:
            self._rows = np.pad(self._rows, ((0, max(short, len(self._rows))), (0, 0)))
