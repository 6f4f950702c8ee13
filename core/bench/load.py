"""Requests in flight: a workload is run with so many at once, and every answer is timed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from specdec.bench.workload import Task
from specdec.chat.conversation import Conversation
from specdec.errors import SpecdecError
from specdec.metrics import SpeculationMetrics
from specdec.prompts import read_prompts

if TYPE_CHECKING:
    from specdec.outputs import RequestOutput
    from specdec.sampling_params import SamplingParams


class Server(Protocol):
    """What of an `LLM` is used."""

    tokenizer: Any

    def add_request(self, prompt: Any, params: Any) -> str:
        """Queue a request; returns its id."""

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that moved, with all their tokens so far."""

    def abort_request(self, request_ids: Any) -> Any:
        """End requests."""


@attrs.define(eq=False, kw_only=True)
class Answer:
    """An answer and when it came.

    tokens: int32. seconds: from the request to the last token; first: to the first one, None if
    none came. gaps: (seconds, tokens) of every step after that one that gave some.
    error: why there is no answer.
    """

    task: Task
    turn: int
    prompt_tokens: int
    tokens: NDArray[np.int32]
    seconds: float
    first: float | None
    gaps: list[tuple[float, int]]
    finish_reason: str | None
    error: str | None
    speculation: SpeculationMetrics


@attrs.define(eq=False)
class _Flight:
    """A request on its way. seen: tokens that came so far; last: when the last of them did."""

    task: Task
    turn: int
    conversation: Conversation
    prompt_tokens: int
    start: float
    seen: int = 0
    last: float = 0.0
    first: float | None = None
    gaps: list[tuple[float, int]] = attrs.field(factory=list)


class Load:
    """Runs tasks, `concurrency` of them at a time: as one ends, the next is let in.

    first: token ids of the first prompt of each task, by its line. params: of a task's requests.
    every_turn: go on with a task's later turns, after the model's own answers. raw: without the
    chat template. ended: called with every answer.

    answers, tokens (also those of requests that have not ended) and seconds tell what happened,
    even if `run` is interrupted.
    """

    def __init__(
        self,
        server: Server,
        tasks: Sequence[Task],
        *,
        concurrency: int,
        first: Mapping[int, list[int]],
        params: Callable[[Task], SamplingParams],
        every_turn: bool,
        raw: bool,
        ended: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self.server = server
        self.concurrency = concurrency
        self.first = first
        self.params = params
        self.every_turn = every_turn
        self.ended = ended
        self.answers: list[Answer] = []
        self.tokens = 0
        self.seconds = 0.0
        self._waiting = deque((task, 0, Conversation(raw)) for task in tasks)
        self._flying: dict[str, _Flight] = {}

    def run(self) -> None:
        """Run until every task is answered. If interrupted, what is in flight is aborted."""
        start = time.perf_counter()
        try:
            while self._waiting or self._flying:
                while self._waiting and len(self._flying) < self.concurrency:
                    self._add(*self._waiting.popleft())
                if self._flying:
                    outputs = self.server.step()
                    now = time.perf_counter()
                    for output in outputs:
                        self._moved(output, now)
        finally:
            self.seconds = time.perf_counter() - start
            if self._flying:
                self.server.abort_request(list(self._flying))

    def _add(self, task: Task, turn: int, conversation: Conversation) -> None:
        start = time.perf_counter()
        ids: list[int] = []
        try:
            if turn:
                (read,) = read_prompts(task.prompt(conversation, turn), self.server.tokenizer)
                ids = read.token_ids
            else:
                ids = self.first[task.line]
            name = self.server.add_request({"prompt_token_ids": ids}, self.params(task))
        except SpecdecError as error:  # a later turn can outgrow the context
            self._end(_Flight(task, turn, conversation, len(ids), start), start, None, str(error))
            return
        self._flying[name] = _Flight(task, turn, conversation, len(ids), start, last=start)

    def _moved(self, output: RequestOutput, now: float) -> None:
        flight = self._flying.get(output.request_id)
        if flight is None:
            return  # of a load that was broken off
        new = len(output.outputs[0].token_ids) - flight.seen
        if new:
            if flight.first is None:
                flight.first = now - flight.start
            else:
                flight.gaps.append((now - flight.last, new))
            flight.seen += new
            flight.last = now
            self.tokens += new
        if output.finished:
            del self._flying[output.request_id]
            self._end(flight, now, output, output.error)

    def _end(
        self, flight: _Flight, now: float, output: RequestOutput | None, error: str | None
    ) -> None:
        completion = output.outputs[0] if output else None
        answer = Answer(
            task=flight.task,
            turn=flight.turn,
            prompt_tokens=flight.prompt_tokens,
            tokens=np.array(completion.token_ids if completion else [], dtype=np.int32),
            seconds=now - flight.start,
            first=flight.first,
            gaps=flight.gaps,
            finish_reason=completion.finish_reason if completion else "error",
            error=error,
            speculation=output.metrics.speculative_decoding if output else SpeculationMetrics(),
        )
        self.answers.append(answer)
        self.ended(answer)
        following = flight.turn + 1
        if error is None and following < flight.task.length(every_turn=self.every_turn):
            text = self._text(output)
            flight.conversation.add(flight.task.turns[flight.turn], text)
            # at once, so that a conversation is as little apart as in life
            self._waiting.appendleft((flight.task, following, flight.conversation))

    def _text(self, output: RequestOutput | None) -> str:
        assert output is not None  # there is no error
        (completion,) = output.outputs
        ended = completion.finish_reason == "stop"
        shown = completion.token_ids[:-1] if ended else completion.token_ids
        decode = self.server.tokenizer.decode
        return completion.text or str(decode(shown, skip_special_tokens=True))
