"""The chat itself: a message goes in, an answer streams out, and the numbers follow."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import cli_report
from specdec._structure import printable
from specdec.chat.interrupt import Interrupt
from specdec.cli_options import check_text
from specdec.errors import PromptError, SpecdecError
from specdec.metrics import SpeculationMetrics
from specdec.prompts import read_prompts

if TYPE_CHECKING:
    from specdec.chat.conversation import Conversation
    from specdec.llm import LLM
    from specdec.outputs import RequestOutput
    from specdec.sampling_params import SamplingParams


class Chat:
    """Answers on stdout; everything else that it says goes to stderr.

    interactive: Ctrl-C ends an answer and not the chat.
    """

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        params: SamplingParams,
        *,
        interactive: bool,
    ) -> None:
        self.llm = llm
        self.conversation = conversation
        self.params = params
        self.interactive = interactive
        self.answers = 0
        self.tokens = 0
        self.seconds = 0.0
        self.saved: set[Path] = set()  # files that /save wrote

    def say(self, text: str) -> None:
        """Print what is no answer; it may be a plugin's, so without control characters."""
        print(*map(printable, text.split("\n")), sep="\n", file=sys.stderr, flush=True)

    def tokens_in(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt."""
        (found,) = read_prompts(prompt, self.llm.tokenizer)
        return found.token_ids

    def answer(self, message: str) -> None:
        """Stream the answer to a message and remember both.

        Raises:
            SpecdecError: there is no answer; the conversation is as it was before.
        """
        ids = self.tokens_in(self.conversation.prompt(check_text(message, "the message")))
        limit = self.llm.max_model_len
        if len(ids) >= limit:
            raise PromptError(
                f"the context is full: with this message the conversation has {len(ids)} tokens, "
                f"and the model takes {limit - 1} and one to answer. The message was not sent; "
                "/drop forgets the oldest turn, /undo the last one, /reset all"
            )
        start = time.perf_counter()
        last = self._stream(ids)
        seconds = time.perf_counter() - start
        if last is not None and last.error:
            raise SpecdecError(f"the answer failed: {last.error}. The message was taken back")
        aborted = last is None or last.outputs[0].finish_reason in (None, "abort")
        if last is None or (aborted and not last.outputs[0].text):
            self.say("(aborted before the first word; the message was taken back)")
            return
        completion = last.outputs[0]
        self.conversation.add(message, completion.text)
        self.answers += 1
        self.tokens += len(completion.token_ids)
        self.seconds += seconds
        if aborted:
            self.say("(aborted; what was said is kept)")
        elif completion.finish_reason == "length":
            full = len(ids) + len(completion.token_ids) >= limit
            why = "the context is full" if full else "--max-tokens allows no more"
            self.say(f"(cut off: {why})")
        line = cli_report.summary(
            len(completion.token_ids), seconds, last.metrics.speculative_decoding
        )
        self.say(f"[{line}; {self.context()}]")

    def _stream(self, ids: list[int]) -> RequestOutput | None:
        """Print the answer as it grows; returns its last state, None if it never had one."""
        last: RequestOutput | None = None
        printed = 0
        interrupt = Interrupt()
        name = self.llm.add_request({"prompt_token_ids": ids}, self.params)
        try:
            with interrupt if self.interactive else nullcontext():
                while last is None or not last.finished:
                    if interrupt.asked:
                        self.llm.abort_request(name)  # its last output comes with the next step
                    # one that Ctrl-C tore out of a step may still have an output to come
                    for last in (o for o in self.llm.step() if o.request_id == name):
                        text = last.outputs[0].text
                        print(text[printed:], end="", flush=True)
                        printed = len(text)
        except KeyboardInterrupt:  # the second one
            if not self.interactive:
                raise
        finally:
            self.llm.abort_request(name)
        print(flush=True)
        return last

    def statistics(self) -> str:
        """Return the numbers of the whole chat as a line."""
        metrics: SpeculationMetrics = self.llm.metrics
        line = cli_report.summary(self.tokens, self.seconds, metrics)
        turns = len(self.conversation.turns)
        return f"answers: {self.answers}; {line}; turns remembered: {turns}, {self.context()}"

    def context(self) -> str:
        """Return how many tokens the next prompt would hold but for its message.

        It is what is remembered, rendered anew: an answer may render to other tokens than those
        that the model drew, and templates drop what they like.
        """
        prompt = self.conversation.prompt()
        try:
            used = len(self.tokens_in(prompt)) if prompt else 0
        except PromptError:  # a template may refuse to end with an answer
            return "context unknown"
        return f"context {used} of {self.llm.max_model_len}"
