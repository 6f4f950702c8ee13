"""Many requests at once beside an event loop: the right outputs, in order, and nothing left over.

About 20 s: some twenty tiny models, and one process of its own that ends without closing.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from itertools import count as numbers
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from specdec import (
    LLM,
    ConfigError,
    OutOfMemoryError,
    PromptError,
    RequestOutput,
    SamplingParams,
    SpecdecError,
    StepReport,
    hookimpl,
)
from specdec.async_llm import AsyncLLM
from specdec.engine_thread import NAME
from specdec.output_stream import OutputStream
from specdec.testing import ConstantSpeculator, tiny_target, toy_target

T = TypeVar("T")
SPECULATIVE = {"method": ConstantSpeculator, "token": 3, "num_speculative_tokens": 2}
LONG = 100


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run in an event loop of its own; nothing here takes a minute."""

    async def limited() -> T:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(limited())


def counting(vocab: int = 32) -> Any:
    """After token t comes t + 1."""
    return toy_target(torch.eye(vocab).roll(1, dims=1) * 20)


def count(first: int, number: int) -> list[int]:
    return [t % 32 for t in range(first, first + number)]


def greedy(most: int = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **values)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


async def collect(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def last(stream: OutputStream) -> RequestOutput:
    return (await collect(stream))[-1]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def assert_idle(llm: LLM) -> None:
    """Nothing of any request is left: no slot, no page, no entry."""
    engine = llm._loaded.engine
    scheduler = engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.free == scheduler.num_blocks
    assert sorted(scheduler._free) == list(range(engine.slots.max_num_seqs))
    assert not llm.has_unfinished_requests()
    assert [llm._added._owners, llm._added._news] == [{}, {}]


async def assert_lets_go(engine: AsyncLLM, llm: LLM) -> None:
    await until(lambda: not engine.num_unfinished_requests)
    assert_idle(llm)


class Gate:
    """An observer that can hold the engine at the end of a step."""

    def __init__(self) -> None:
        self.steps = 0
        self.stop_at = -1
        self._open = threading.Event()

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.steps += bool(len(report.slots))  # not what is reported when all have ended
        if self.steps == self.stop_at:
            assert self._open.wait(20)

    async def reached(self) -> None:
        await until(lambda: self.steps == self.stop_at)

    def open(self) -> None:
        self._open.set()


def failing(llm: LLM, *, times: int, after: int = 0) -> None:
    """Let the target raise in so many steps."""
    target = llm._loaded.target
    forward = target.forward
    calls = numbers()

    def broken(*arguments: Any) -> Any:
        if after <= next(calls) < after + times:
            raise RuntimeError("the wire was cut")
        return forward(*arguments)

    target.forward = broken  # type: ignore[assignment, method-assign]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Every test leaves no thread of an engine behind."""
    yield
    deadline = time.monotonic() + 10
    while left := [t for t in threading.enumerate() if t.name.startswith(NAME)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)
        gc.collect()


# -- streams beside each other -----------------------------------------------


def test_ten_streams_with_cancellations_give_the_right_text_in_order_and_leave_nothing(
    model_folder: Path,
) -> None:
    words = ["the cat", "a dog ran", "the mat", "to see it .", "on a mat"] * 2
    params = [
        SamplingParams(
            seed=number,
            max_tokens=20 + number,
            ignore_eos=True,
            output_kind="delta" if number % 2 else "cumulative",
        )
        for number in range(10)
    ]
    cancelled_after = {1: 0, 2: 1, 5: 4, 8: 9}  # tokens
    with LLM(str(model_folder)) as plain:
        expected = plain.generate(words, params, use_tqdm=False)

    async def read(engine: AsyncLLM, number: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        stream = engine.generate(words[number], params[number], request_id=f"r{number}")
        if cancelled_after.get(number) == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0)
            return outputs
        async for output in stream:
            outputs.append(output)
            if output.metrics.num_generated_tokens >= cancelled_after.get(number, 1000):
                break
        return outputs

    async def main() -> list[list[RequestOutput]]:
        llm = LLM(str(model_folder), speculative_config=SPECULATIVE, max_num_seqs=4)
        async with AsyncLLM.wrap(llm) as engine:
            found = await asyncio.gather(*(read(engine, number) for number in range(10)))
            await assert_lets_go(engine, llm)
        return found

    for number, (outputs, whole) in enumerate(zip(run(main), expected, strict=True)):
        completion = whole.outputs[0]
        texts = [o.outputs[0].text for o in outputs]
        lengths = [o.metrics.num_generated_tokens for o in outputs]
        assert lengths == sorted(set(lengths)), "in order, and always something new"
        assert {o.request_id for o in outputs} <= {f"r{number}"}
        if params[number].output_kind == "delta":
            emitted = [t for o in outputs for t in tokens(o)]
            text = "".join(texts)
        else:
            assert all(b.startswith(a) for a, b in pairwise(texts))
            emitted, text = (tokens(outputs[-1]), texts[-1]) if outputs else ([], "")
        if number in cancelled_after:
            assert len(emitted) >= cancelled_after[number]
            assert completion.token_ids[: len(emitted)] == emitted
            assert completion.text.startswith(text)
        else:
            assert outputs[-1].finished
            assert emitted == completion.token_ids
            assert text == completion.text


def test_two_hundred_short_streams_through_few_slots() -> None:
    async def main() -> list[RequestOutput]:
        llm = LLM(counting(), max_num_seqs=7)
        async with AsyncLLM.wrap(llm) as engine:
            streams = [engine.generate([n % 20], greedy(1 + n % 5)) for n in range(200)]
            outputs = await asyncio.gather(*map(last, streams))
            await assert_lets_go(engine, llm)
        return outputs

    outputs = run(main)
    assert [tokens(o) for o in outputs] == [count(n % 20 + 1, 1 + n % 5) for n in range(200)]
    assert [o.request_id for o in outputs] == [str(n) for n in range(200)]


def test_requests_of_the_same_time_run_in_one_batch() -> None:
    gate = Gate()

    async def main() -> int:
        async with AsyncLLM(counting(), observers=[gate]) as engine:
            await asyncio.gather(*(last(engine.generate([n], greedy(10))) for n in range(8)))
        return gate.steps

    assert run(main) < 30  # one alone takes ten; some may have gone ahead


def test_unseeded_requests_draw_as_in_generate_by_the_order_of_the_calls() -> None:
    params = SamplingParams(max_tokens=12)
    prompts = [[1, 2], [3], [1, 2], [4, 5, 6]]
    with LLM(tiny_target(), seed=5) as plain:
        expected = [tokens(o) for o in plain.generate(prompts, params, use_tqdm=False)]

    async def main() -> list[list[int]]:
        async with AsyncLLM(tiny_target(), seed=5) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            found = [tokens(await last(stream)) for stream in reversed(streams)]
        return found[::-1]

    assert run(main) == expected


# -- what an output holds ----------------------------------------------------


def test_a_reader_that_stops_has_one_output_waiting_and_holds_nobody_up() -> None:
    async def main() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async with AsyncLLM(counting()) as engine:
            params = greedy(LONG, output_kind="delta", logprobs=0)
            slow, other = (engine.generate([n], params) for n in (1, 5))
            first = await anext(slow)
            others = await collect(other)
            await until(lambda: not engine.num_unfinished_requests)
            return [first, *await collect(slow)], others

    slow, others = run(main)
    assert len(slow) == 2
    assert [t for o in slow for t in tokens(o)] == count(2, LONG)
    assert [t for o in others for t in tokens(o)] == count(6, LONG)
    kept = [entry for o in slow for entry in o.outputs[0].logprobs or ()]
    assert [next(iter(entry)) for entry in kept] == count(2, LONG)
    assert slow[-1].outputs[0].finish_reason == "length"


def test_an_event_loop_that_is_busy_is_woken_once() -> None:
    gate = Gate()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        async with AsyncLLM(counting(), observers=[gate]) as engine:
            stream = engine.generate([1], greedy(LONG))
            await anext(stream)
            calls = 0
            tell = loop.call_soon_threadsafe

            def counted(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                return tell(*arguments, **named)

            loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
            while engine.num_unfinished_requests:
                time.sleep(0.001)  # on purpose: the loop stands still
            found = calls
            assert tokens(await last(stream)) == count(2, LONG)
        return found

    assert run(main) <= 1
    assert gate.steps == LONG


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_all_completions_of_a_prompt_come_in_one_stream(kind: Any) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=9)
    with LLM(tiny_target()) as plain:
        (expected,) = plain.generate([1, 2], params, use_tqdm=False)

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(tiny_target()) as engine:
            values = {"n": 3, "seed": 1, "max_tokens": 9, "output_kind": kind}
            return await collect(engine.generate([1, 2], SamplingParams(**values)))

    outputs = run(main)
    read = outputs if kind == "delta" else outputs[-1:]
    found = [[t for o in read for t in o.outputs[i].token_ids] for i in range(3)]
    assert found == [c.token_ids for c in expected.outputs]
    assert len(outputs) == 1 or kind != "final_only"


def test_chat_renders_a_conversation_and_refuses_anything_else(model_folder: Path) -> None:
    messages = [{"role": "user", "content": "the cat sat"}]
    with LLM(str(model_folder)) as plain:
        (expected,) = plain.chat(messages, greedy(), use_tqdm=False)

    async def main() -> RequestOutput:
        async with AsyncLLM(str(model_folder)) as engine:
            with pytest.raises(PromptError, match="chat takes messages"):
                engine.chat(["the cat"], greedy())
            return await last(engine.chat(messages, greedy()))

    found = run(main)
    assert found.prompt == expected.prompt
    assert found.outputs[0].text == expected.outputs[0].text


# -- leaving early -----------------------------------------------------------


def test_a_request_is_cancelled_before_it_has_a_slot() -> None:
    gate = Gate()

    async def main() -> None:
        llm = LLM(counting(), max_num_seqs=1, observers=[gate])
        async with AsyncLLM.wrap(llm) as engine:
            gate.stop_at = 2
            first = engine.generate([1], greedy(5))
            await gate.reached()
            waiting = asyncio.ensure_future(last(engine.generate([2], greedy(LONG))))
            behind = engine.generate([3], greedy(5))
            await asyncio.sleep(0)
            waiting.cancel()
            gate.open()
            assert tokens(await last(first)) == count(2, 5)
            assert tokens(await last(behind)) == count(4, 5)
            await assert_lets_go(engine, llm)
            assert llm.metrics.num_plain_steps == 8  # it never ran

    run(main)


def test_a_request_that_nobody_waits_for_any_more_is_not_even_read() -> None:
    gate = Gate()
    gate.stop_at = 2
    read: list[Any] = []

    async def main() -> None:
        llm = LLM(counting(), observers=[gate])
        add = llm.add_request

        def noted(prompt: Any, *rest: Any, **named: Any) -> str:
            read.append(prompt)
            return add(prompt, *rest, **named)

        llm.add_request = noted  # type: ignore[method-assign]
        async with AsyncLLM.wrap(llm) as engine:
            stream = engine.generate([1], greedy(5))
            await gate.reached()
            engine.generate([2], greedy(5))
            closed = engine.generate([3], greedy(5))
            closing = asyncio.ensure_future(closed.aclose())
            await asyncio.sleep(0)
            gate.open()
            await closing
            assert tokens(await last(stream)) == count(2, 5)
            await assert_lets_go(engine, llm)

    run(main)
    assert read == [[1]]


@pytest.mark.parametrize("step", [2, 6], ids=["in its prompt", "in its last step"])
def test_a_request_is_cancelled_in_the_middle_of_a_step(step: int) -> None:
    gate = Gate()
    gate.stop_at = step

    async def main() -> None:
        llm = LLM(counting(), max_num_batched_tokens=8, observers=[gate])
        async with AsyncLLM.wrap(llm) as engine:
            # a prompt of three steps, and four tokens
            task = asyncio.ensure_future(last(engine.generate(count(0, 24), greedy(4))))
            await gate.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await assert_lets_go(engine, llm)
            assert gate.steps == step
            assert tokens(await last(engine.generate([3], greedy(4)))) == count(4, 4)

    run(main)


async def leave_by_break(engine: AsyncLLM, stream: OutputStream) -> None:
    async for _ in stream:
        break


async def leave_by_error(engine: AsyncLLM, stream: OutputStream) -> None:
    try:
        async for _ in stream:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


async def leave_unread(engine: AsyncLLM, stream: OutputStream) -> None:
    pass


async def leave_in_a_cycle(engine: AsyncLLM, stream: OutputStream) -> None:
    cycle: list[Any] = [stream]
    cycle.append(cycle)


async def leave_in_a_body_that_is_cancelled(engine: AsyncLLM, stream: OutputStream) -> None:
    reached = asyncio.Event()

    async def read(held: list[OutputStream]) -> None:
        async for _ in held.pop():
            reached.set()
            await asyncio.sleep(60)

    held = [stream]
    del stream
    task = asyncio.ensure_future(read(held))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_error,
        leave_unread,
        leave_in_a_cycle,
        leave_in_a_body_that_is_cancelled,
    ],
)
def test_letting_go_of_a_stream_aborts_it(
    leave: Callable[[AsyncLLM, OutputStream], Awaitable[None]],
) -> None:
    async def main() -> None:
        llm = LLM(counting())
        async with AsyncLLM.wrap(llm) as engine:
            await leave(engine, engine.generate([1], greedy(200)))
            gc.collect()
            await assert_lets_go(engine, llm)
            assert engine.metrics.num_plain_steps < 199

    run(main)


def test_closing_a_stream_waits_until_the_engine_let_go_and_its_id_is_free() -> None:
    async def main() -> None:
        llm = LLM(counting())
        async with AsyncLLM.wrap(llm) as engine:
            async with aclosing(engine.generate([1], greedy(LONG), request_id="a")) as stream:
                async for _ in stream:
                    break
            assert_idle(llm)
            again = await last(engine.generate([2], greedy(3), request_id="a"))
            assert tokens(again) == count(3, 3)

    run(main)


def test_a_stream_that_was_dropped_late_does_not_end_the_next_of_its_name() -> None:
    gate = Gate()
    gate.stop_at = 1

    async def main() -> None:
        async with AsyncLLM(counting(), observers=[gate]) as engine:
            old = engine.generate([1], greedy(1), request_id="a")
            await gate.reached()
            box = old._inbox
            gate.open()
            await until(lambda: box.ended)
            new = engine.generate([2], greedy(50), request_id="a")
            box.ended = False  # as if it had been looked at a moment earlier
            engine._engine.drop(box)
            assert tokens(await last(new)) == count(3, 50)

    run(main)


# -- abort and close ---------------------------------------------------------


def test_an_aborted_request_ends_with_what_it_emitted() -> None:
    async def main() -> None:
        llm = LLM(counting())
        async with AsyncLLM.wrap(llm) as engine:
            stream, other = (engine.generate([n], greedy(LONG)) for n in (1, 5))
            await anext(stream)
            await engine.abort([stream.request_id, "nobody"])
            ended = await last(stream)
            assert ended.finished
            assert ended.outputs[0].finish_reason == "abort"
            assert tokens(ended) == count(2, len(tokens(ended)))
            await engine.abort(stream.request_id)  # again
            assert tokens(await last(other)) == count(6, LONG)
            await assert_lets_go(engine, llm)

    run(main)


def test_close_ends_every_stream_with_a_last_output() -> None:
    async def main() -> None:
        llm = LLM(counting(), max_num_seqs=2)
        engine = AsyncLLM.wrap(llm)
        streams = [engine.generate([n], greedy(LONG)) for n in range(4)]
        readers = [asyncio.ensure_future(collect(stream)) for stream in streams[1:]]
        await anext(streams[0])
        loaded = llm._loaded.engine
        closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="this AsyncLLM is clos"):
            engine.generate([1])
        await engine.close()
        await asyncio.gather(*closing)
        rest = await asyncio.gather(*readers)
        with pytest.raises(ConfigError, match="this AsyncLLM is closed"):
            engine.generate([1])
        await engine.abort("0")
        await engine.close()
        for number, outputs in enumerate([await collect(streams[0]), *rest]):
            ended = outputs[-1]
            assert ended.finished
            assert ended.outputs[0].finish_reason == "abort"
            assert tokens(ended) == count(number + 1, len(tokens(ended)))
        assert not engine.num_unfinished_requests
        assert loaded.scheduler.pool.free == loaded.scheduler.num_blocks
        assert not loaded.busy
        assert engine.metrics.num_plain_steps < 2 * LONG
        with pytest.raises(ConfigError, match="this LLM is closed"):
            _ = engine.max_model_len

    run(main)


def test_a_request_made_just_before_the_close_ends_as_well() -> None:
    async def main() -> None:
        engine = AsyncLLM(counting())
        stream = engine.generate([1], greedy(LONG, output_kind="final_only"))
        bad = engine.generate([99], greedy())
        await engine.close()
        (only,) = await collect(stream)
        assert only.outputs[0].finish_reason == "abort"
        with pytest.raises(PromptError):
            await anext(bad)

    run(main)


def test_a_close_that_is_cancelled_goes_on() -> None:
    gate = Gate()
    gate.stop_at = 2

    async def main() -> None:
        engine = AsyncLLM(counting(), observers=[gate])
        stream = engine.generate([1], greedy(LONG))
        await gate.reached()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.close(), 0.01)
        gate.open()
        assert (await last(stream)).outputs[0].finish_reason == "abort"

    run(main)


def test_a_cancelled_main_task_closes_on_its_way_out() -> None:
    async def main() -> None:
        async with AsyncLLM(counting()) as engine:
            stream = engine.generate([1], greedy(200))
            await anext(stream)
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_an_event_loop_that_ended_takes_its_requests_along() -> None:
    gate = Gate()
    gate.stop_at = 3
    llm = LLM(counting(), observers=[gate])
    engine = AsyncLLM.wrap(llm)

    async def main() -> OutputStream:
        stream = engine.generate([1], greedy(200))
        await gate.reached()
        return stream

    stream = run(main)
    gate.open()

    async def other() -> None:
        await assert_lets_go(engine, llm)
        with pytest.raises(ConfigError, match="another event loop"):
            engine.generate([1])
        with pytest.raises(ConfigError, match="another event loop"):
            await engine.abort("0")
        with pytest.raises(ConfigError, match="another event loop"):
            await stream.aclose()
        await engine.close()

    run(other)
    assert gate.steps < 10


def test_an_event_loop_that_ends_before_it_wakes_takes_its_requests_along() -> None:
    gate = Gate()
    gate.stop_at = 5
    engine = AsyncLLM(counting(), observers=[gate])
    loop = asyncio.new_event_loop()

    async def main() -> OutputStream:
        return engine.generate([1], greedy(200))

    stream = loop.run_until_complete(main())
    run(gate.reached)  # outputs came, and the loop has not heard of them
    loop.close()
    gate.open()
    run(lambda: until(lambda: not engine.num_unfinished_requests))
    assert gate.steps < 10
    assert stream._inbox.dropped
    run(engine.close)


def test_requests_are_made_inside_an_event_loop() -> None:
    engine = AsyncLLM(counting())
    with pytest.raises(ConfigError, match="inside an event loop"):
        engine.generate([1])
    run(engine.close)


def test_a_process_that_closes_nothing_ends(tmp_path: Path) -> None:
    code = """
    import asyncio
    from specdec import SamplingParams
    from specdec.async_llm import AsyncLLM
    from specdec.testing import tiny_target

    async def main():
        stream = engine.generate([1], SamplingParams(max_tokens=None))
        await anext(stream)
        return stream

    engine = AsyncLLM(tiny_target(max_model_len=50_000))
    stream = asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- what fails --------------------------------------------------------------


def test_a_prompt_that_cannot_be_served_raises_when_it_is_read_and_harms_nobody() -> None:
    async def main() -> None:
        llm = LLM(counting(), kv_cache_memory=5 * 16 * 2 * 32 * 8)
        async with AsyncLLM.wrap(llm) as engine:
            good = engine.generate([1], greedy(30))
            cases: list[tuple[Any, Any, int, type[Exception], str]] = [
                ("text", greedy(), 0, PromptError, "needs a tokenizer"),
                ([99], greedy(), 0, PromptError, "99"),
                (
                    [[1], [2]],
                    greedy(),
                    0,
                    PromptError,
                    "one prompt is taken at a time",
                ),
                ([1], {"top_k": 1}, 0, PromptError, "give SamplingParams"),
                ([1], greedy(), 3, PromptError, "first come, first served"),
                ([1], greedy(200), 0, OutOfMemoryError, "raise kv_cache_memory"),
            ]
            for prompt, params, priority, error, said in cases:
                stream = engine.generate(prompt, params, priority=priority)
                with pytest.raises(error, match=said):
                    await anext(stream)
                assert await collect(stream) == []
            assert tokens(await last(good)) == count(2, 30)
            await assert_lets_go(engine, llm)

    run(main)


def test_request_ids_are_texts_that_nobody_uses() -> None:
    gate = Gate()
    gate.stop_at = 1

    async def main() -> None:
        async with AsyncLLM(counting(), observers=[gate]) as engine:
            named = engine.generate([1], greedy(3), request_id="0")
            for wrong in ("", 7):
                with pytest.raises(PromptError, match="has to be a text"):
                    engine.generate([1], request_id=wrong)  # type: ignore[arg-type]
            with pytest.raises(PromptError, match="request_ids is 3, but it has to be a text"):
                await engine.abort(3)  # type: ignore[arg-type]
            with pytest.raises(PromptError, match="'0' is in use"):
                engine.generate([1], request_id="0")
            numbered = engine.generate([2], greedy(3))
            assert numbered.request_id == "1"
            gate.open()
            assert {o.request_id for o in await collect(named)} == {"0"}
            assert {o.request_id for o in await collect(numbered)} == {"1"}
            assert (await last(engine.generate([3], greedy(3), request_id="0"))).finished

    run(main)


def test_a_lower_priority_goes_first() -> None:
    ended: list[str] = []

    async def read(stream: OutputStream) -> None:
        await last(stream)
        ended.append(stream.request_id)

    async def main() -> None:
        gate = Gate()
        gate.stop_at = 1
        llm = LLM(counting(), max_num_seqs=1, scheduling_policy="priority", observers=[gate])
        async with AsyncLLM.wrap(llm) as engine:
            first = engine.generate([1], greedy(3), priority=-9, request_id="first")
            await gate.reached()
            later = [engine.generate([1], greedy(3), priority=p, request_id=str(p)) for p in (2, 1)]
            gate.open()
            await asyncio.gather(*map(read, [first, *later]))

    run(main)
    assert ended == ["first", "1", "2"]


def test_a_step_that_raises_ends_those_that_ran_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        llm = LLM(counting(), max_num_seqs=1)
        failing(llm, times=1, after=3)
        async with AsyncLLM.wrap(llm) as engine:
            ran, waited = (engine.generate([n], greedy(6)) for n in (1, 5))
            ended = await last(ran)
            assert ended.finished
            assert ended.outputs[0].finish_reason == "error"
            assert ended.error is not None
            assert "the wire was cut" in ended.error
            assert tokens(ended) == count(2, 3)
            assert tokens(await last(waited)) == count(6, 6)
            assert tokens(await last(engine.generate([9], greedy(6)))) == count(10, 6)
            await assert_lets_go(engine, llm)

    run(main)
    assert [r.message for r in caplog.records] == ["a step raised"]


@pytest.mark.usefixtures("caplog")
def test_an_engine_that_cannot_go_on_ends_every_request_and_takes_new_ones() -> None:
    async def main() -> None:
        llm = LLM(counting(), max_num_seqs=1)
        scheduler = llm._loaded.engine.scheduler
        admit = scheduler.admit

        def broken() -> Any:
            raise RuntimeError("the wire was cut")

        async with AsyncLLM.wrap(llm) as engine:
            scheduler.admit = broken  # type: ignore[method-assign]
            streams = [engine.generate([n], greedy(6)) for n in (1, 5)]
            for stream in streams:
                with pytest.raises(SpecdecError, match="RuntimeError in a step: the wire was cut"):
                    await anext(stream)
            await assert_lets_go(engine, llm)
            scheduler.admit = admit  # type: ignore[method-assign]
            assert tokens(await last(engine.generate([9], greedy(6)))) == count(10, 6)

    run(main)


@pytest.mark.usefixtures("caplog")
def test_no_stream_waits_for_an_end_that_got_lost() -> None:
    async def main() -> None:
        llm = LLM(counting())
        step = llm.step

        def losing() -> list[RequestOutput]:
            outputs = step()
            if any(o.finished for o in outputs):
                raise RuntimeError("no text can be made")
            return outputs

        async with AsyncLLM.wrap(llm) as engine:
            llm.step = losing  # type: ignore[method-assign]
            streams = [engine.generate([1], greedy(n)) for n in (3, 60)]
            for stream in streams:
                with pytest.raises(SpecdecError, match="no text can be made"):
                    await collect(stream)
            llm.step = step  # type: ignore[method-assign]
            await assert_lets_go(engine, llm)
            assert tokens(await last(engine.generate([9], greedy(6)))) == count(10, 6)

    run(main)


# -- the event loop and the model --------------------------------------------


def test_the_event_loop_goes_on_during_a_slow_step() -> None:
    def slow(rows: Any, logits: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return logits

    async def main() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        async with AsyncLLM(counting()) as engine:
            ticker = asyncio.ensure_future(tick())
            await last(engine.generate([1], greedy(1, logits_processors=[slow])))
            ticker.cancel()
        return ticks

    assert run(main) >= 8


def test_a_model_is_loaded_beside_the_event_loop(model_folder: Path) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticker = asyncio.ensure_future(tick())
        async with await AsyncLLM.create(str(model_folder), max_model_len=64) as engine:
            ticker.cancel()
            assert ticks > 1
            assert engine.max_model_len == 64
            assert engine.tokenizer is not None
            assert engine.eos_token_ids == {1}
            assert engine.lossless
            assert engine.capabilities is None
            assert engine.rejection_sample_method is None
            assert (await last(engine.generate("the cat", greedy(3)))).finished
            assert engine.metrics.num_plain_steps == 2

    run(main)


def test_what_cannot_be_loaded_raises_as_it_does_for_llm() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="max_model_length"):
            await AsyncLLM.create(counting(), max_model_length=3)

    run(main)


def test_loading_that_is_cancelled_frees_what_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(LLM):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            loading.set()
            assert go.wait(20)
            super().__init__(*arguments, **named)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr("specdec.async_llm.LLM", Slow)

    async def main() -> None:
        task = asyncio.ensure_future(AsyncLLM.create(counting()))
        await until(loading.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await until(closed.is_set)

    run(main)


def test_an_llm_is_taken_over_only_if_nothing_would_be_lost() -> None:
    with LLM(counting()) as llm:
        llm.add_request([1], greedy())
        with pytest.raises(ConfigError, match="has 1 requests of its own"):
            AsyncLLM.wrap(llm)
    with pytest.raises(ConfigError, match="this LLM is closed"):
        AsyncLLM.wrap(llm)
    with pytest.raises(ConfigError, match="takes an LLM, not str"):
        AsyncLLM.wrap("model")  # type: ignore[arg-type]
