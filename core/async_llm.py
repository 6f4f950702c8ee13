"""The API for asyncio: many requests at once, beside an event loop that never waits for a step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specdec.engine_thread import EngineThread, one_thread, result
from specdec.errors import ConfigError, PromptError
from specdec.llm import LLM
from specdec.metrics import SpeculationMetrics
from specdec.output_stream import Inbox, OutputStream, check_loop
from specdec.prompts import Prompt, is_chat
from specdec.request_checks import check_ids, check_request_id
from specdec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.types import Capabilities


class AsyncLLM:
    """An `LLM` for asyncio: whatever is asked of it at the same time runs in one batch.

    One thread owns the engine: steps, tokenizers and, with `create`, the loading of the model run
    in it, and the event loop goes on meanwhile. It is used from one event loop, the one of the
    first request; `close` works from any.

    model, arguments: those of `LLM`. The constructor loads at once, and the caller waits; inside
        an event loop `await AsyncLLM.create(...)`.

    Usable as an async context manager; `close` ends what runs and frees everything.
    """

    def __init__(self, model: str | Path | PreTrainedModel, **arguments: Any) -> None:
        self._own(LLM(model, **arguments), one_thread())

    @classmethod
    async def create(cls, model: str | Path | PreTrainedModel, **arguments: Any) -> Self:
        """Load in the engine's thread. If the wait is cancelled, what was loaded is freed."""
        executor = one_thread()
        loading: Future[LLM] = executor.submit(LLM, model, **arguments)
        try:
            llm = await result(loading)
        except BaseException:
            loading.add_done_callback(_discard)
            executor.shutdown(wait=False)
            raise
        made = cls.__new__(cls)
        made._own(llm, executor)
        return made

    @classmethod
    def wrap(cls, llm: LLM) -> Self:
        """Take over an LLM that is there: from now on nobody else uses or closes it."""
        if not isinstance(llm, LLM):
            raise ConfigError(f"AsyncLLM.wrap takes an LLM, not {type(llm).__name__}")
        _ = llm.max_model_len  # it is open
        if llm.has_unfinished_requests():
            raise ConfigError(
                f"this LLM has {llm.num_unfinished_requests} requests of its own, whose outputs "
                "would be lost; finish or abort them first"
            )
        made = cls.__new__(cls)
        made._own(llm, one_thread())
        return made

    def _own(self, llm: LLM, executor: ThreadPoolExecutor) -> None:
        self._engine = EngineThread(llm, executor)
        self._numbers = itertools.count()

    # -- what was loaded ---------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self._engine.llm.max_model_len

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, which the engine's thread uses as well; None without one."""
        return self._engine.llm.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output."""
        return self._engine.llm.eos_token_ids

    @property
    def capabilities(self) -> Capabilities | None:
        """What the speculator declared; None without one."""
        return self._engine.llm.capabilities

    @property
    def lossless(self) -> bool:
        """Whether the verification in force keeps the target's law."""
        return self._engine.llm.lossless

    @property
    def rejection_sample_method(self) -> str | None:
        """The verification in force; None without a speculator."""
        return self._engine.llm.rejection_sample_method

    @property
    def metrics(self) -> SpeculationMetrics:
        """Speculation over every request, as of the last step; also when closed."""
        return self._engine.metrics

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that the engine has not let go of. Outputs may still be unread without any."""
        return len(self._engine.inboxes)

    # -- requests ----------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> OutputStream:
        """Queue a prompt; its outputs come as an async iterator.

        It is queued now, not when it is first read: calls follow each other in the order that
        they were made in. What an output holds is up to `SamplingParams.output_kind`. A reader
        gets all that came since the last output as one: cumulative outputs are skipped, deltas
        joined, so a slow one misses nothing and holds nobody up. The last output has `finished`.
        Leaving the iterator early aborts the request, see `OutputStream`.

        request_id: by default a number. It is in use until the engine has let go of the request.

        Raises:
            ConfigError: it is closed or closing, or this is another event loop, or none.
            PromptError: the id is in use. What is wrong with the prompt, its parameters or the
                priority is raised when the first output is asked for: reading a prompt takes
                the tokenizer, and that is left to the engine's thread.
            OutOfMemoryError: then, too: the request alone could outgrow the cache.
        """
        loop = self._bind()
        inbox = Inbox(
            self._name(request_id),
            loop,
            delta=isinstance(sampling_params, SamplingParams)
            and sampling_params.output_kind == "delta",
        )
        self._engine.add(inbox, prompt, sampling_params, priority)
        return OutputStream(inbox, self._engine.drop)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> OutputStream:
        """Queue a conversation; its answer comes as from `generate`.

        Raises:
            PromptError: as `generate`, and for a prompt that is no conversation.
        """
        if not is_chat(messages):
            raise PromptError(
                "chat takes messages, [{'role': ..., 'content': ...}, ...]; generate takes text "
                "and token ids"
            )
        return self.generate(messages, sampling_params, request_id=request_id, priority=priority)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests, each with a last output of what it emitted; back once they have ended.

        Ids of requests that have ended are ignored: an abort may cross with an end.
        """
        ids = check_ids(request_ids)
        if self._engine.end is None:
            self._bind()
            await result(self._engine.abort(ids))

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The event loop that it is used from."""
        if self._engine.end is not None:
            state = "closed" if self._engine.end.done() else "closing"
            raise ConfigError(f"this AsyncLLM is {state}")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise ConfigError("AsyncLLM takes requests inside an event loop") from error
        if self._engine.loop is None:
            self._engine.loop = loop
        check_loop(self._engine.loop)
        return loop

    def _name(self, request_id: str | None) -> str:
        used = self._engine.inboxes
        if request_id is None:
            return next(name for name in map(str, self._numbers) if name not in used)
        check_request_id(request_id, used)
        return request_id

    # -- end ---------------------------------------------------------------

    async def close(self) -> None:
        """End what runs, free model, cache and speculator, and wait for the thread.

        A request that runs ends with a last output, finish_reason "abort". Calling it again waits
        for the same end. It goes on if the wait is cancelled.
        """
        end = self._engine.close()
        try:
            await result(end)
        finally:
            if end.done():
                self._engine.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _discard(loading: Future[LLM]) -> None:
    if loading.exception() is None:
        loading.result().close()
