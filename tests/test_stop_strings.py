"""A stop string is found where it completes, and no more text is held back than may begin one."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.stop_strings import Occurrence, StopStrings

few_letters = st.text(alphabet="abé", max_size=24)
some_stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, at: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    places = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[i:j] for i, j in itertools.pairwise(places)]


def first(text: str, stops: Sequence[str]) -> Occurrence | None:
    """The definition: look at every end, and there at the longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return Occurrence(stop, end - len(stop), end)
    return None


def beginning(text: str, stops: Sequence[str]) -> int:
    """The definition: the longest end of the text that a stop string begins with."""
    ends = range(len(text) + 1)
    return max(n for n in ends if any(s.startswith(text[len(text) - n :]) for s in stops))


@given(text=few_letters, stops=some_stops, at=st.lists(st.integers(0, 24), max_size=6))
@example(text="aab", stops=["ab", "aab"], at=[])
@example(text="abaab", stops=["aba", "ba"], at=[1, 2])
def test_the_stop_string_that_completes_first_is_found_in_any_pieces(
    text: str, stops: list[str], at: list[int]
) -> None:
    search = StopStrings(stops)
    expected = first(text, stops)
    found = None
    for piece in cut(text, at):
        seen = search.peek(piece)
        found = search.push(piece)
        assert found == seen
        if found is not None:
            break
    assert found == expected


@given(text=few_letters, stops=some_stops, at=st.lists(st.integers(0, 24), max_size=6))
def test_exactly_what_may_begin_a_stop_string_is_held(
    text: str, stops: list[str], at: list[int]
) -> None:
    search = StopStrings(stops)
    so_far = ""
    for piece in cut(text, at):
        so_far += piece
        if search.push(piece) is not None:
            return
        assert search.held == beginning(so_far, stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ab", "aab"], "aab", Occurrence("aab", 0, 3)),
        (["aab", "ab"], "cab", Occurrence("ab", 1, 3)),
        (["abcd", "bc"], "abcd", Occurrence("bc", 1, 3)),
        (["bc", "abcd", "c"], "abcd", Occurrence("bc", 1, 3)),
        (["aaa"], "aaaa", Occurrence("aaa", 0, 3)),
        (["a", "a"], "ba", Occurrence("a", 1, 2)),
        (["\u0301"], "e\u0301", Occurrence("\u0301", 1, 2)),
        (["\n\n"], "a\n\n\n", Occurrence("\n\n", 1, 3)),
    ],
    ids=["same end", "inside", "inner first", "innermost", "itself", "twice", "mark", "lines"],
)
def test_of_several_the_first_to_complete_wins_then_the_longest(
    stops: list[str], text: str, expected: Occurrence
) -> None:
    assert StopStrings(stops).push(text) == expected


def test_text_that_turns_out_to_begin_nothing_is_let_go() -> None:
    search = StopStrings(["STOP", "TOP HAT"])
    held = []
    for letter in "STOLSTxSTO":
        search.push(letter)
        held.append(search.held)
    assert held == [1, 2, 3, 0, 1, 2, 0, 1, 2, 3]


def test_two_searches_for_the_same_stop_strings_do_not_disturb_each_other() -> None:
    one, other = StopStrings(["ab"]), StopStrings(["ab"])
    one.push("a")
    assert (one.held, other.held) == (1, 0)
    assert other.push("b") is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(AssertionError, match="empty"):
        StopStrings(["a", ""])
