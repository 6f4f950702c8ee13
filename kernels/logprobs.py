"""Log-probabilities of given tokens and of the likeliest ones: plain torch, for any device."""

from __future__ import annotations

import importlib
from math import inf
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec_kernels import ops
from specdec_kernels._checks import Arguments, device_of


class TokenLogprobs(NamedTuple):
    """What rows of logits say of one token each, and of the n likeliest.

    A rank is the number of ids that are at least as likely, the token itself and all that tie with
    it among them: 1 for the only largest.

    logprob: float32 [R]; -inf for an excluded token.
    rank: int64 [R]; V for an excluded token, 0 for padding.
    top_ids: int64 [R, n], likeliest first, ties by the lowest id.
    top_logprobs: float32 [R, n].
    top_ranks: int64 [R, n].
    """

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top_ranks: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, n: int) -> TokenLogprobs:
    """The log-probability of one token per row, and the n largest of the row.

    Shapes: R rows, V ids.

    logits: any float dtype [R, V]; left as they are.
    tokens: int64 [R]; an id outside [0, V) is padding: log-probability -inf, rank 0.
    n: from 0 to V. The n likeliest are the first n of any larger number.

    A log-softmax in float32: no temperature, no truncation. Likelier means a larger logit, compared
    in the dtype of the logits. NaN counts as -inf, +inf as the largest float; in a row that
    excludes every id all log-probabilities are -inf. A row's result depends on nothing else in the
    call, bit for bit. Takes scratch of several times the logits: hand over long prompts in blocks.

    >>> found = token_logprobs(torch.tensor([[0.0, 1.0, 1.0]]).log(), torch.tensor([2]), 2)
    >>> found.logprob, found.rank
    (tensor([-0.6931]), tensor([2]))
    >>> found.top_ids, found.top_logprobs, found.top_ranks
    (tensor([[1, 2]]), tensor([[-0.6931, -0.6931]]), tensor([[2, 2]]))
    """
    if torch.compiler.is_compiling():
        return TokenLogprobs(*ops.token_logprobs(logits, tokens, n))
    check = Arguments("token_logprobs", device_of("token_logprobs", "logits", logits))
    check.logits("logits", logits, "R V")
    check.tensor("tokens", tokens, "R", torch.int64)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"token_logprobs: n must be an int, not {type(n).__name__} ({n!r})")
    vocab = logits.shape[1]
    if not 0 <= n <= vocab:
        raise ValueError(f"token_logprobs: n is {n}; expected 0 to V={vocab}")

    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        fast = importlib.import_module("specdec_kernels.gpu.logprobs")
        return cast("TokenLogprobs", fast.token_logprobs(logits, tokens, n))
    largest = min(torch.finfo(logits.dtype).max, torch.finfo(torch.float32).max)
    values = logits.nan_to_num(nan=-inf, posinf=inf, neginf=-inf).clamp_(max=largest)
    # Not logsumexp, whose rounding depends on the number of rows and threads; a row of log_softmax
    # belongs to one thread. It is NaN where a row excludes every id.
    laws = values.log_softmax(-1, dtype=torch.float32).nan_to_num_(nan=-inf, neginf=-inf)

    known = (tokens >= 0) & (tokens < vocab)
    index = tokens.where(known, 0)[:, None]
    rank = (values >= values.gather(1, index)).sum(-1)
    ids = _largest(values, n)
    return TokenLogprobs(
        logprob=laws.gather(1, index).squeeze(1).where(known, -inf),
        rank=rank.where(known, 0),
        top_ids=ids,
        top_logprobs=laws.gather(1, ids),
        top_ranks=_ranks(values, values.gather(1, ids)),
    )


def _largest(values: Tensor, n: int) -> Tensor:
    """Ids of the n largest of each row, largest first, ties by the lowest id: int64 [R, n]."""
    vocab = values.shape[1]
    if n == 0:
        return values.new_empty((len(values), 0), dtype=torch.int64)
    if n == vocab:
        return _descending(values)
    # topk takes any of the ids that tie: the set is right unless one more ties with the last
    found = values.topk(n + 1)
    ids = found.indices[:, :n].sort(-1).values
    cut, below = found.values[:, n - 1], found.values[:, n]
    tied = (cut == below).nonzero().squeeze(-1)
    if tied.numel():
        part, at = values[tied], cut[tied, None]
        above, equal = part > at, part == at
        wanted = n - above.sum(-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
        ids[tied] = chosen.nonzero()[:, 1].view(-1, n)
    return ids.gather(1, _descending(values.gather(1, ids)))


def _descending(values: Tensor) -> Tensor:
    """The order of each row's columns, largest first, of equal ones the first first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices


def _ranks(values: Tensor, top: Tensor) -> Tensor:
    """For each of the largest of a row, how many of the whole row are no smaller: int64."""
    if not top.shape[1]:
        return top.new_empty(top.shape, dtype=torch.int64)
    last = top[:, -1:]
    ascending = top.neg()  # of equal values, all are counted
    within = torch.searchsorted(ascending, ascending, right=True)
    # ids past the n largest may tie with the last of them, and with no other
    return within.where(top > last, (values >= last).sum(-1, keepdim=True))
