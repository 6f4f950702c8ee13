"""Rules that accept by comparing laws, and replace a refused draft from what p has more than q.

standard: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).
block: Sun et al. 2024 (arXiv:2403.10444). synthetic: acceptance at given rates, for load tests.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels import noise
from specdec_kernels.chains import Chains, Given, at, first_largest, prefix, take, uniforms
from specdec_kernels.logits import log_total, process_logits, tempered, truncates
from specdec_kernels.types import DenseQ


class _Tests(NamedTuple):
    """Every draft of every request, in one list of t."""

    request: Tensor  # [t]
    column: Tensor  # [t]
    draft: Tensor  # [t]
    log_p: Tensor  # [t, V]
    log_q: Tensor | None  # [t, V]; None: all of q is on the draft


def _tests(given: Given, chains: Chains) -> _Tests:
    request, column = chains.tested.nonzero(as_tuple=True)
    rows, slots = chains.row[request, column], chains.slot[request]
    target = process_logits(take(given.logits, rows), slots, given.sampling)
    draft = chains.draft[request, column]
    log_q = _log_q(given, slots, column, draft)
    return _Tests(request, column, draft, target.log_softmax(-1), log_q)


def _log_ratio(tests: _Tests, like: Tensor) -> Tensor:
    """Log of p(d) / q(d) per draft: float32 [n, K]; -inf past the chain and where p(d) = 0."""
    ratio = at(tests.log_p, tests.draft)
    if tests.log_q is not None:
        ratio = ratio - at(tests.log_q, tests.draft)
    table = torch.full(like.shape, -inf, dtype=ratio.dtype, device=ratio.device)
    table[tests.request, tests.column] = ratio.nan_to_num(nan=-inf, posinf=inf, neginf=-inf)
    return table


def standard(given: Given, chains: Chains) -> tuple[Tensor, Tensor]:
    """Accept d with probability min(1, p(d) / q(d)), up to the first failure."""
    ratio = _log_ratio(_tests(given, chains), chains.draft)
    accepted = prefix(ratio > uniforms(given, chains).log())
    return accepted, _next_token(given, chains, accepted)


def block(given: Given, chains: Chains) -> tuple[Tensor, Tensor]:
    """Accept up to the *last* success, with thresholds on the ratio of the whole block so far."""
    tests = _tests(given, chains)
    ratio = _log_ratio(tests, chains.draft)
    log_rho = ratio.new_zeros(chains.row.shape)  # [n, K + 1]: rho after i drafts
    for i in range(ratio.shape[1]):
        joint = (log_rho[:, i] + ratio[:, i]).clamp(max=0)
        log_rho[:, i + 1] = joint.nan_to_num(nan=-inf, neginf=-inf)

    # Draft i is followed by draft i + 1, whose row has what rho * p exceeds q by; the last draft by
    # none, and its threshold is rho itself.
    threshold = log_rho[:, 1:].exp()
    ahead = tests.column > 0
    request, column = tests.request[ahead], tests.column[ahead]
    carried = log_rho[request, column]
    log_p = tests.log_p[ahead] + carried[:, None]
    log_q = None if tests.log_q is None else tests.log_q[ahead]
    mass = log_total(_residual(log_p, log_q, tests.draft[ahead])).exp().nan_to_num(nan=0.0)
    missing = mass - torch.expm1(carried)
    threshold[request, column - 1] = (mass / missing).where(missing > 0, 1.0)

    passed = (uniforms(given, chains) <= threshold) & chains.tested
    accepted = (passed * chains.column[1:]).amax(1) if passed.shape[1] else chains.length
    return accepted, _next_token(given, chains, accepted, at(log_rho, accepted))


def _residual(log_p: Tensor, log_q: Tensor | None, draft: Tensor) -> Tensor:
    """Log of max(p - q, 0): float32 [n, V], not normalised. `log_p` may be scaled below a law."""
    if log_q is None:
        return log_p.scatter(1, draft[:, None], -inf)
    # in log space: the difference of two nearly equal probabilities would be rounding noise
    rho = (log_q - log_p).exp()
    return (log_p + torch.log1p(-rho)).where(rho < 1, -inf)


def drawn(given: Given, rows: Tensor, slots: Tensor) -> Tensor:
    """The target's own tokens for rows of sampled requests: int64 [n].

    A draw from the whole law, as a coupled drafter makes it too. Where truncation excludes what it
    gave, another one, noise.ATTEMPTS in all, and then one from what is left. That has the truncated
    law: with P the mass that truncation keeps, the first n draws give x with probability
    (1 - (1 - P)^n) p(x) / P, and the last one has the rest.
    """
    logits = take(given.logits, rows)
    stream, positions = given.sampling.stream[slots], given.positions[rows]
    weights = tempered(logits, slots, given.sampling)
    tokens = noise.draw(weights, stream, positions, noise.TARGET_TOKEN)
    some = truncates(slots, given.sampling).nonzero().squeeze(-1)
    if not some.numel():
        return tokens
    kept = process_logits(logits[some], slots[some], given.sampling)
    weights, stream, positions = weights[some], stream[some], positions[some]
    for attempt in range(1, noise.ATTEMPTS + 1):
        lost = at(kept, tokens[some]) == -inf
        if not lost.any():
            break
        some, kept, weights = some[lost], kept[lost], weights[lost]
        stream, positions = stream[lost], positions[lost]
        if attempt < noise.ATTEMPTS:
            again = noise.draw(weights, stream, positions, noise.TARGET_TOKEN, attempt)
        else:
            again = noise.draw(kept, stream, positions, noise.REDRAW_TOKEN)
        tokens[some] = again
    return tokens


def _next_token(
    given: Given, chains: Chains, accepted: Tensor, log_rho: Tensor | None = None
) -> Tensor:
    """The token after `accepted` drafts: from the residual of the refused one, else from p."""
    rows = at(chains.row, accepted)
    rejected = accepted < chains.length
    tokens = torch.empty_like(rows)
    all_kept = (~rejected).nonzero().squeeze(-1)
    if all_kept.numel():
        tokens[all_kept] = drawn(given, rows[all_kept], chains.slot[all_kept])
    some = rejected.nonzero().squeeze(-1)
    if some.numel():
        rows, slots, column = rows[some], chains.slot[some], accepted[some]
        weights = process_logits(take(given.logits, rows), slots, given.sampling)
        log_p = weights.log_softmax(-1)
        if log_rho is not None:
            log_p = log_p + log_rho[some, None]
        draft = chains.draft[some, column]
        rest = _residual(log_p, _log_q(given, slots, column, draft), draft)
        # by rounding p may exceed q nowhere; then p = q as far as floats tell
        possible = (rest > -inf).any(-1, keepdim=True)
        rest = rest.where(possible, weights)
        # the residual may share no noise with the bonus of this position or with its drafts
        stream, domain = given.sampling.stream[slots], noise.RESIDUAL_TOKEN
        tokens[some] = noise.draw(rest, stream, given.positions[rows], domain)
    return tokens


def _log_q(given: Given, slots: Tensor, column: Tensor, draft: Tensor) -> Tensor | None:
    """The drafts' law over target ids: float32 [n, V].

    A row that is no law (NaN, or it excludes every id) counts as certain of its draft, which is
    exact for any draft under every method.
    """
    vocab = given.logits.shape[1]
    if given.q is None:
        return None
    if isinstance(given.q, DenseQ):
        cached = given.q.logits[slots, column, :vocab]
        weights = tempered(cached, slots, given.sampling)
        weights = pad(weights, (0, vocab - weights.shape[1]), value=-inf)
        if given.q.lse is not None:
            total = given.q.lse[slots, column]
            return _or_certain(weights - total[:, None], ~total.isfinite(), draft)
    else:
        ids = given.q.ids[slots, column]
        known = (ids >= 0) & (ids < vocab)
        kept = tempered(given.q.logits[slots, column], slots, given.sampling).where(known, -inf)
        weights = kept.new_full((len(slots), vocab), -inf)
        weights = weights.scatter_reduce_(1, ids.where(known, 0), kept, "amax")
    log_q = weights.log_softmax(-1)
    return _or_certain(log_q, log_q.isnan().any(-1), draft)


def _or_certain(log_q: Tensor, lawless: Tensor, draft: Tensor) -> Tensor:
    """log_q, and of rows that are no law that of a certain draft."""
    certain = torch.full_like(log_q[lawless], -inf)
    log_q[lawless] = certain.scatter_(1, draft[lawless][:, None], 0.0)
    return log_q


def _forced(given: Given, chains: Chains) -> Tensor:
    assert given.rates is not None
    wanted = uniforms(given, chains) < given.rates[: chains.draft.shape[1]]
    return prefix(wanted & chains.tested)


def synthetic_greedy(given: Given, chains: Chains) -> tuple[Tensor, Tensor]:
    """Accept at the given rates, then the argmax."""
    accepted = _forced(given, chains)
    return accepted, first_largest(take(given.logits, at(chains.row, accepted)))


def synthetic(given: Given, chains: Chains) -> tuple[Tensor, Tensor]:
    """Accept at the given rates, then the token that `standard` would replace the draft by."""
    accepted = _forced(given, chains)
    return accepted, _next_token(given, chains, accepted)
