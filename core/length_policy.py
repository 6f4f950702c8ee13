"""How many drafts a request gets in the next step: one object, asked once a step.

A policy sees slots and counts, never a method. It may shorten drafts only by what is known
before they are drawn, so every verification method stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class LengthPolicy(Protocol):
    """Chooses k per request and step."""

    def choose(self, slots: Ints, running: int) -> Ints:
        """Drafts wanted for each slot, [batch], at most the configured number.

        slots: [batch], valid slots only. running: requests in the step.
        """

    def observe(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Learn what became of the drafts just verified: [batch] each; drafted may be 0."""

    def reset(self, slot: int) -> None:
        """A new request has the slot."""


class FixedLength:
    """As many drafts as configured, or as the table says for the number of running requests."""

    def __init__(self, drafts: int, by_batch: Sequence[int] | None = None) -> None:
        self.drafts = drafts
        self.by_batch = list(by_batch) if by_batch is not None else None

    def limit(self, running: int) -> int:
        """Drafts per request while so many run."""
        if self.by_batch is None:
            return self.drafts
        return self.by_batch[min(running, len(self.by_batch) - 1)]

    def choose(self, slots: Ints, running: int) -> Ints:
        """The same number for everybody."""
        return np.full(slots.shape, self.limit(running), dtype=np.int64)

    def observe(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Learn nothing."""

    def reset(self, slot: int) -> None:
        """Forget nothing."""


class FallingLength(FixedLength):
    """Fewer drafts for a request whose drafts fail, more again when they hold.

    Each slot keeps a running mean of accepted drafts per verified step and is given about one
    draft more than that, never none: one draft is what it takes to notice that they hold again.

    weight: of the newest step in the running mean.
    """

    def __init__(
        self,
        drafts: int,
        max_num_seqs: int,
        by_batch: Sequence[int] | None = None,
        weight: float = 0.3,
    ) -> None:
        super().__init__(drafts, by_batch)
        self.weight = weight
        self._mean = np.full(max_num_seqs, float(drafts))

    def choose(self, slots: Ints, running: int) -> Ints:
        """One more than were accepted lately."""
        wanted = np.ceil(self._mean[slots] + 0.5).astype(np.int64)
        return np.clip(wanted, 1, self.drafts).clip(max=self.limit(running))

    def observe(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Move the mean of every slot that had drafts towards what was accepted.

        A block that was accepted whole says only that at least so many hold: it counts for the
        configured number, so that a request climbs back as quickly as it fell.
        """
        tried = drafted > 0
        which = slots[tried]
        held = np.where(accepted >= drafted, self.drafts, accepted)[tried]
        self._mean[which] += self.weight * (held - self._mean[which])

    def reset(self, slot: int) -> None:
        """Start with as many drafts as configured."""
        self._mean[slot] = float(self.drafts)
