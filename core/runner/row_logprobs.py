"""Log-probabilities from rows of logits: of the tokens a step emits, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.logprobs import LogprobArrays
from specdec.types import Step
from specdec_kernels.logprobs import token_logprobs

Ints = NDArray[np.int64]

# A log-softmax takes several times the logits it reads: over 512 rows of a large vocabulary that
# would be more than a gigabyte.
_ROWS_AT_ONCE = 64


def top_count(asked: int | None, vocab_size: int) -> int:
    """The number of likeliest tokens that a parameter asks for; -1 if it asks for nothing.

    asked: `SamplingParams.logprobs` or `prompt_logprobs`: there, None is nothing and -1 all. More
        than there are gives all.
    """
    if asked is None:
        return -1
    return vocab_size if asked < 0 else min(asked, vocab_size)


@attrs.frozen(eq=False)
class _Kept:
    """Copies of rows of logits, and whose they are.

    shift: what makes a row of the step's logits one of the copies, by request.
    """

    logits: Tensor  # [rows kept, vocab]
    wanted: Ints  # [batch]
    shift: Ints  # [batch]


class RowLogprobs:
    """The raw logits of a step, from before they are edited until the commit.

    Once per step: `keep` right after the forward pass, `take` after the commit.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def keep(self, step: Step, logits: Tensor, wanted: Ints) -> None:
        """Copy the rows of requests that want log-probabilities; nothing at all if none does.

        logits: [logit_rows, vocab]; may be overwritten afterwards.
        wanted: [batch], padding or not, on the host: how many of the likeliest (see `top_count`),
            -1 where nothing is wanted.
        """
        self._kept = None
        asking = np.flatnonzero(wanted >= 0)
        if not len(asking):
            return
        start = step.logits_start.cpu().numpy()
        first, counts = start[asking], start[asking + 1] - start[asking]
        rows = torch.from_numpy(_ranges(first, counts)).to(logits.device)
        shift = np.zeros(len(wanted), dtype=np.int64)
        shift[asking] = np.cumsum(counts) - counts - first
        self._kept = _Kept(logits.index_select(0, rows), wanted.copy(), shift)

    def take(self, tokens: Ints, kept: Ints, rows: Tensor) -> dict[int, LogprobArrays]:
        """The entries of the tokens that stand, by request; requests without any are left out.

        tokens: [batch, K + 1]; kept: [batch], leading tokens that stand after every cut; both on
        the host. rows: `Verdict.rows`. The copies are dropped.
        """
        if self._kept is None:
            return {}
        logits, shift = self._kept.logits, self._kept.shift
        wanted = self._kept.wanted[: len(kept)]
        self._kept = None
        # a copy to the host beside that of the commit, and only if somebody wants to know
        row_of = rows[: len(kept)].cpu().numpy()
        found: dict[int, LogprobArrays] = {}
        stands = (wanted >= 0) & (kept > 0)
        for n in np.unique(wanted[stands]).tolist():
            requests = np.flatnonzero(stands & (wanted == n))
            counts = kept[requests]
            owner, column = np.repeat(requests, counts), _ranges(np.zeros_like(counts), counts)
            read = row_of[owner, column] + shift[owner]
            entries = _entries(logits, read, tokens[owner, column], n)
            for request, end in zip(requests.tolist(), np.cumsum(counts).tolist(), strict=True):
                found[request] = entries[end - int(kept[request]) : end]
        return found


@attrs.frozen(eq=False)
class PromptChunk:
    """Rows in prefill of a request that wants log-probabilities of its prompt.

    prompt: the request's own, without anything it emitted before a preemption. first: position of
    the first row. rows: how many there are. have: entries that it has by now, of the tokens 1 to
    `have`. n: likeliest tokens wanted, see `top_count`.
    """

    request: int  # its index in the step
    prompt: Ints  # [prompt tokens]
    first: int
    rows: int
    have: int
    n: int

    @property
    def needed(self) -> range:
        """Positions of the rows to read: that of p predicts token p + 1 of the prompt.

        The row of the last token predicts no prompt token; what is there already is not read again.
        """
        assert self.first <= self.have or self.have == len(self.prompt) - 1, "tokens were skipped"
        end = min(self.first + self.rows, len(self.prompt) - 1)
        return range(min(max(self.first, self.have), end), end)


def prompt_rows(chunks: Sequence[PromptChunk]) -> tuple[Ints, Ints]:
    """The rows whose logits are needed for prompts: of which request, and which row of it.

    Chunk after chunk, as `prompt_logprobs` takes their logits.
    """
    empty = np.empty(0, dtype=np.int64)
    requests = [np.full(len(c.needed), c.request) for c in chunks]
    rows = [np.arange(c.needed.start, c.needed.stop) - c.first for c in chunks]
    return np.concatenate([empty, *requests]), np.concatenate([empty, *rows])


def prompt_logprobs(chunks: Sequence[PromptChunk], logits: Tensor) -> dict[int, LogprobArrays]:
    """The new entries of each request; requests without any are left out.

    logits: [the rows of `prompt_rows` or more, vocab], as the target gave them.
    """
    found: dict[int, LogprobArrays] = {}
    done = 0
    for chunk in chunks:
        needed = chunk.needed
        if needed:
            rows = np.arange(done, done + len(needed))
            following = chunk.prompt[needed.start + 1 : needed.stop + 1]
            found[chunk.request] = _entries(logits, rows, following, chunk.n)
            done += len(needed)
    return found


def _entries(logits: Tensor, rows: Ints, tokens: Ints, n: int) -> LogprobArrays:
    """What the rows say of one token each and of the n likeliest, in blocks of rows."""
    found = LogprobArrays.empty(len(tokens), n)
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        index = torch.from_numpy(rows[block]).to(logits.device)
        # a copy: what a user hands over may be read only, of which torch warns
        given = torch.from_numpy(tokens[block].copy()).to(logits.device)
        said = token_logprobs(logits.index_select(0, index), given, n)
        for into, own, top in (
            (found.ids, given, said.top_ids),
            (found.logprobs, said.logprob, said.top_logprobs),
            (found.ranks, said.rank, said.top_ranks),
        ):
            into[block] = torch.cat([own[:, None], top], dim=1).cpu().numpy()
    return found


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """So many numbers from each start on, one range after the other."""
    offsets = np.cumsum(counts) - counts
    ranges: Ints = np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))
    return ranges
