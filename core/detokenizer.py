"""Tokens to text, one at a time: whole characters only, and nothing is ever taken back."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how every vocabulary with byte fallback writes one
_UNFINISHED = 3  # bytes of an unfinished character at most; a decoder may show U+FFFD for each
_WINDOW = 6  # tokens that are decoded for one more, usually
_KEPT = 2  # of them when it is cut
_KEPT_UNFINISHED = 10  # and if text is held: three times three bytes, and one token before


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """The text of all tokens at once; equal to what a `Detokenizer` gives piece by piece."""
    known = [t for t in tokens if _name(tokenizer, t) is not None]
    return _decode(tokenizer, known, skip_special_tokens)


class Detokenizer:
    """The text of a growing list of tokens, each character as soon as it is certain.

    All pieces together are `tokenizer.decode` of all tokens with `clean_up_tokenization_spaces`
    off: that one moves spaces that were already shown, and spoils code. It holds for every
    decoder that only appends when a token is added, apart from characters that are not finished:
    byte-level, byte fallback, word pieces, words. What another decoder takes back stays shown.

    Held back: up to three U+FFFD at the end, as they may be an unfinished character (another
    token settles it); and a run of byte-fallback tokens until it ends, because one wrong byte in
    it turns all of it into U+FFFD: see `pending`. Characters are code points: a combining mark
    comes after its letter. Ids that the tokenizer does not have give no text.

    A window of tokens is decoded rather than `tokenizers.decoders.DecodeStream` stepped: that one
    serves no tokenizer in Python, waits for ever on a U+FFFD that is meant, and drops what is
    unfinished at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # the last tokens: all that the next one's text depends on
        self._length = 0  # of the window's text, in characters, when it was last decoded
        self._shown = 0  # how many of them were given out
        self._run: _ByteRun | None = None  # at the end of the window

    def push(self, token: int) -> str:
        """The text that became certain with this token, often empty."""
        name = _name(self._tokenizer, token)
        if name is None:
            return ""
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            self._run = self._run or _ByteRun()
            self._run.add(token, int(byte[1], 16))
            if not self._run.broken:
                self._window.append(token)
                return ""
        elif self._run is not None:
            if self._skipped(token):
                return ""  # for the decoder the run goes on
            self._run = None
        return self._decode_with(token)

    @property
    def pending(self) -> str:
        """Whole characters that follow, should the run of byte tokens end here or go on well.

        Empty when there is no such run. Costs a decode of the run.
        """
        if self._run is None or self._run.broken:
            return ""
        whole = self._window[: len(self._window) - len(self._run.unfinished)]
        return self._text(whole)[self._shown :]

    def flush(self) -> str:
        """The text left at the end, an unfinished character as the tokenizer shows it.

        Nothing is pushed after it.
        """
        text = self._text(self._window)
        left = text[self._shown :]
        self._shown = len(text)
        return left

    def _decode_with(self, token: int) -> str:
        """Add a token to the window and give out what is certain."""
        self._window.append(token)
        text = self._text(self._window)
        if len(text) == self._length and self._skipped(token):
            self._window.pop()  # it would push what carries text out of the window
            return ""
        replaced = len(text) - len(text.rstrip("\ufffd"))
        certain = max(self._shown, len(text) - min(replaced, _UNFINISHED))
        fresh = text[self._shown : certain]
        self._length, self._shown = len(text), certain
        if len(self._window) > _WINDOW:
            self._cut()
        return fresh

    def _cut(self) -> None:
        """Forget tokens that the next one's text no longer depends on.

        What is left may be read differently at its beginning, which was shown long ago; it is
        aligned at its end.
        """
        held = self._length - self._shown
        kept = self._window[-(_KEPT_UNFINISHED if held else _KEPT) :]
        if self._run is not None:
            kept = self._run.unfinished + kept  # so that the run stays a broken one
        length = len(self._text(kept))
        if length > held:
            self._window, self._length, self._shown = kept, length, length - held

    def _text(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens, self._skip)

    def _skipped(self, token: int) -> bool:
        """Whether the token is a special one that is left out of the text."""
        return self._skip and self._text([token]) != _decode(self._tokenizer, [token], False)


class _ByteRun:
    """Byte-fallback tokens in a row.

    unfinished: the tokens after the last whole character. broken: whether these are the beginning
    of none; they and the flag then stay, whatever follows.
    """

    def __init__(self) -> None:
        self.unfinished: list[int] = []
        self.broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def add(self, token: int, byte: int) -> None:
        """Go on with a token that stands for a byte."""
        if self.broken:
            return
        self.unfinished.append(token)
        try:
            if self._utf8.decode(bytes([byte])):
                self.unfinished.clear()
        except UnicodeDecodeError:
            self.broken = True


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    """The token as the vocabulary writes it; None for an id outside, as of a padded head."""
    if token < 0:
        return None  # in Python it would count from the end
    try:
        name = tokenizer.convert_ids_to_tokens(token)
    except Exception:  # each tokenizer has an error of its own for an id that it does not know
        return None
    return name if isinstance(name, str) else None


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int], skip: bool) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return str(text)
