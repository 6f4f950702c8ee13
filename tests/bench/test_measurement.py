"""The order of runs, and what is remembered of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import SamplingParams
from specdec.bench.measurement import Measurement, Run


def measurement(servers: Any, tasks: Any = (), **settings: Any) -> Measurement:
    return Measurement(
        servers,
        tasks,
        params=lambda task, temperature: SamplingParams(temperature=temperature),
        first={t.line: [ord(c) for c in t.turns[0]] for t in tasks},
        raw=True,
        **{
            "temperatures": [0.0],
            "concurrencies": [1],
            "repeat": 1,
            "every_turn": False,
            **settings,
        },
    )


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_every_repetition_has_every_setting_and_all_go_first_in_turn(
    names: int, temperatures: int, concurrencies: int, repeat: int
) -> None:
    made = measurement(
        dict.fromkeys(map(str, range(names))),
        temperatures=[i / 2 for i in range(temperatures)],
        concurrencies=list(range(1, 1 + concurrencies)),
        repeat=repeat,
    )
    order = list(made.order())
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    counts = Counter(setting for _, setting in order)
    assert len(counts) == names * temperatures * concurrencies
    assert set(counts.values()) == {repeat}
    starts = Counter(s.configuration for _, s in order[:: names * temperatures * concurrencies])
    assert max(starts.values()) - min(starts[str(i)] for i in range(names)) <= 1
    # those of one setting stand together: what slows one slows the others
    for at in range(0, len(order), names):
        together = order[at : at + names]
        assert len({(r, s.temperature, s.concurrency) for r, s in together}) == 1


def test_runs_are_remembered_with_their_answers(server: Any, tasks: Any) -> None:
    made = measurement({"a": server(), "b": server()}, tasks("abc", "ab"), repeat=2)
    ended: list[Any] = []
    runs: list[Run] = []
    made.run(ended.append, runs.append)
    assert made.runs == runs
    assert [(r.setting.configuration, r.repetition) for r in runs] == [
        ("a", 0), ("b", 0), ("b", 1), ("a", 1),
    ]  # fmt: skip
    assert all(run.complete and run.tokens == 5 and len(run.answers) == 2 for run in runs)
    assert len(ended) == made.total == 8


def test_a_run_that_is_broken_off_is_remembered_as_such(server: Any, tasks: Any) -> None:
    serves = server()

    def interrupted() -> None:
        if len(serves.steps) == 7:
            raise KeyboardInterrupt

    serves.before_step = interrupted
    made = measurement({"a": serves}, tasks("abc", "ab"), repeat=3)
    told: list[Run] = []
    with pytest.raises(KeyboardInterrupt):
        made.run(lambda _: None, told.append)
    assert [(r.complete, r.tokens, r.seconds, r.rate) for r in made.runs] == [
        (True, 5, 5.0, 1.0),
        (False, 2, 2.0, 1.0),
    ]
    assert len(told) == 1


def test_nothing_is_remembered_of_a_run_without_a_token(server: Any, tasks: Any) -> None:
    serves = server()

    def interrupted() -> None:
        raise KeyboardInterrupt

    serves.before_step = interrupted
    made = measurement({"a": serves}, tasks("abc"))
    with pytest.raises(KeyboardInterrupt):
        made.run(lambda _: None, lambda _: None)
    assert made.runs == []


def test_warming_up_is_not_measured(server: Any, tasks: Any) -> None:
    serves = server()
    made = measurement({"a": serves}, tasks(("ab", "c"), "de"), concurrencies=[1, 2])
    made.warm(1, lambda temperature: SamplingParams(temperature=temperature))
    assert serves.prompts == ["ab", "ab"]
    assert made.runs == []
