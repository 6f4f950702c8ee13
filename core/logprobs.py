"""Log-probabilities that a request gives back. vLLM's names; compact until an output is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen
class Logprob:
    """What the target said of one token.

    logprob: natural logarithm of its probability, *raw*: the softmax of the model's logits, before
        temperature, truncation, penalties, biases and every other sampling parameter. -inf if the
        model excludes it.
    rank: how many tokens are at least as likely, itself and all that tie with it included.
    decoded_token: the token decoded alone, special tokens too; one that holds a part of a
        character shows U+FFFD. None without a tokenizer, or if that does not know the id.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@attrs.frozen(eq=False)
class LogprobArrays:
    """Entries of some tokens, one row each: the token first, then the n likeliest in order."""

    ids: NDArray[np.int32]  # [tokens, 1 + n]
    logprobs: NDArray[np.float32]  # [tokens, 1 + n]
    ranks: NDArray[np.int32]  # [tokens, 1 + n]

    @classmethod
    def empty(cls, tokens: int, n: int) -> LogprobArrays:
        """Room for so many tokens, not filled."""
        shape = (tokens, 1 + n)
        return cls(
            np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.int32)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> LogprobArrays:
        return LogprobArrays(self.ids[part], self.logprobs[part], self.ranks[part])

    def __setitem__(self, part: slice, other: LogprobArrays) -> None:
        self.ids[part] = other.ids
        self.logprobs[part] = other.logprobs
        self.ranks[part] = other.ranks


class LogprobLog:
    """The log-probabilities of one completion, as they come in.

    n: likeliest tokens per entry; 0 keeps the tokens alone.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._length = 0
        self._entries = LogprobArrays.empty(0, n)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._dicts: list[dict[int, Logprob]] = []
        self._texts: dict[int, str | None] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def cumulative(self) -> float:
        """The sum over the tokens; 0 if there are none."""
        return float(self._entries.logprobs[: self._length, 0].sum(dtype=np.float64))

    def append(self, entries: LogprobArrays) -> None:
        """Add the entries of the next tokens."""
        assert entries.ids.shape[1] == 1 + self.n
        length = self._length + len(entries)
        if length > len(self._entries):
            more = LogprobArrays.empty(length + length // 2, self.n)
            more[: self._length] = self._entries[: self._length]
            self._entries = more
        self._entries[self._length : length] = entries
        self._length = length

    def as_dicts(
        self, tokenizer: PreTrainedTokenizerBase | None, start: int = 0
    ) -> list[dict[int, Logprob]]:
        """One dict per token from `start` on: the token first, then the likeliest in order.

        A token that is among the likeliest stands in its dict once. Each dict is made once, by the
        first call that asks for it: the list is the caller's, the dicts are shared and not to be
        changed.
        """
        if tokenizer is not self._tokenizer:
            self._tokenizer = tokenizer
            self._dicts.clear()
            self._texts.clear()
        new = self._entries[len(self._dicts) : self._length]
        rows = zip(new.ids.tolist(), new.logprobs.tolist(), new.ranks.tolist(), strict=True)
        for ids, logprobs, ranks in rows:
            # a token that comes again keeps its place, and says the same
            entry = {
                token: Logprob(logprob, rank, self._text(token))
                for token, logprob, rank in zip(ids, logprobs, ranks, strict=True)
            }
            self._dicts.append(entry)
        return self._dicts[start:]

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            try:
                self._texts[token] = str(self._tokenizer.decode([token]))
            except Exception:  # heads are padded: some tokenizers raise for an id they do not have
                self._texts[token] = None
        return self._texts[token]


class PromptLogprobLog:
    """The log-probabilities of one prompt, as its chunks come in.

    n: likeliest tokens per entry; 0 keeps the tokens alone.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._log = LogprobLog(n)

    def __len__(self) -> int:
        """Entries so far, those of the tokens 1 to this; in the end one fewer than tokens."""
        return len(self._log)

    def append(self, entries: LogprobArrays) -> None:
        """Add the entries of the next tokens."""
        self._log.append(entries)

    def as_dicts(
        self, tokenizer: PreTrainedTokenizerBase | None
    ) -> list[dict[int, Logprob] | None]:
        """One entry per token so far, as in `LogprobLog.as_dicts`.

        The first is None: nothing comes before the first token that could predict it.
        """
        return [None, *self._log.as_dicts(tokenizer)]
