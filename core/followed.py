"""Requests in the engine that one reader follows to their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from specdec.errors import blame
from specdec.outputs import RequestOutput
from specdec.request import Request
from specdec.runner.engine import Engine
from specdec.runner.sequence import Sequence

logger = logging.getLogger(__name__)


class FollowedRequests:
    """Requests of one reader, until their last output was handed out.

    Several readers may follow requests of one engine: a step moves those of all.

    every_step: the reader wants outputs of requests that run, too, unless they ask for
        `output_kind="final_only"`.
    """

    def __init__(self, engine: Engine, *, every_step: bool) -> None:
        self._engine = engine
        self._every_step = every_step
        self._owners: dict[Sequence, Request] = {}
        self._requests: dict[str, Request] = {}
        self._news: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def start(self, requests: Iterable[Request]) -> None:
        """Queue requests; those of one reader have different ids."""
        for request in requests:
            self._requests[request.request_id] = request
            for sequence in request.sequences:
                self._owners[sequence] = request
                sequence.news = self._news
                sequence.watched = self._streams(request)
                self._engine.add(sequence)

    def step(self) -> list[Request]:
        """Requests that ended, or moved and are streamed; runs a step if none is known yet."""
        if self._requests and not self._news:
            self._engine.step()
        moved = {id(self._owners[s]): self._owners[s] for s in self._news}
        self._news.clear()
        for request in moved.values():
            if request.finished:
                self._forget(request)
        return [r for r in moved.values() if r.finished or self._streams(r)]

    def output(self, request: Request, *, whole: bool = False) -> RequestOutput:
        """What a request hands out now, by its kind of output, or everything.

        If its text cannot be made, it ends with an error and without text.
        """
        delta = not whole and request.sequences[0].params.output_kind == "delta"
        for sequence in request.sequences:
            self._engine.sync(sequence)
        for sequence in request.sequences:
            try:
                sequence.show()
                _ = sequence.text.text
            except Exception as error:  # whatever a tokenizer raises
                reason = blame("the tokenizer", error, "decode")
                logger.error("request %s: %s", sequence.name, reason, exc_info=error)
                self._engine.fail([sequence], reason)
                sequence.give_up_text(reason)
        if request.finished and request.request_id in self._requests:
            self._forget(request)
            for sequence in request.sequences:
                self._news.pop(sequence, None)
        return request.output(delta=delta)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; they come with the next step. Ids that are not here are ignored."""
        found = [self._requests[i] for i in request_ids if i in self._requests]
        self._engine.abort(s for request in found for s in request.sequences)

    def abort_all(self) -> None:
        """End whatever is left."""
        self._engine.abort(self._owners)

    def forget_all(self) -> None:
        """Follow nothing any more."""
        self._owners.clear()
        self._requests.clear()
        self._news.clear()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            del self._owners[sequence]

    def _streams(self, request: Request) -> bool:
        return self._every_step and request.sequences[0].params.output_kind != "final_only"
