"""The definition of every op, in plain torch for any device, and the CPU path.

The ops have the signatures of the package's public functions, which check the arguments and
document them. Work is selected by the values of rows and requests, which on CUDA reads sizes back
to the host: kernels must match these results, not this control flow.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels import rejection
from specdec_kernels.candidates import sample_draft
from specdec_kernels.chains import Chains, Given, Rule, at, chains_of, first_largest, prefix, take
from specdec_kernels.edits import edited_copy
from specdec_kernels.logits import is_greedy, process_logits, tempered, whole
from specdec_kernels.types import DenseQ, EditInputs, Sampling, SparseQ, Verified

__all__ = ["process_logits", "sample", "sample_draft", "verify"]


def verify(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
    truncate: bool = True,
    edits: EditInputs | None = None,
) -> Verified:
    """Accept a prefix of every request's drafts and add one token of the target's."""
    if edits is not None:
        logits = edited_copy(logits, logits_start, draft_tokens, positions, slots, edits)
    if not truncate:
        sampling = whole(sampling)
    given = Given(logits, positions, sampling, q, acceptance_rates)
    chains = chains_of(logits.shape[1], logits_start, draft_tokens, slots)
    active = (logits_start.diff() > 0) & (slots >= 0)
    greedy = is_greedy(slots, sampling)
    accepted, token = torch.zeros_like(slots), torch.zeros_like(slots)
    for wanted, rule in zip((greedy, ~greedy), _RULES[method], strict=True):
        chosen = (active & wanted).nonzero().squeeze(-1)
        if chosen.numel():
            accepted[chosen], token[chosen] = rule(given, Chains(*(x[chosen] for x in chains)))

    count = (accepted + 1).where(active, 0)
    tokens = pad(draft_tokens, (0, 1)).scatter(1, accepted[:, None], token[:, None])
    emitted = chains.column < count[:, None]
    verified = Verified(tokens.where(emitted, -1), count, chains.row.where(emitted, -1))
    if edits is None:
        return verified
    return verified._replace(empty=_empty(given, slots, verified))


def sample(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    truncate: bool = True,
    edits: EditInputs | None = None,
) -> Tensor:
    """Plain decoding: one token per row, the one that `verify` gives without drafts."""
    if edits is not None:
        start = torch.arange(len(slots) + 1, device=slots.device)
        none = slots.new_empty((len(slots), 0))
        logits = edited_copy(logits, start, none, positions, slots, edits)
    if not truncate:
        sampling = whole(sampling)
    given = Given(logits, positions, sampling, None, None)
    greedy, padding = is_greedy(slots, sampling), slots < 0
    tokens = torch.full_like(slots, -1)
    for wanted, choose in ((greedy, _argmax), (~greedy, rejection.drawn)):
        rows = (wanted & ~padding).nonzero().squeeze(-1)
        if rows.numel():
            tokens[rows] = choose(given, rows, slots[rows])
    return tokens


def _empty(given: Given, slots: Tensor, verified: Verified) -> Tensor:
    """Which tokens are of rows that exclude every id: bool [B, K + 1]."""
    empty = torch.zeros_like(verified.rows, dtype=torch.bool)
    request, column = (verified.rows >= 0).nonzero(as_tuple=True)
    row, slot = verified.rows[request, column], slots[request]
    # where the token itself is not excluded there is no need to look at the others
    own = given.logits[row, verified.tokens[request, column]]
    excluded = tempered(own[:, None], slot, given.sampling)[:, 0] == -inf
    request, column, row, slot = (x[excluded] for x in (request, column, row, slot))
    if len(row):
        left = tempered(take(given.logits, row), slot, given.sampling).amax(-1)
        empty[request, column] = left == -inf
    return empty


def _argmax(given: Given, rows: Tensor, slots: Tensor) -> Tensor:
    return first_largest(take(given.logits, rows))


def _match(choose: Callable[[Given, Tensor, Tensor], Tensor]) -> Rule:
    def rule(given: Given, chains: Chains) -> tuple[Tensor, Tensor]:
        live = chains.column <= chains.length[:, None]
        slots = chains.slot[:, None].expand_as(chains.row)
        tokens = torch.full_like(chains.row, -1)
        tokens[live] = choose(given, chains.row[live], slots[live])
        accepted = prefix((tokens[:, :-1] == chains.draft) & chains.tested)
        return accepted, at(tokens, accepted)

    return rule


_RULES: dict[str, tuple[Rule, Rule]] = {  # of greedy requests, of sampled ones
    "coupled": (_match(_argmax), _match(rejection.drawn)),
    "standard": (_match(_argmax), rejection.standard),
    "block": (_match(_argmax), rejection.block),
    "synthetic": (rejection.synthetic_greedy, rejection.synthetic),
}
