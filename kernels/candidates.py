"""What drafts are drawn from: the drafter's ids among the target's, and its likeliest ones.

`sample_draft` here is the definition of the op and the CPU path.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels import noise
from specdec_kernels.chains import first_largest, take
from specdec_kernels.logits import is_greedy, log_total, tempered
from specdec_kernels.types import Sampling, SparseQ


class DraftVocabulary(NamedTuple):
    """A drafter's ids among the target's, as the kernels look them up; see `draft_vocabulary`.

    targets: int64 [Vd], the target id of every id of the drafter.
    groups: int32 [G], the groups of `noise.GROUP` target ids that hold any of them, ascending.
    members: int16 or int32 [G, GROUP], the drafter's id of every target id there; -1 is none.
    vocab_size: the target's V.
    """

    targets: Tensor
    groups: Tensor
    members: Tensor
    vocab_size: int


def draft_vocabulary(vocab_map: Tensor, vocab_size: int) -> DraftVocabulary:
    """Look-up tables for a drafter's vocabulary, to be made once; reads values on the host.

    vocab_map: int64 [Vd], distinct target ids of the drafter's ids; vocab_size: the target's V.
    """
    ordered = vocab_map.sort().values
    if (ordered.diff() == 0).any():
        raise ValueError("draft_vocabulary: vocab_map holds an id more than once")
    if ((ordered < 0) | (ordered >= vocab_size)).any():
        raise ValueError(f"draft_vocabulary: vocab_map holds ids outside [0, {vocab_size})")
    members = inverse(vocab_map, vocab_size)
    groups = (members >= 0).any(1).nonzero().squeeze(-1)
    # programs read the whole table for every row: half the size where that is enough
    dtype = torch.int16 if len(vocab_map) <= 2**15 else torch.int32
    return DraftVocabulary(vocab_map, groups.to(torch.int32), members[groups].to(dtype), vocab_size)


def inverse(vocab_map: Tensor, vocab_size: int) -> Tensor:
    """The drafter's id of every target id, by groups: int32 [groups, GROUP]; -1 is none."""
    places = -(-vocab_size // noise.GROUP) * noise.GROUP
    table = torch.full((places,), -1, dtype=torch.int32, device=vocab_map.device)
    ids = torch.arange(len(vocab_map), dtype=torch.int32, device=vocab_map.device)
    return table.scatter_(0, vocab_map, ids).view(-1, noise.GROUP)


def sample_draft(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    how: str,
    column: int,
    vocab_map: Tensor | DraftVocabulary | None = None,
    vocab_size: int | None = None,
    candidates: SparseQ | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """One draft per request, as a target id."""
    if isinstance(vocab_map, DraftVocabulary):
        vocab_size, vocab_map = vocab_map.vocab_size, vocab_map.targets
    if vocab_map is None:
        logits = logits[:, :vocab_size]
    tokens = torch.full_like(slots, -1)
    greedy = is_greedy(slots, sampling) | (how == "greedy")
    rows = (greedy & (slots >= 0)).nonzero().squeeze(-1)
    if rows.numel():
        best = first_largest(take(logits, rows))
        tokens[rows] = best if vocab_map is None else vocab_map[best]
    rows = (~greedy & (slots >= 0)).nonzero().squeeze(-1)
    if rows.numel():
        slot = slots[rows]
        some = take(logits, rows)
        weights = tempered(some, slot, sampling)
        if candidates is not None:
            ids, kept = likeliest(weights, candidates.ids.shape[-1])
            weights = weights.where(kept, -inf)
            values = some.gather(1, ids.clamp(min=0)).where(ids >= 0, -inf)
            known = ids if vocab_map is None else vocab_map[ids.clamp(min=0)]
            candidates.ids[slot, column] = known.where(ids >= 0, -1)
            candidates.logits[slot, column] = values
        if lse is not None:
            lse[slot, column] = log_total(weights).nan_to_num(nan=-inf, neginf=-inf)
        if vocab_map is not None:
            # the target's noise belongs to its ids: map first, then draw
            assert vocab_size is not None
            everywhere = weights.new_full((len(rows), vocab_size), -inf)
            weights = everywhere.index_copy_(1, vocab_map, weights)
        domain, index = (noise.TARGET_TOKEN, 0) if how == "coupled" else (noise.DRAFT_TOKEN, column)
        tokens[rows] = noise.draw(weights, sampling.stream[slot], positions[rows], domain, index)
    return tokens


def likeliest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` ids with the largest weights, of equal ones the lowest, and where they are.

    weights: float32 [n, V], no NaN. Returns int64 [n, count], the largest first, -1 where there are
    no more above -inf; and bool [n, V].
    """
    n, vocab = weights.shape
    some = min(count, vocab)
    # topk says what the smallest of them is, but not which of several that are equal to it
    cut = weights.topk(some).values[:, -1:]
    above, level = weights > cut, weights == cut
    kept = above | (level & (level.cumsum(1) <= some - above.sum(1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(n, some)
    values, order = weights.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order).where(values > -inf, -1)
    return pad(ids, (0, count - some), value=-1), kept
