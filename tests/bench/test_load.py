"""Requests in flight: how many, how they are timed, and what is left when it is broken off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.bench.load import Answer, Load


def load(server: Any, tasks: Any, concurrency: int = 1, **settings: Any) -> Load:
    return Load(
        server,
        tasks,
        concurrency=concurrency,
        first={t.line: [ord(c) for c in t.turns[0]] for t in tasks},
        params=lambda task: SamplingParams(),
        raw=True,
        **{"every_turn": False, **settings},
    )


@pytest.mark.parametrize("concurrency", [1, 2, 3, 5])
def test_so_many_are_in_flight_until_too_few_are_left(
    server: Any, tasks: Any, concurrency: int
) -> None:
    serves = server()
    running = load(serves, tasks("abcd", "ab", "abcdef", "a", "abc"), concurrency)
    running.run()
    assert serves.most == concurrency
    left = 5
    for flying in serves.steps:
        assert flying == min(concurrency, left) or flying < concurrency
    assert sorted(a.task.line for a in running.answers) == [1, 2, 3, 4, 5]
    assert running.tokens == 4 + 2 + 6 + 1 + 3
    # there is always one in the place of one that ended
    full = [flying for flying in serves.steps if flying == concurrency]
    assert serves.steps == full + [f for f in serves.steps if f < concurrency]


def test_an_answer_is_timed_from_its_own_request_on(server: Any, tasks: Any) -> None:
    running = load(server(per_step=2), tasks("abcde", "ab"))
    running.run()
    first, second = running.answers
    assert (first.first, first.seconds) == (1.0, 3.0)
    assert first.gaps == [(1.0, 2), (1.0, 1)]
    assert (second.first, second.seconds, second.gaps) == (1.0, 1.0, [])
    assert running.seconds == 4.0
    assert first.tokens.tolist() == [ord(c) for c in "edcba"]
    assert (first.prompt_tokens, first.finish_reason, first.error) == (5, "length", None)
    assert first.speculation.num_accepted_tokens == 3


def test_later_turns_follow_the_models_own_answers(server: Any, tasks: Any) -> None:
    serves = server()
    ended: list[Answer] = []
    running = load(serves, tasks(("ab", "c"), "de"), every_turn=True, ended=ended.append)
    running.run()
    assert serves.prompts == ["ab", "abba\nc", "de"]
    assert [(a.task.line, a.turn) for a in ended] == [(1, 0), (1, 1), (2, 0)]
    assert ended == running.answers


def test_only_first_turns_are_answered_unless_all_are_asked_for(server: Any, tasks: Any) -> None:
    serves = server()
    load(serves, tasks(("ab", "c"))).run()
    assert serves.prompts == ["ab"]


def test_failures_are_answers_too_and_end_a_conversation(server: Any, tasks: Any) -> None:
    running = load(server(), tasks("a!", ("a?", "b"), ("ab", "b!"), "c"), every_turn=True)
    running.run()
    assert [(a.task.line, a.turn, a.error) for a in running.answers] == [
        (1, 0, "no shouting"),
        (2, 0, "no questions"),
        (3, 0, None),
        (3, 1, "no shouting"),
        (4, 0, None),
    ]
    assert running.answers[0].first is None


def test_what_is_broken_off_is_aborted_and_counted_so_far(server: Any, tasks: Any) -> None:
    serves = server()

    def interrupted() -> None:
        if len(serves.steps) == 3:
            raise KeyboardInterrupt

    serves.before_step = interrupted
    running = load(serves, tasks("ab", "abcdef", "abcdef"), 2)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    assert [a.task.line for a in running.answers] == [1]
    assert (running.tokens, running.seconds) == (2 + 3 + 1, 3.0)
    assert all(request.aborted for request in serves.requests.values())
    assert len(serves.requests) == 2
    # what those still had to say belongs to nobody
    serves.before_step = lambda: None
    again = load(serves, tasks("xy"))
    again.run()
    assert [a.tokens.tolist() for a in again.answers] == [[ord("y"), ord("x")]]


def test_parameters_are_those_of_the_task(server: Any, tasks: Any) -> None:
    serves, seen = server(), []
    add: Callable[..., str] = serves.add_request

    def watched(prompt: Any, params: Any) -> str:
        seen.append(params.seed)
        return add(prompt, params)

    serves.add_request = watched
    every = tasks("a", "b")
    running = load(serves, every)
    running.params = lambda task: SamplingParams(seed=task.line)
    running.run()
    assert seen == [1, 2]
