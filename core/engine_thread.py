"""The thread that an LLM runs in, for those who must not wait for a step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import SpecdecError, blame
from specdec.output_stream import Inbox

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.metrics import SpeculationMetrics

logger = logging.getLogger(__name__)
NAME = "specdec-engine"
T = TypeVar("T")


def one_thread() -> ThreadPoolExecutor:
    """A thread that takes one job after another, in order, and sleeps while there is none.

    It ends when it is shut down or garbage-collected, and at the end of the interpreter.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)


class EngineThread:
    """Steps an LLM while it has requests, and leaves what they emit in their inboxes.

    Every step is a job of its own, and behind it come the requests, aborts and the end that were
    asked for meanwhile. Methods with an underscore run in the thread, apart from `_wake`, which
    runs in the event loop like all others.

    inboxes: by request, from `add` until the engine has let go of it. metrics: as of the last
    step.
    """

    def __init__(self, llm: LLM, executor: ThreadPoolExecutor) -> None:
        self.llm = llm
        self.metrics: SpeculationMetrics = llm.metrics
        self.inboxes: dict[str, Inbox] = {}
        self.loop: asyncio.AbstractEventLoop | None = None  # the first that it is used from
        self.end: Future[None] | None = None  # set once it is closing
        self._executor = executor
        self._stepping = False  # a step is among the jobs
        self._broken = False  # the last step raised
        # A collector that runs in the middle of anything adds to it: nothing with a lock.
        self._dropped: deque[Inbox] = deque()
        self._lock = threading.Lock()  # of the next two
        self._moved: dict[Inbox, None] = {}
        self._waking = False  # the event loop was told of `_moved`

    # -- what is asked of it -----------------------------------------------

    def add(self, inbox: Inbox, prompt: Any, sampling_params: Any, priority: Any) -> None:
        """Queue a request."""
        self.inboxes[inbox.request_id] = inbox
        self._executor.submit(self._add, inbox, prompt, sampling_params, priority)

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """End requests; done when their last outputs are in their inboxes."""
        return self._executor.submit(self._abort, list(request_ids))

    def drop(self, inbox: Inbox) -> None:
        """End a request that nobody reads any more. In any thread, at any point."""
        if not inbox.dropped:
            inbox.dropped = True
            if not inbox.ended:
                self._dropped.append(inbox)

    def close(self) -> Future[None]:
        """End all requests, free the LLM and the thread; always the same future."""
        if self.end is None:
            self.end = self._executor.submit(self._close)
            self._executor.shutdown(wait=False)  # after the jobs that are queued
        return self.end

    def join(self) -> None:
        """Wait for the thread to end."""
        self._executor.shutdown()

    # -- jobs --------------------------------------------------------------

    def _add(self, inbox: Inbox, prompt: Any, sampling_params: Any, priority: Any) -> None:
        if inbox.dropped:
            self._fail(inbox, None)
            return
        try:
            self.llm.add_request(
                prompt, sampling_params, request_id=inbox.request_id, priority=priority
            )
        except BaseException as error:  # a thread has nobody to raise to
            self._fail(inbox, _raisable(error))
            return
        inbox.started = True
        self._step_next()

    def _abort(self, request_ids: list[str]) -> None:
        found = [self.inboxes[i] for i in request_ids if i in self.inboxes]
        started = [inbox.request_id for inbox in found if inbox.started]
        if started:
            self._hand_out(started)

    def _step(self) -> None:
        self._stepping = False
        dropped = []
        while self._dropped:
            inbox = self._dropped.popleft()
            if self.inboxes.get(inbox.request_id) is inbox:  # its name may have gone to another
                dropped.append(inbox.request_id)
        self._abort(dropped)
        if self.inboxes:
            self._hand_out()
        self._step_next()

    def _step_next(self) -> None:
        """Put a step behind the jobs there are, unless nothing runs."""
        if self._stepping or not self.inboxes or self.end is not None:
            return
        try:
            self._executor.submit(self._step)
        except RuntimeError:
            if self.end is None:  # not closed just now: the interpreter is ending
                self._close()
        else:
            self._stepping = True

    def _close(self) -> None:
        try:
            self._abort(list(self.inboxes))
        finally:
            for inbox in list(self.inboxes.values()):
                self._fail(inbox, SpecdecError("the AsyncLLM was closed"))
            self.llm.close()

    # -- outputs -----------------------------------------------------------

    def _hand_out(self, aborted: Sequence[str] = ()) -> None:
        """Run a step, or end some requests instead, and put the outputs into their inboxes.

        If it raises, the requests that ran have ended with an error, which the next call hands
        out; those that wait go on. If it raises twice in a row, or ends got lost, all end.
        """
        try:
            if aborted:  # then there are ends to hand out, and no step is run
                self.llm.abort_request(aborted)
            outputs = self.llm.step()
            self.metrics = self.llm.metrics
        except BaseException as error:  # a thread has nobody to raise to
            logger.error("a step raised", exc_info=error)
            started = [inbox for inbox in list(self.inboxes.values()) if inbox.started]
            if self._broken or self.llm.num_unfinished_requests < len(started):
                self._fail_all(started, error)
            self._broken = True
            return
        self._broken = False
        moved = []
        for output in outputs:
            inbox = self.inboxes.get(output.request_id)
            if inbox is None:  # left over from where all had to end
                continue
            if output.finished:  # before its reader can know
                del self.inboxes[output.request_id]
            inbox.put(output)
            moved.append(inbox)
        self._tell(moved)

    def _fail(self, inbox: Inbox, error: Exception | None) -> None:
        del self.inboxes[inbox.request_id]
        inbox.fail(error)
        self._tell([inbox])

    def _fail_all(self, started: list[Inbox], error: BaseException) -> None:
        with suppress(Exception):  # what is left of the engine
            self.llm.abort_request([inbox.request_id for inbox in started])
            self.llm.step()
        for inbox in started:
            text = blame("the engine", error, "a step")
            self._fail(inbox, SpecdecError(f"request {inbox.request_id!r} ended: {text}"))

    def _tell(self, moved: list[Inbox]) -> None:
        """Wake the readers. Without an event loop nobody is left to read, and all ends."""
        assert self.loop is not None
        with self._lock:
            self._moved.update(dict.fromkeys(moved))
            waking, self._waking = self._waking, True
        try:
            if not waking:
                self.loop.call_soon_threadsafe(self._wake)
            closed = self.loop.is_closed()
        except RuntimeError:  # it was closed just now
            closed = True
        if closed:
            for inbox in list(self.inboxes.values()):
                self.drop(inbox)

    def _wake(self) -> None:
        with self._lock:
            moved, self._moved, self._waking = self._moved, {}, False
        for inbox in moved:
            inbox.moved.set()


def _raisable(error: BaseException) -> Exception:
    """An error as a reader may see it: `SystemExit` would end whoever reads."""
    if isinstance(error, Exception):
        return error
    return SpecdecError(f"reading the prompt raised {type(error).__name__}: {error}")


async def result(job: Future[T]) -> T:
    """Wait for a job. It runs whatever becomes of the one who waits."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    job.add_done_callback(tell)
    await done.wait()
    return job.result()
