"""The outputs of one request, on their way from the engine's thread to their reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from specdec.errors import ConfigError, SpecdecError

if TYPE_CHECKING:
    from specdec.outputs import RequestOutput


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise `ConfigError` unless this runs in the event loop."""
    if asyncio.get_running_loop() is not loop:
        raise ConfigError(
            "this AsyncLLM is used from another event loop, and serves one; make an AsyncLLM for "
            "each loop"
        )


def joined(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """Two deltas that follow each other as one. Neither is to be used afterwards."""
    earlier = {completion.index: completion for completion in old.outputs}
    for after in new.outputs:
        before = earlier.pop(after.index, None)
        if before is None:
            continue
        after.text = before.text + after.text
        # the older lists grow: a reader who sleeps long does not cost a copy with every step
        before.token_ids += after.token_ids
        after.token_ids = before.token_ids
        if before.logprobs is not None and after.logprobs is not None:
            before.logprobs += after.logprobs
            after.logprobs = before.logprobs
    new.outputs = sorted([*earlier.values(), *new.outputs], key=lambda c: c.index)
    return new


class Inbox:
    """Where the engine's thread leaves the outputs of a request: one at most, whoever reads when.

    delta: outputs that were not taken are joined; otherwise the newest replaces them.

    moved: set in the event loop after something was left here. started: it is in the engine.
    ended: nothing more comes. dropped: nobody reads any more.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, *, delta: bool) -> None:
        self.request_id = request_id
        self.loop = loop
        self.moved = asyncio.Event()
        self.started = False
        self.ended = False
        self.dropped = False
        self._delta = delta
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Leave the next output."""
        with self._lock:
            if self._pending is not None and self._delta:
                output = joined(self._pending, output)
            self._pending = None if self.dropped else output
            self.ended = output.finished

    def fail(self, error: Exception | None) -> None:
        """End without an output, by what its reader is to be raised, if anything."""
        with self._lock:
            self._error = error
            self.ended = True

    def take(self) -> RequestOutput | None:
        """What was left here, once; None if it is too early.

        Raises:
            StopAsyncIteration: nothing more comes. Before it, once, the error that ended it.
        """
        with self._lock:
            if self.dropped:
                raise StopAsyncIteration
            output, self._pending = self._pending, None
            if output is not None:
                return output
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # or it would hold itself, through this frame
            if self.ended:
                raise StopAsyncIteration
            return None


class OutputStream:
    """The outputs of one request in their order, for one reader: an async iterator.

    Whatever ends the reading ends the request: cancelling a task that waits for the next output,
    `aclose`, or letting go of the stream, as a `break` out of `async for` does.
    """

    def __init__(self, inbox: Inbox, drop: Callable[[Inbox], None]) -> None:
        self._inbox = inbox
        self._drop = drop
        self._reading = False

    @property
    def request_id(self) -> str:
        """Its name, for `AsyncLLM.abort`."""
        return self._inbox.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output: all that came since the last one."""
        inbox = self._inbox
        check_loop(inbox.loop)
        if self._reading:
            raise SpecdecError(f"the stream of request {inbox.request_id!r} is being read already")
        self._reading = True
        try:
            while (output := inbox.take()) is None:
                inbox.moved.clear()
                await inbox.moved.wait()
            return output
        except BaseException:
            self._drop(inbox)
            raise
        finally:
            self._reading = False

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and wait until the engine has let go of it."""
        inbox = self._inbox
        check_loop(inbox.loop)
        self._drop(inbox)
        inbox.moved.set()  # somebody may be reading
        while not inbox.ended:
            inbox.moved.clear()
            await inbox.moved.wait()

    def __del__(self) -> None:
        # in any thread, in the middle of anything
        self._drop(self._inbox)
