"""Drafts on a GPU, with the signature of `specdec_kernels.candidates.sample_draft`.

Two launches. `draft_statistics` reads every tile of every row once and leaves a winner per tile;
`settle_drafts` takes the best of them per row and draws within its group. All programs of a launch
lie along one axis, the only one with room for any number of requests. With a map a tile is one
of target ids, because the noise is keyed by their groups. `candidates` draws from a few ids alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import candidates as reference
from specdec_kernels.candidates import DraftVocabulary, inverse
from specdec_kernels.gpu.candidates import MOST_CANDIDATES, draft_candidates, settle_candidates
from specdec_kernels.gpu.chains import UNUSED_BITS
from specdec_kernels.gpu.noise import DRAFT_TOKEN, GROUP, TARGET_TOKEN, gumbel, key, word
from specdec_kernels.gpu.rows import (
    GREEDY,
    INFINITE,
    LOG2E,
    NOTHING,
    WARPS,
    cleaned,
    finite,
    largest_of,
    over_lanes,
    raw,
    reference_of,
    scaled,
    tile_of,
)
from specdec_kernels.types import Sampling, SparseQ


@triton.jit
def _group_ids(groups, members, row, G, MAPPED: tl.constexpr):
    """Of the rows [n] of the table of groups: the groups, and the drafter's ids there [n, GROUP].

    Without a map a drafter's id is the target's. -1 is none.
    """
    lane = tl.arange(0, GROUP)
    place = row[:, None] * GROUP + lane[None, :]
    if MAPPED:
        group = tl.load(groups + row, mask=row < G, other=0)
        ids = tl.load(members + place, mask=(row < G)[:, None], other=-1).to(tl.int32)
    else:
        group, ids = row, place
    return group, ids


@triton.jit(do_not_specialize=["index"])
def draft_statistics(
    logits, row_stride, positions, slots, streams, temperatures, groups, members,
    tops, scores, choices, totals, vocab, G, TILES, index,
    MAPPED: tl.constexpr, ARGMAX: tl.constexpr, DOMAIN: tl.constexpr, TILE: tl.constexpr,
    LARGEST_RAW: tl.constexpr,
):  # fmt: skip
    """One tile of one row, into [B, TILES]: the winner and what it is weighed by.

    tops: the largest log-weight (of a greedy row: logit). choices: of a greedy row the drafter's
    first id that has it, else the row of the table of groups that wins. scores: by what it wins;
    totals: the sum of weights; both relative to tops.
    """
    tile = tl.program_id(0) % TILES
    request = (tl.program_id(0) // TILES).to(tl.int64)
    slot = tl.load(slots + request)
    if slot >= 0:
        here = logits + request * row_stride
        out = request * TILES + tile
        temperature = tl.load(temperatures + slot)
        if ARGMAX | (temperature < GREEDY):
            flat = tile * TILE + tl.arange(0, TILE)
            x = raw(here, flat, flat < vocab, None, LARGEST_RAW)
            most = tl.max(x)
            best = tl.min(tl.where((x == most) & (flat < vocab), flat, vocab))
            tl.store(tops + out, most)
            tl.store(choices + out, tl.where(best < vocab, best, 0))
        else:
            GROUPS: tl.constexpr = TILE // GROUP
            row = tile * GROUPS + tl.arange(0, GROUPS)
            group, ids = _group_ids(groups, members, row, G, MAPPED)
            inside = (ids >= 0) & (ids < vocab)
            z = scaled(here, ids, inside, temperature, None)
            top = tl.max(z)
            sums = over_lanes(tl.exp2(z * LOG2E - reference_of(top)))
            total = tl.sum(sums)
            sound = (total > 0) & (total < INFINITE)
            if (total != total) | ((top != NOTHING) & (sound == False)):  # noqa: E712
                # NaN, infinity or logits whose powers of two no float holds
                z = cleaned(here, ids, inside, temperature, None)
                top = tl.max(z)
                sums = over_lanes(tl.exp2((z - finite(top)) * LOG2E))
                total = tl.sum(sums)
            some = sums > 0
            a, b = key(tl.load(streams + slot), tl.load(positions + request), index, DOMAIN + 1)
            score = tl.log2(tl.where(some, sums, 1.0)) + gumbel(word(a, b, group)) * LOG2E
            score = tl.where(some, score, NOTHING)
            tl.store(tops + out, top)
            tl.store(totals + out, total)
            tl.store(scores + out, tl.max(score))
            tl.store(choices + out, tile * GROUPS + tl.argmax(score, axis=0))


@triton.jit(do_not_specialize=["index", "column"])
def settle_drafts(
    logits, row_stride, positions, slots, streams, temperatures, targets, groups, members,
    tops, scores, choices, totals, lse, lse_stride, lse_step, tokens,
    vocab, G, TILES, index, column,
    MAPPED: tl.constexpr, ARGMAX: tl.constexpr, DOMAIN: tl.constexpr, LSE: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    """One row: its draft, and the log-sum-exp of its log-weights if LSE."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    token = tl.full((), -1, tl.int64)
    if slot >= 0:
        tiles = tl.arange(0, TP)
        place = request * TILES + tiles
        there = tiles < TILES
        top = tl.load(tops + place, mask=there, other=NOTHING)
        most = tl.max(top)
        temperature = tl.load(temperatures + slot)
        if ARGMAX | (temperature < GREEDY):
            best = tl.load(choices + request * TILES + tl.argmax(top, axis=0))
            token = tl.load(targets + best) if MAPPED else best.to(tl.int64)
        else:
            apart = reference_of(top) - reference_of(most)
            apart = tl.where(apart == apart, apart, (finite(top) - finite(most)) * LOG2E)
            there = there & (top != NOTHING)
            score = tl.load(scores + place, mask=there, other=NOTHING)
            score = tl.where(there, apart + score, NOTHING)
            row = tl.load(choices + request * TILES + tl.argmax(score, axis=0))
            group, ids = _group_ids(groups, members, row + tl.arange(0, 1), G, MAPPED)
            here = logits + request * row_stride
            x = cleaned(here, ids, (ids >= 0) & (ids < vocab), temperature, None)
            x = tl.reshape(x, (GROUP,))
            id = tl.sum(group) * GROUP + tl.arange(0, GROUP)
            a, b = key(tl.load(streams + slot), tl.load(positions + request), index, DOMAIN)
            score = tl.where(x == NOTHING, NOTHING, x - finite(most) + gumbel(word(a, b, id)))
            token = (tl.sum(group) * GROUP + tl.argmax(score, axis=0)).to(tl.int64)
            token = tl.where(most == NOTHING, 0, token)
            if LSE:
                share = tl.exp2(tl.where(there, apart, NOTHING))
                total = tl.sum(share * tl.load(totals + place, mask=there, other=0.0))
                value = most + tl.log(tl.where(total > 0, total, 1.0))
                tl.store(lse + slot * lse_stride + column * lse_step, value)
    tl.store(tokens + request, token)


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
    count = 0 if candidates is None else candidates.ids.shape[-1]
    if logits.dtype not in UNUSED_BITS or count > MOST_CANDIDATES:
        return reference.sample_draft(
            logits, positions, slots, sampling, how=how, column=column,
            vocab_map=vocab_map, vocab_size=vocab_size, candidates=candidates, lse=lse,
        )  # fmt: skip
    tokens = torch.empty_like(slots)
    if not len(slots):
        return tokens
    vocab, mapped = logits.shape[1], vocab_map is not None
    if isinstance(vocab_map, Tensor):
        assert vocab_size is not None
        members = inverse(vocab_map, vocab_size)
        groups = torch.arange(len(members), dtype=torch.int32, device=logits.device)
        table = DraftVocabulary(vocab_map, groups, members, vocab_size)
    else:
        table = vocab_map or DraftVocabulary(slots, slots, slots, vocab)
        vocab = vocab if mapped or vocab_size is None else min(vocab, vocab_size)
    coupled = how == "coupled"
    domain = (TARGET_TOKEN if coupled else DRAFT_TOKEN).value
    index = 0 if coupled else column
    kinds = {"MAPPED": mapped, "ARGMAX": how == "greedy"}
    draw = {**kinds, "DOMAIN": domain, "LSE": lse is not None}
    rows = logits, logits.stride(0), positions, slots, sampling.stream, sampling.temperature
    law: tuple[Any, ...] = (slots, 0, 0) if lse is None else (lse, *lse.stride())
    limit = largest_of(logits.dtype)
    if candidates is not None:
        width = triton.next_power_of_2(count)
        tile = tile_of(vocab)
        tiles = triton.cdiv(vocab, tile)
        last = triton.next_power_of_2(tiles)
        keys = torch.empty((len(slots), tiles, width), dtype=torch.int64, device=logits.device)
        draft_candidates[(tiles * len(slots),)](
            logits, logits.stride(0), slots, sampling.temperature, keys, vocab, tiles,
            ARGMAX=kinds["ARGMAX"], TILE=tile, C=count, CP=width, LARGEST_RAW=limit,
            num_warps=WARPS,
        )  # fmt: skip
        settle_candidates[(len(slots),)](
            *rows, table.targets, keys, *law, tokens,
            candidates.ids, *candidates.ids.stride(),
            candidates.logits, *candidates.logits.stride(),
            tiles, index, column,
            **draw, TP=last, C=count, CP=width,
            # one warp needs no barrier in each of the loop's reductions
            num_warps=max(1, min(8, last * width // 512)),
        )  # fmt: skip
        return tokens
    places = len(table.groups) if mapped else triton.cdiv(vocab, GROUP.value)
    tile = tile_of(places * GROUP.value)
    tiles = triton.cdiv(places * GROUP.value, tile)
    floats = torch.empty((3, len(slots), tiles), dtype=torch.float32, device=logits.device)
    choices = torch.empty((len(slots), tiles), dtype=torch.int32, device=logits.device)
    tops, scores, totals = floats
    draft_statistics[(tiles * len(slots),)](
        *rows, table.groups, table.members, tops, scores, choices, totals,
        vocab, places, tiles, index,
        **kinds, DOMAIN=domain, TILE=tile, LARGEST_RAW=limit, num_warps=WARPS,
    )  # fmt: skip
    settle_drafts[(len(slots),)](
        *rows, table.targets, table.groups, table.members, tops, scores, choices, totals,
        *law, tokens, vocab, places, tiles, index, column,
        **draw, TP=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip
    return tokens
