"""Temperature and truncation: from a row of logits to the law that is sampled.

Rows are selected by what their request asks for, so rows that ask for nothing cost nothing. On CUDA
that selection reads sizes back to the host; this file is the definition, not the fast path there.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from specdec_kernels.types import Sampling

GREEDY_BELOW = 1e-5
# Most rows reach their top-p within so many ids, and sorting all of them is ten times slower.
_FIRST_SORTED = 1024


def is_greedy(slots: Tensor, sampling: Sampling) -> Tensor:
    """Which requests take the argmax: bool [n]. Padding counts as slot 0."""
    return sampling.temperature[slots.clamp(min=0)] < GREEDY_BELOW


def truncates(slots: Tensor, sampling: Sampling) -> Tensor:
    """Which requests exclude ids by min-p, top-k or top-p: bool [n]."""
    return (sampling.min_p[slots] > 0) | (sampling.top_k[slots] > 0) | (sampling.top_p[slots] < 1)


def whole(sampling: Sampling) -> Sampling:
    """The same without min-p, top-k and top-p."""
    off = torch.zeros_like(sampling.min_p)
    return sampling._replace(min_p=off, top_k=torch.zeros_like(sampling.top_k), top_p=off + 1)


def tempered(logits: Tensor, slots: Tensor, sampling: Sampling) -> Tensor:
    """New float32 [n, V]: logits over temperature (1 for greedy rows), NaN excluded."""
    temperature = sampling.temperature[slots]
    temperature = temperature.where(temperature >= GREEDY_BELOW, 1.0)
    # a true division, as the drafter does: multiplying by 1 / T rounds to another law
    scaled = logits.to(torch.float32) / temperature[:, None]
    return scaled.nan_to_num_(nan=-inf, neginf=-inf)


def log_total(log_weights: Tensor) -> Tensor:
    """The log of the sum of the weights: float32 [n]; NaN if that is 0."""
    # Not logsumexp: several threads share the sum of a lone row, and round it to something else
    # than the sum of the same row among others. log_softmax keeps a row to one thread.
    return log_weights.amax(-1) - log_weights.log_softmax(-1).amax(-1)


def process_logits(logits: Tensor, slots: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then min-p, top-k and top-p, each one cut per row; documented in the package."""
    greedy = is_greedy(slots, sampling)
    slots = slots.clamp(min=0)
    scaled = tempered(logits, slots, sampling)
    min_p, top_k, top_p = (
        parameter[slots] for parameter in (sampling.min_p, sampling.top_k, sampling.top_p)
    )
    for asked, cut_of, parameter in (
        (min_p > 0, _min_p_cut, min_p),
        ((top_k > 0) & (top_k < logits.shape[1]), _top_k_cut, top_k),
        (top_p < 1, _top_p_cut, top_p),
    ):
        rows = (asked & ~greedy).nonzero().squeeze(-1)
        if rows.numel():
            part = scaled[rows]
            below = part < cut_of(part, parameter[rows])[:, None]
            scaled[rows] = part.masked_fill(below, -inf)
    return scaled


def _min_p_cut(scaled: Tensor, min_p: Tensor) -> Tensor:
    """The logit of a token `min_p` times as likely as the likeliest."""
    return scaled.amax(-1) + min_p.log()


def _top_k_cut(scaled: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest value."""
    largest = scaled.topk(int(top_k.max())).values
    return largest.gather(1, top_k[:, None] - 1).squeeze(1)


def _top_p_cut(scaled: Tensor, top_p: Tensor) -> Tensor:
    """The smallest value of the shortest sorted prefix that holds a mass of `top_p`."""
    vocab = scaled.shape[1]
    norm = log_total(scaled)[:, None]
    cut = torch.empty_like(top_p)
    left = torch.arange(len(scaled), device=scaled.device)
    for size in (min(_FIRST_SORTED, vocab), vocab):
        ordered = scaled[left].topk(size).values
        mass = (ordered - norm[left]).exp().cumsum(-1)
        last = (mass < top_p[left, None]).sum(-1)
        cut[left] = ordered.gather(1, last.clamp(max=size - 1)[:, None]).squeeze(1)
        left = left[last == size]
        if not left.numel():
            break
    return cut
