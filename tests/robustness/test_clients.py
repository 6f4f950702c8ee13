"""Clients that stop reading, come at the wrong time or call back: others get their own tokens."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LLM, ConfigError, PromptError, RequestOutput, SamplingParams, hookimpl
from specdec.logits_processors import LogitsRows
from specdec.testing import ConstantSpeculator, OracleSpeculator, toy_target

VOCAB = 32
ORACLE = {
    "method": OracleSpeculator,
    "streams": {(n,): list(range(n + 1, VOCAB)) for n in range(VOCAB)},
    "num_speculative_tokens": 4,
}
CONFIGS = pytest.mark.parametrize("config", [None, ORACLE], ids=["plain", "drafts"])
Clean = Callable[[LLM], None]


def counting() -> Any:
    """After token t comes t + 1; the words of the tokenizer are 4 to 16, its end is 1."""
    return toy_target(torch.eye(VOCAB).roll(1, dims=1) * 20)


def count(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def greedy(most: int | None = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **values)


def generate(llm: LLM, first: int = 3, most: int = 8, **values: Any) -> RequestOutput:
    return llm.generate([[first]], greedy(most, **values), use_tqdm=False)[0]


def drain(llm: LLM) -> dict[str, RequestOutput]:
    """The last outputs of all requests of `add_request`."""
    last: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        last |= {o.request_id: o for o in llm.step()}
    return last


# -- not reading -------------------------------------------------------------


@CONFIGS
def test_a_stream_that_is_kept_and_not_read_ends_by_itself(config: Any, clean: Clean) -> None:
    with LLM(counting(), speculative_config=config) as llm:
        stream = llm.stream([[5]], greedy(20))
        assert next(stream).outputs[0].token_ids == [6]
        for _ in range(5):
            assert generate(llm).outputs[0].token_ids == count(4, 8)
        clean(llm)
        (last,) = stream  # what was not read comes as one output
        assert last.finished
        assert last.outputs[0].token_ids == count(6, 20)


@CONFIGS
def test_requests_that_nobody_steps_for_end_while_others_run(config: Any) -> None:
    with LLM(counting(), speculative_config=config, max_num_seqs=4) as llm:
        names = [llm.add_request([5], greedy(20, logprobs=3, output_kind="delta")) for _ in "123"]
        for _ in range(6):
            assert generate(llm, logprobs=1).outputs[0].token_ids == count(4, 8)
        assert not llm._loaded.engine.busy
        assert llm.num_unfinished_requests == 3
        last = {o.request_id: o for o in llm.step()}
        assert not llm.has_unfinished_requests()
    assert sorted(last) == sorted(names)
    assert [o.outputs[0].token_ids for o in last.values()] == [count(6, 20)] * 3
    assert [len(o.outputs[0].logprobs or []) for o in last.values()] == [20] * 3


@CONFIGS
def test_what_is_not_read_takes_no_more_memory_with_every_step(config: Any) -> None:
    with LLM(counting(), speculative_config=config, max_num_seqs=4, max_model_len=256) as llm:
        stream = llm.stream([[5]], greedy(6, logprobs=2))
        next(stream)
        unread = [llm.add_request([5], greedy(6, logprobs=2, n=1)) for _ in "12"]

        def work(rounds: int) -> None:
            for _ in range(rounds):
                generate(llm, logprobs=2)
                for other in llm.stream([[7]], greedy(6)):
                    del other

        work(2)
        gc.collect()
        tracemalloc.start()
        try:
            work(2)
            before = tracemalloc.get_traced_memory()[0]
            work(6)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 48_000
        assert sorted(drain(llm)) == sorted(unread)
        assert next(stream).finished


def test_outputs_that_a_caller_drops_are_not_kept(clean: Clean) -> None:
    with LLM(counting(), max_num_seqs=8) as llm:
        for n in range(120):
            llm.add_request([n % 9], greedy(4, output_kind=["delta", "final_only"][n % 2]))
            if n % 3 == 0:
                llm.abort_request(str(n // 2))
            llm.step()
        drain(llm)
        clean(llm)


# -- an end in the middle of a step ------------------------------------------


class Knot:
    """Holds a stream in a circle: only the collector finds out that nobody reads it."""

    def __init__(self, stream: Iterator[RequestOutput]) -> None:
        self.stream, self.knot = stream, self


ABANDONED: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"stop": ["zebra"]},
    {"temperature": 1.0, "seed": 1, "n": 3},
    {"bad_words": ["."]},
]


@CONFIGS
@pytest.mark.parametrize("values", ABANDONED, ids=lambda v: ",".join(v) or "nothing")
def test_a_stream_that_is_collected_during_a_step_harms_nobody(
    values: dict[str, Any], config: Any, tokenizer: Any, clean: Clean
) -> None:
    collected: list[int] = []

    def collecting(rows: LogitsRows, logits: Tensor) -> Tensor:
        if not collected:
            collected.append(gc.collect())  # as may happen at any time
        return logits

    given = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **values}
    gc.disable()
    try:
        with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
            knot = Knot(llm.stream([[3]], SamplingParams(**given)))
            next(knot.stream)
            del knot
            output = generate(llm, 9, logits_processors=[collecting], logprobs=1)
            clean(llm)
    finally:
        gc.enable()
    assert (output.error, output.outputs[0].token_ids) == (None, count(10, 8))


@CONFIGS
@pytest.mark.parametrize("values", ABANDONED, ids=lambda v: ",".join(v) or "nothing")
def test_a_request_may_be_aborted_from_within_a_step(
    values: dict[str, Any], config: Any, tokenizer: Any, clean: Clean
) -> None:
    given = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **values}
    with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:

        def tired(rows: LogitsRows, logits: Tensor) -> Tensor:
            if rows.position(0) > 3:
                llm.abort_request("victim")
            return logits

        llm.add_request([9], greedy(logits_processors=[tired], logprobs=1), request_id="tired")
        llm.add_request([3], SamplingParams(**given), request_id="victim")
        last = drain(llm)
        clean(llm)
    assert (last["tired"].error, last["tired"].outputs[0].token_ids) == (None, count(10, 8))
    assert {c.finish_reason for c in last["victim"].outputs} == {"abort"}
    if not given["temperature"]:
        ids = last["victim"].outputs[0].token_ids
        assert ids == count(4, len(ids))


@CONFIGS
@pytest.mark.parametrize("call", ["generate", "step", "stream", "close"])
def test_a_step_within_a_step_is_refused_or_right(call: str, config: Any, tokenizer: Any) -> None:
    called: list[str] = []
    llm = LLM(counting(), tokenizer=tokenizer, speculative_config=config)
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: generate(llm, 20, 3),
        "step": llm.step,
        "stream": lambda: list(llm.stream([[20]], greedy(3))),
        "close": llm.close,
    }

    def nesting(rows: LogitsRows, logits: Tensor) -> Tensor:
        if rows.position(0) > 3 and not called:
            called.append(call)
            calls[call]()
        return logits

    llm.add_request([9], greedy(logits_processors=[nesting]), request_id="nesting")
    llm.add_request([3], greedy(), request_id="other")
    last = drain(llm)
    llm.close()
    assert called
    ids = last["nesting"].outputs[0].token_ids
    assert ids == count(10, len(ids))
    if call == "close":
        ids = last["other"].outputs[0].token_ids
        assert ids == count(4, len(ids))
        return
    assert last["nesting"].error is not None or len(ids) == 8
    # no token of somebody else's may come twice or be left out
    assert (last["other"].error, last["other"].outputs[0].token_ids) == (None, count(4, 8))


@CONFIGS
def test_a_request_may_be_added_from_within_a_step(config: Any, clean: Clean) -> None:
    class Follower:
        llm: LLM | None = None

        @hookimpl
        def step_finished(self) -> None:
            if self.llm is not None:
                self.llm.add_request([20], greedy(4), request_id="observer")
                self.llm = None

    follower = Follower()
    with LLM(counting(), speculative_config=config, observers=[follower]) as llm:
        follower.llm = llm

        def adding(rows: LogitsRows, logits: Tensor) -> Tensor:
            if rows.position(0) == 1:
                llm.add_request([12], greedy(4), request_id="processor")
            return logits

        llm.add_request([3], greedy(logits_processors=[adding]), request_id="first")
        last = drain(llm)
        clean(llm)
    assert {n: o.outputs[0].token_ids for n, o in last.items()} == {
        "first": count(4, 8),
        "processor": count(13, 4),
        "observer": count(21, 4),
    }


@CONFIGS
def test_an_interrupt_in_a_processor_ends_the_step_and_not_the_llm(
    config: Any, clean: Clean
) -> None:
    def interrupted(rows: LogitsRows, logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with LLM(counting(), speculative_config=config, max_num_seqs=2) as llm:
        names = [llm.add_request([3], greedy(logits_processors=p)) for p in ([], [interrupted], [])]
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        last = drain(llm)
        clean(llm)
        assert generate(llm).outputs[0].token_ids == count(4, 8)
    errors = [last[name].error for name in names]
    assert errors == [*["a step was broken off by KeyboardInterrupt"] * 2, None]
    assert last[names[2]].outputs[0].token_ids == count(4, 8)


# -- at the wrong time -------------------------------------------------------


def test_nothing_is_taken_by_an_llm_that_is_closed() -> None:
    llm = LLM(counting())
    stream = llm.stream([[3]], greedy())
    next(stream)
    unread = llm.stream([[3]], greedy())
    llm.add_request([3], greedy(), request_id="waiting")
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.add_request([3]),
        lambda: llm.abort_request("waiting"),
        lambda: llm.generate([[3]]),
        lambda: llm.stream([[3]]),
        lambda: next(stream),
        lambda: next(unread),
        llm.step,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="this LLM is closed"):
            call()
    llm.close()


def test_nothing_is_taken_while_an_llm_closes() -> None:
    refused: list[str] = []

    class Clinging(ConstantSpeculator):
        def close(self) -> None:
            try:
                llm.add_request([3], greedy())
            except ConfigError as error:
                refused.append(str(error))

    llm = LLM(counting(), speculative_config={"method": Clinging})
    llm.add_request([3], greedy())
    llm.step()
    engine = llm._loaded.engine
    llm.close()
    assert refused == ["this LLM is closed"]
    assert not engine.busy
    assert engine.scheduler.pool.free == engine.scheduler.num_blocks


# -- names -------------------------------------------------------------------


def test_a_name_is_taken_until_its_last_output_was_handed_out() -> None:
    with LLM(counting()) as llm:
        llm.add_request([3], greedy(2), request_id="a")
        for _ in range(2):
            with pytest.raises(PromptError, match="'a' is in use by a request that still runs"):
                llm.add_request([5], greedy(2), request_id="a")
            llm.step()
        llm.add_request([5], greedy(2), request_id="a")
        llm.abort_request("a")
        with pytest.raises(PromptError, match="'a' is in use"):
            llm.add_request([5], greedy(2), request_id="a")
        assert [o.outputs[0].finish_reason for o in llm.step()] == ["abort"]
        llm.add_request([7], greedy(2), request_id="a")
        assert drain(llm)["a"].outputs[0].token_ids == [8, 9]


@pytest.mark.parametrize("name", ["", 3, b"a", True, ["a"], object()])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with LLM(counting()) as llm, pytest.raises(PromptError, match=r"request_id is .* a text"):
        llm.add_request([3], greedy(), request_id=name)


def test_a_request_without_a_name_gets_one_that_nobody_has() -> None:
    with LLM(counting()) as llm:
        taken = llm.add_request([3], greedy(2), request_id="1")
        names = [llm.add_request([3], greedy(2)) for _ in range(3)]
        assert len({taken, *names}) == 4
        assert len(drain(llm)) == 4


def test_a_refused_name_does_not_move_the_streams_of_later_requests() -> None:
    def run(*, refused: bool) -> list[int]:
        with LLM(toy_target(torch.zeros(VOCAB, VOCAB)), seed=4) as llm:
            llm.add_request([3], greedy(2), request_id="a")
            if refused:
                for prompt, name in (([3], "a"), ([], "b"), ([VOCAB], "c"), ([3], "")):
                    with pytest.raises(PromptError):
                        llm.add_request(prompt, greedy(2), request_id=name)
            llm.add_request([3], SamplingParams(max_tokens=12), request_id="d")
            return drain(llm)["d"].outputs[0].token_ids

    assert run(refused=True) == run(refused=False)
