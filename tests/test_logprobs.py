"""The log of a completion's log-probabilities, and the dicts made of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specdec.logprobs import Logprob, LogprobArrays, LogprobLog, PromptLogprobLog


def entries(*rows: Sequence[tuple[int, float, int]]) -> LogprobArrays:
    """One row per token: (id, log-probability, rank) of itself and of the likeliest."""
    made = LogprobArrays.empty(len(rows), len(rows[0]) - 1)
    for i, row in enumerate(rows):
        for j, (token, logprob, rank) in enumerate(row):
            made.ids[i, j], made.logprobs[i, j], made.ranks[i, j] = token, logprob, rank
    return made


def counted(tokens: int, n: int = 1, first: int = 0) -> LogprobArrays:
    """Tokens `first`, `first` + 1, ..., each with a log-probability of -(id + 1)."""
    if not tokens:
        return LogprobArrays.empty(0, n)
    best = [(90 + j, -0.5, 1) for j in range(n)]
    return entries(*([(i, -1.0 - i, 5), *best] for i in range(first, first + tokens)))


class Words:
    """A tokenizer that notes its calls and lacks the ids from 50 on."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.decoded: list[list[int]] = []

    def decode(self, ids: list[int]) -> str:
        self.decoded.append(ids)
        if ids[0] >= 50:
            raise TypeError("sequence item 0: expected str instance, NoneType found")
        return f"{self.letter}{ids[0]}"


def words(letter: str = "w") -> Any:
    return Words(letter)


def test_the_token_comes_first_then_the_likeliest_in_order() -> None:
    log = LogprobLog(2)
    log.append(entries([(7, -3.0, 9), (4, -0.5, 1), (2, -1.0, 2)]))
    (found,) = log.as_dicts(words())
    assert list(found.items()) == [
        (7, Logprob(-3.0, 9, "w7")),
        (4, Logprob(-0.5, 1, "w4")),
        (2, Logprob(-1.0, 2, "w2")),
    ]


def test_a_token_among_the_likeliest_counts_once_and_stays_first() -> None:
    log = LogprobLog(2)
    log.append(entries([(2, -1.0, 2), (4, -0.5, 1), (2, -1.0, 2)]))
    (found,) = log.as_dicts(None)
    assert list(found) == [2, 4]
    assert found[2] == Logprob(-1.0, 2, None)


def test_without_likeliest_the_token_is_alone() -> None:
    log = LogprobLog(0)
    log.append(counted(2, n=0))
    assert log.as_dicts(None) == [{0: Logprob(-1.0, 5)}, {1: Logprob(-2.0, 5)}]


def test_values_are_plain_numbers_ready_for_json() -> None:
    log = LogprobLog(1)
    log.append(counted(1))
    for token, said in log.as_dicts(None)[0].items():
        assert {type(token), type(said.rank)} == {int}
        assert type(said.logprob) is float
    assert type(log.cumulative) is float


@given(st.lists(st.integers(0, 5)), st.data())
def test_pieces_give_what_the_whole_gives(sizes: list[int], data: st.DataObject) -> None:
    whole, log = LogprobLog(2), LogprobLog(2)
    read: list[dict[int, Logprob]] = []
    whole.append(counted(sum(sizes), n=2))
    for i, size in enumerate(sizes):
        log.append(counted(size, n=2, first=sum(sizes[:i])))
        if data.draw(st.booleans()):
            read += log.as_dicts(None, start=len(read))
    read += log.as_dicts(None, start=len(read))
    assert read == log.as_dicts(None) == whole.as_dicts(None)
    assert log.cumulative == whole.cumulative
    assert len(log) == len(whole) == sum(sizes)


def test_dicts_are_made_once_and_tokens_decoded_once() -> None:
    log, tokenizer = LogprobLog(1), words()
    log.append(counted(2))
    first = log.as_dicts(tokenizer)
    log.append(counted(1))
    again = log.as_dicts(tokenizer)
    assert len(first) == 2, "the list of an earlier output does not grow"
    assert again[0] is first[0]
    assert again[1] is first[1]
    assert tokenizer.decoded == [[0], [90], [1]]


def test_an_id_that_the_tokenizer_lacks_has_no_text() -> None:
    log = LogprobLog(1)
    log.append(counted(1))
    assert [x.decoded_token for x in log.as_dicts(words())[0].values()] == ["w0", None]


def test_another_tokenizer_decodes_anew() -> None:
    log = LogprobLog(0)
    log.append(counted(1, n=0))
    assert log.as_dicts(None)[0][0].decoded_token is None
    assert log.as_dicts(words())[0][0].decoded_token == "w0"
    assert log.as_dicts(words("v"))[0][0].decoded_token == "v0"


def test_an_excluded_token_makes_the_sum_minus_infinity() -> None:
    log = LogprobLog(0)
    log.append(entries([(1, -inf, 9)], [(2, -1.0, 1)]))
    assert log.cumulative == -inf


def test_nothing_is_said_of_the_first_token_of_a_prompt() -> None:
    log = PromptLogprobLog(0)
    assert log.as_dicts(None) == [None]
    log.append(counted(1, n=0))
    log.append(counted(1, n=0, first=1))
    assert log.as_dicts(None) == [None, {0: Logprob(-1.0, 5)}, {1: Logprob(-2.0, 5)}]
    assert len(log) == 2, "the entries it has, without the None"


def test_what_nobody_reads_takes_little_memory() -> None:
    log, piece = LogprobLog(20), counted(1, n=20)
    tracemalloc.start()
    try:
        for _ in range(1000):
            log.append(piece)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * 1000 * 21 * 12, "twelve bytes for an id, its log-probability and its rank"
