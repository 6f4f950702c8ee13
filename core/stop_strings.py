"""Stop strings, searched in a text that comes in pieces."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

import attrs


@attrs.frozen
class Occurrence:
    """A stop string in the text; start, end: characters from the first one pushed."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Finds the stop string that completes first; of two that complete together the longer one.

    Each character is looked at once. Stop strings are not empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string.

        No more than that: without them no beginning is left. Means nothing once one was found.
        """
        return self._automaton.depth[self._state]

    def push(self, text: str) -> Occurrence | None:
        """Search on in the next piece; nothing is pushed after a stop string was found."""
        self._state, found = self._search(text)
        self._length += len(text)
        return found

    def peek(self, text: str) -> Occurrence | None:
        """What `push` would find, without moving on."""
        return self._search(text)[1]

    def _search(self, text: str) -> tuple[int, Occurrence | None]:
        automaton, state = self._automaton, self._state
        for end, letter in enumerate(text, self._length + 1):
            state = automaton.step(state, letter)
            stop = automaton.stop[state]
            if stop is not None:
                return state, Occurrence(stop, end - len(stop), end)
        return state, None


class _Automaton:
    """The automaton of Aho and Corasick.

    A state stands for the longest end of the text that begins a stop string; 0 for none. By state:
    next: the state after a letter, if it makes the beginning longer. depth: letters of the
    beginning. stop: the longest stop string that completes. shorter: the state of the next
    shorter end that begins a stop string too, for a letter that does not fit.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is everywhere"
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.stop: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.shorter = [0] * len(self.next)
        self._link()

    def step(self, state: int, letter: str) -> int:
        """The state after one more letter."""
        while state and letter not in self.next[state]:
            state = self.shorter[state]
        return self.next[state].get(letter, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self.next[state]:
                self.next[state][letter] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.stop.append(None)
            state = self.next[state][letter]
        self.stop[state] = stop

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:  # by depth: whatever is shorter is linked already
            state = queue.popleft()
            self.stop[state] = self.stop[state] or self.stop[self.shorter[state]]
            for letter, longer in self.next[state].items():
                self.shorter[longer] = self.step(self.shorter[state], letter)
                queue.append(longer)


# the completions of one prompt, and often all prompts, have the same stop strings
_automaton = functools.lru_cache(maxsize=16)(_Automaton)
