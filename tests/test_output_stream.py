"""Outputs that wait for their reader: one at most, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ConfigError, PromptError, SpecdecError
from specdec.logprobs import Logprob
from specdec.output_stream import Inbox, OutputStream
from specdec.outputs import CompletionOutput, RequestMetrics, RequestOutput

# of every step: the tokens that each of two completions got in it
steps_of_two = st.lists(st.tuples(*[st.lists(st.integers(0, 9), max_size=4)] * 2), min_size=1)


def text(tokens: list[int]) -> str:
    return "".join(map(str, tokens))


def output(*parts: list[int], finished: bool = False, logprobs: bool = False) -> RequestOutput:
    """An output of completions with these tokens."""
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[
            CompletionOutput(
                index=index,
                text=text(part),
                token_ids=list(part),
                logprobs=[{t: Logprob(-1.0 * t)} for t in part] if logprobs else None,
                finish_reason="stop" if finished else None,
            )
            for index, part in enumerate(parts)
        ],
        finished=finished,
        metrics=RequestMetrics(arrival_time=0.0),
    )


def inbox(*, delta: bool = False) -> Inbox:
    return Inbox("r", asyncio.get_running_loop(), delta=delta)


class Stream(OutputStream):
    """A stream whose inbox notes that it was dropped, as the engine does."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(inbox, lambda dropped: setattr(dropped, "dropped", True))


# -- what waits --------------------------------------------------------------


@given(steps_of_two, st.sets(st.integers(0, 60)), st.booleans())
def test_deltas_add_up_to_the_whole_whenever_they_are_read(
    steps: list[tuple[list[int], list[int]]], reads: set[int], logprobs: bool
) -> None:
    async def main() -> list[RequestOutput]:
        box = inbox(delta=True)
        taken = []
        for number, step in enumerate(steps):
            box.put(output(*step, finished=number == len(steps) - 1, logprobs=logprobs))
            if number in reads and (found := box.take()) is not None:
                taken.append(found)
        if not taken or not taken[-1].finished:
            last = box.take()
            assert last is not None
            taken.append(last)
        with pytest.raises(StopAsyncIteration):
            box.take()
        return taken

    taken = asyncio.run(main())
    assert [o.finished for o in taken] == [False] * (len(taken) - 1) + [True]
    for index in range(2):
        whole = [token for step in steps for token in step[index]]
        parts = [o.outputs[index] for o in taken]
        assert [t for part in parts for t in part.token_ids] == whole
        assert "".join(part.text for part in parts) == text(whole)
        assert all(part.text == text(part.token_ids) for part in parts)
        if logprobs:
            seen = [token for part in parts for entry in part.logprobs or () for token in entry]
            assert seen == whole


def test_of_cumulative_outputs_the_newest_waits() -> None:
    async def main() -> None:
        box = inbox()
        for length in (1, 2, 3):
            box.put(output([7] * length))
        found = box.take()
        assert found is not None
        assert found.outputs[0].token_ids == [7, 7, 7]
        assert box.take() is None

    asyncio.run(main())


def test_nothing_waits_for_a_reader_that_is_gone() -> None:
    async def main() -> None:
        box = inbox(delta=True)
        box.put(output([1]))
        box.dropped = True
        box.put(output([2], finished=True))
        assert box.ended
        assert box._pending is None
        with pytest.raises(StopAsyncIteration):
            box.take()

    asyncio.run(main())


# -- the reader --------------------------------------------------------------


def test_an_error_is_raised_once_and_then_the_stream_is_at_its_end() -> None:
    async def main() -> list[Any]:
        box = inbox()
        box.fail(PromptError("no"))
        stream = Stream(box)
        with pytest.raises(PromptError, match="no"):
            await anext(stream)
        return [o async for o in stream]

    assert asyncio.run(main()) == []


def test_a_reader_that_is_cancelled_drops_its_request() -> None:
    async def main() -> None:
        box = inbox()
        stream = Stream(box)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        assert box.dropped
        assert [o async for o in stream] == []

    asyncio.run(main())


def test_a_stream_has_one_reader() -> None:
    async def main() -> None:
        box = inbox()
        stream = Stream(box)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(SpecdecError, match="'r' is being read already"):
            await anext(stream)
        box.put(output([1], finished=True))
        box.moved.set()
        assert (await first).finished
        assert not box.dropped

    asyncio.run(main())


def test_closing_a_stream_ends_the_one_who_reads_it_and_waits_for_the_end() -> None:
    async def main() -> None:
        box = inbox()
        stream = Stream(box)

        async def read() -> list[RequestOutput]:
            return [o async for o in stream]

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(stream.aclose())
        assert await reader == []
        assert not closing.done()
        box.fail(None)
        box.moved.set()
        await closing

    asyncio.run(main())


def test_an_output_that_was_not_read_is_gone_when_the_stream_is_closed() -> None:
    async def main() -> None:
        box = inbox()
        box.put(output([1], finished=True))
        stream = Stream(box)
        await stream.aclose()
        assert [o async for o in stream] == []

    asyncio.run(main())


def test_a_stream_is_read_in_its_own_event_loop() -> None:
    async def make() -> Stream:
        return Stream(inbox())

    stream = asyncio.run(make())

    async def read() -> None:
        with pytest.raises(ConfigError, match="another event loop"):
            await anext(stream)

    asyncio.run(read())
