"""Where every n-gram last occurred: exact, and at the same cost for any length of context.

An n-gram is named by its *end*, the index of the token after it, which is also where its
continuation starts. Each slot has one hash table per size of n-gram; a cell holds an end, or 0
if it is free. The tokens themselves stay in the history and are compared whenever a cell is
read: n-grams with the same hash are told apart, and the later one lives in the next free cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

FACTOR = 0x2545F4914F6CDD1D  # odd and without pattern: products wrap around and scatter
PIECE = 1 << 18  # tokens of n-grams added at once, which bounds the scratch memory


def spread(sums: Ints) -> Ints:
    """Mix the bits of every sum, so that the low ones will do as a hash."""
    mixed: Ints = (sums ^ (sums >> 29)) * FACTOR
    return mixed ^ (mixed >> 32)


class NgramIndex:
    """The last end of every n-gram of `shortest` to `longest` tokens, by slot.

    Every method takes a whole batch: no Python per token, and per request only when tables move.
    """

    def __init__(self, slots: int, shortest: int, longest: int) -> None:
        self.sizes = np.arange(longest, shortest - 1, -1)  # the longest first, as `find` wants
        self.table = np.zeros(0, np.int32)  # the tables of all slots
        self.start = np.zeros(slots, np.int64)  # where those of a slot begin
        self.width = np.zeros(slots, np.int64)  # cells of each of them: a power of two, or 0
        self.done = np.zeros(slots, np.int64)  # n-grams that end here or before are in
        self._taken = 0  # cells of `table` given to a slot so far, also to those that left
        self._back = np.arange(1, longest + 1)
        self._powers = np.cumprod(np.full(longest, FACTOR, np.int64))
        self._ignored = self._back > self.sizes[:, None]  # [sizes, longest] not of the n-gram

    def add(self, history: Ints, slots: Ints, length: Ints) -> None:
        """Take in the n-grams that have a continuation: those that end before `length`."""
        self._make_room(slots, length)
        done = self.done[slots]
        count = np.maximum(length - 1 - done, 0)
        owner = np.repeat(slots, count)
        ends = np.arange(1, len(owner) + 1) + np.repeat(done + count - count.cumsum(), count)
        piece = max(1, PIECE // self._ignored.size)
        for at in range(0, len(owner), piece):
            self._walk(history, owner[at : at + piece], ends[at : at + piece], write=True)
        self.done[slots] = done + count

    def find(self, history: Ints, slots: Ints, length: Ints, shortest: int = 1) -> Ints:
        """Return the last end of the longest n-gram that ends the sequence too; 0 if none.

        shortest: the smallest n-gram that counts, of those that are kept.
        """
        known = self._walk(history, slots, length, write=False) * (self.sizes >= shortest)
        longest = (known > 0).argmax(axis=1)[:, None]
        return np.take_along_axis(known, longest, axis=1)[:, 0]

    def drop(self, slots: Ints) -> None:
        """Forget what these slots held."""
        self.width[slots] = self.done[slots] = 0
        if 4 * len(self.sizes) * self.width.sum() <= len(self.table):
            self._move(0)

    def _walk(self, history: Ints, slots: Ints, ends: Ints, *, write: bool) -> Ints:
        """Return the last end known for the n-grams at `ends`, [ends, sizes]; or make it `ends`.

        An n-gram starts at the cell that its hash names and goes on to the next one until it
        meets itself or a free cell. All of them walk at once: every round, those that are
        there stop. For writing, `ends` have to ascend within a slot.
        """
        window = self._window(history, slots, ends)
        place = spread((window * self._powers).cumsum(axis=1)[:, self.sizes - 1]).ravel()
        known = np.zeros(len(place), np.int64)
        walking = np.arange(len(place))
        while len(walking):
            gram, size = np.divmod(walking, len(self.sizes))
            owner = slots[gram]
            width = self.width[owner]
            cell = self.start[owner] + size * width + (place[walking] & (width - 1))
            if write:  # where several meet in a free cell, numpy keeps the last: the others go on
                free = self.table[cell] == 0
                self.table[cell[free]] = ends[gram[free]]
            end = self.table[cell].astype(np.int64)
            same = self._window(history, owner, end) == window[gram]
            there = (same | self._ignored[size]).all(axis=1)
            known[walking[there]] = end[there]
            if write:
                self.table[cell[there]] = ends[gram[there]]
            walking = walking[~there & (end > 0)]
            place[walking] += 1
        return known.reshape(-1, len(self.sizes))

    def _window(self, history: Ints, slots: Ints, ends: Ints) -> Ints:
        """Return the tokens before `ends`, backwards, [ends, longest]; -1 before the first."""
        at = ends[:, None] - self._back
        return np.where(at >= 0, history[slots[:, None], np.maximum(at, 0)], -1)

    def _make_room(self, slots: Ints, length: Ints) -> None:
        """Give slots that would be more than half full new tables, to be filled from the start."""
        tight = self.width[slots] < 2 * length
        if not tight.any():
            return
        slots, length = slots[tight], length[tight]
        width = 1 << np.ceil(np.log2(4 * length)).astype(np.int64)
        cells = len(self.sizes) * width
        self.width[slots] = self.done[slots] = 0
        if self._taken + cells.sum() > len(self.table):
            self._move(int(cells.sum()))
        self.width[slots] = width
        self.start[slots] = self._taken + cells.cumsum() - cells
        self._taken += int(cells.sum())

    def _move(self, extra: int) -> None:
        """Move the tables in use into a new array, with room for `extra` cells and as much again.

        What left stays behind. numpy asks for zeros that take memory once they are written.
        """
        live = np.flatnonzero(self.width)
        cells = len(self.sizes) * self.width[live]
        old, self.table = self.table, np.zeros(2 * (int(cells.sum()) + extra), np.int32)
        self._taken = 0
        for slot, start, count in zip(live, self.start[live], cells, strict=True):
            self.table[self._taken : self._taken + count] = old[start : start + count]
            self.start[slot] = self._taken
            self._taken += int(count)
