"""The text of one completion: what may be shown so far, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from specdec.detokenizer import Detokenizer, decode
from specdec.errors import PromptError
from specdec.outputs import FinishReason
from specdec.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen
class StopMatch:
    """A stop string ended the completion.

    kept: how many of the tokens just appended stay; the last of them completed it. stop: which.
    """

    kept: int
    stop: str


class OutputText:
    """The text of one completion, fed with its tokens.

    How tokens are split over calls changes nothing but when text is there. Without stop strings
    tokens are only stored: text is made when it is read, at the end in one decode.

    tokenizer: None, or `detokenize` off: there is no text, and a stop string is a PromptError.
    include_stop_str_in_output: the text keeps the stop string, or the text of the stop token,
        that ended it.
    min_tokens: a stop string counts only if it lies wholly in the text of later tokens; a
        character is of the token that finishes it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        stop: Sequence[str],
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        min_tokens: int = 0,
        detokenize: bool = True,
    ) -> None:
        if stop and (tokenizer is None or not detokenize):
            reason = "there is no tokenizer" if tokenizer is None else "detokenize is off"
            raise PromptError(
                f"stop strings are looked for in the text, but {reason}; use stop_token_ids"
            )
        self._tokenizer = tokenizer if detokenize else None
        self._skip = skip_special_tokens
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._stops = StopStrings(stop) if stop else None
        self._detokenizer: Detokenizer | None = None  # made with the first token that needs it
        self._waiting: list[int] = []  # tokens whose text nobody needed yet
        self._count = 0  # tokens that were fed; only counted with stop strings
        self._exempt = 0  # characters to come that belong to the first min_tokens tokens
        self._tail = ""  # text that was searched and is held back
        self._searched = 0  # characters that were searched and left the tail
        self._text = ""
        self._taken = 0
        self._ended = False

    @classmethod
    def none(cls) -> OutputText:
        """One that stays empty."""
        return cls(None, stop=(), include_stop_str_in_output=False, skip_special_tokens=True)

    @property
    def text(self) -> str:
        """The text so far: whole characters, and nothing that may begin a stop string.

        It only grows; once the completion has ended it is all there.
        """
        self._catch_up()
        return self._text

    def take(self) -> str:
        """The part of `text` that was not taken yet."""
        fresh = self.text[self._taken :]
        self._taken += len(fresh)
        return fresh

    def append(
        self, tokens: Sequence[int], finish_reason: FinishReason | None = None
    ) -> StopMatch | None:
        """Go on with the next tokens, and say if a stop string completes in them.

        Then what comes after it is dropped and the completion has ended, whatever the reason
        given. Nothing is appended after an end.

        finish_reason: what ends the completion with the last of these tokens; None if it goes on.
            With "stop" the last one is the stop token. What was held back is then text too, and
            can complete a stop string.
        """
        assert not self._ended, "the completion has ended"
        assert tokens or finish_reason != "stop", "a stop token is the last of the tokens"
        shown = tokens[:-1] if finish_reason == "stop" and not self._include else tokens
        if self._stops is None:
            if self._tokenizer is not None:
                self._waiting.extend(shown)
            self._ended = finish_reason is not None
            return None
        for kept, token in enumerate(shown, 1):
            stop = self._feed(token)
            if stop is not None:
                return StopMatch(kept, stop)
        if finish_reason is None:
            return None
        stop = self._flush()
        return None if stop is None else StopMatch(len(tokens), stop)

    def end(self) -> None:
        """End here, with all the text there is; nothing happens if it has ended already.

        For what ends without a token, as an abort does. Text that was held back is still cut at a
        stop string.
        """
        if not self._ended:
            self.append((), "abort")

    def _catch_up(self) -> None:
        """Make the text of the tokens that wait: without stop strings nobody needed it yet."""
        if self._stops is not None or self._tokenizer is None:
            return
        if self._ended and self._detokenizer is None:
            if self._waiting:
                self._text = decode(self._tokenizer, self._waiting, skip_special_tokens=self._skip)
        else:
            for token in self._waiting:
                self._text += self._stream.push(token)
            if self._ended:
                self._text += self._stream.flush()
                self._detokenizer = None
        self._waiting.clear()

    @property
    def _stream(self) -> Detokenizer:
        if self._detokenizer is None:
            assert self._tokenizer is not None
            self._detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self._skip)
        return self._detokenizer

    def _feed(self, token: int) -> str | None:
        """Go on with one token; the stop string that completes with it."""
        assert self._stops is not None
        self._count += 1
        stop = self._search(self._stream.push(token))
        if stop is not None:
            return stop
        if self._count < self._min_tokens:
            return None
        pending = self._stream.pending
        if self._count == self._min_tokens:
            self._exempt = len(pending)
        elif self._stops.peek(pending[self._exempt :]) is not None:
            return self._flush()  # more tokens could change this text, but there will be none
        return None

    def _flush(self) -> str | None:
        """End, with the text that is held back; the stop string that completes in it."""
        stop = self._search(self._stream.flush())
        self._text += self._tail
        self._tail = ""
        self._ended = True
        return stop

    def _search(self, text: str) -> str | None:
        """Show more text, as far as no stop string can begin in it; the one that completes."""
        assert self._stops is not None
        exempt = len(text) if self._count <= self._min_tokens else self._exempt
        self._text += text[:exempt]
        self._exempt = max(0, self._exempt - len(text))
        found = self._stops.push(text[exempt:])
        self._tail += text[exempt:]
        if found is not None:
            end = found.end if self._include else found.start
            self._text += self._tail[: end - self._searched]
            self._tail = ""
            self._ended = True
            return found.stop
        held = 0 if self._include else self._stops.held
        shown = len(self._tail) - held
        self._text += self._tail[:shown]
        self._tail = self._tail[shown:]
        self._searched += shown
        return None
