"""Where every n-gram last occurred: exact, and at the same cost for any length of context.

Each slot has a hash table per size of n-gram. A cell holds the *end* of an n-gram (the index of
the token after it), 0 if it is empty. The tokens themselves stay in the history and are compared
whenever a cell is read, so that two n-grams with the same hash are told apart. A cell that is
taken by another n-gram sends the search to the next one (open addressing, linear probing).

All functions take the whole batch: there is no Python per request and none per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MULTIPLIER = np.int64(0x2545F4914F6CDD1D)  # odd and without pattern; any such number does
PIECE = 1 << 16  # n-grams inserted at once: bounds the scratch memory of a long prompt


def mix(sums: Ints) -> Ints:
    """Spread the sums of n-grams so that their low bits can serve as hashes."""
    sums = sums ^ (sums >> 32)
    sums = sums * MULTIPLIER
    return sums ^ (sums >> 32)


@attrs.frozen(eq=False)
class Grams:
    """N-grams of the history, as many of every size: all arrays are [sizes, grams] or flat."""

    window: Ints  # [grams, longest] tokens backwards from the end; -1 before the first token
    ends: Ints


class NgramIndex:
    """The last occurrence of every n-gram of `shortest` to `longest` tokens, by slot."""

    def __init__(self, slots: int, shortest: int, longest: int) -> None:
        self.sizes = np.arange(longest, shortest - 1, -1)  # longest first: `find` wants that
        self.table = np.zeros(0, np.int32)
        self.cells = np.zeros(slots, np.int64)  # of one table of the slot: 0, or a power of two
        self.start = np.zeros(slots, np.int64)  # the slot's tables lie side by side from here
        self.indexed = np.zeros(slots, np.int64)  # n-grams that end here or before are in
        self._used = 0  # cells of `table` that were given away
        self._powers = np.cumprod(np.full(longest, MULTIPLIER))
