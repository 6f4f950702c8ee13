"""The edited values of the ids that a row's edits touch, and how a tile of the row gets them."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.gpu.edit_ids import (
    ALLOWED,
    BIASED,
    CHUNK,
    FEW,
    GRAMMAR,
    LISTED,
    PENALISED,
    STOPS,
    WORDS,
    bit_of,
    number_of,
    popcount,
    request_of,
)

EXCLUDED = tl.constexpr(float("-inf"))


@triton.jit
def row_edits(tables, request, local):
    """The edits of a request's row after `local` drafts, as `edited` takes them; None for None.

    local: an integer; or of any shape, all below K + 1, for several rows of the request at once.
    """
    mine = None
    if tables is not None:
        flags = tl.load(tables.flags + request)
        at = tl.full((), 0, tl.int64) + request
        mask = tl.full((), 0, tl.int64)
        if (flags & GRAMMAR) > 0:
            mask = tl.load(tables.grammar_start + request)
        mine = (
            flags,
            tables.marked + at * tables.words,
            tables.before + at * tables.words,
            tables.patches + (at * (tables.K + 1) + local) * tables.N,
            tables.allowed + at * tables.words,
            tables.grammar + (mask + local) * tables.grammar_stride,
            tables.words,
        )
    return mine


@triton.jit
def edited_ids(x, ids, mine):
    """Logits of ids after the edits: float32, and ids in the vocabulary, of any one shape.

    What `mine` says of several rows must broadcast to that shape. Ids beyond the vocabulary stay
    as they are, or are excluded.
    """
    if mine is not None:
        flags, marked, before, patch, allowed, grammar, words = mine
        if flags != 0:
            group = ids >> 5
            one = bit_of(ids)
            there = (group >= 0) & (group < words)
            if (flags & LISTED) > 0:
                bits = tl.load(marked + group, mask=there, other=0)
                touched = (bits & one) != 0
                at = tl.load(before + group, mask=touched, other=0) + popcount(bits & (one - 1))
                x = tl.where(touched, tl.load(patch + at, mask=touched, other=0.0), x)
            if (flags & ALLOWED) > 0:
                bits = tl.load(allowed + group, mask=there, other=0)
                x = tl.where((bits & one) != 0, x, EXCLUDED)
            if (flags & GRAMMAR) > 0:
                bits = tl.load(grammar + group, mask=there, other=0)
                x = tl.where((bits & one) != 0, x, EXCLUDED)
    return x


@triton.jit
def edited(x, groups, mine):
    """`edited_ids` of whole groups of 32 ids, a load per group: x [G, 32], groups [G].

    What `mine` says of several rows is [G, 1].
    """
    if mine is not None:
        flags, marked, before, patch, allowed, grammar, words = mine
        if flags != 0:
            one = bit_of(tl.arange(0, 32)[None, :])
            there = (groups >= 0) & (groups < words)
            if (flags & LISTED) > 0:
                bits = tl.load(marked + groups, mask=there, other=0)
                # few edits, few tiles
                if tl.max((bits != 0).to(tl.int32)) > 0:
                    first = tl.load(before + groups, mask=there, other=0)
                    at = first[:, None] + popcount(bits[:, None] & (one - 1))
                    touched = (bits[:, None] & one) != 0
                    x = tl.where(touched, tl.load(patch + at, mask=touched, other=0.0), x)
            if (flags & ALLOWED) > 0:
                bits = tl.load(allowed + groups, mask=there, other=0)
                x = tl.where((bits[:, None] & one) != 0, x, EXCLUDED)
            if (flags & GRAMMAR) > 0:
                # the masks of several rows differ
                bits_of_rows = tl.load(grammar + groups[:, None], mask=there[:, None], other=0)
                x = tl.where((bits_of_rows & one) != 0, x, EXCLUDED)
    return x


@triton.jit
def patch_rows(
    logits, row_stride, chains, wishes, tables,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A part of one row's touched ids: bias, then the penalties with the drafts before the row."""
    request, local, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    flags = tl.load(tables.flags + request)
    if (flags & LISTED) > 0:
        first, rows, slot = request_of(request, chains)
        if local < rows:
            here = logits + (first + local) * row_stride
            mine = request.to(tl.int64) * tables.N
            out = tables.patches + (request.to(tl.int64) * (tables.K + 1) + local) * tables.N
            factor = tl.load(wishes.factor + slot)
            frequency = tl.load(wishes.frequency + slot)
            presence = tl.load(wishes.presence + slot)
            total = tl.load(tables.totals + request)
            for start in range(part * CHUNK, total, CHUNK * PARTS):
                at = start + tl.arange(0, CHUNK)
                there = at < total
                ids = tl.load(tables.ids + mine + at, mask=there, other=0)
                x = tl.load(here + ids, mask=there, other=0.0).to(tl.float32)
                if (flags & BIASED) > 0:
                    x = x + tl.load(tables.biases + mine + at, mask=there, other=0.0)
                if (flags & PENALISED) > 0:
                    state = tl.load(tables.states + mine + at, mask=there, other=0)
                    drafted = tl.zeros((CHUNK,), tl.int32)
                    for i in range(0, local):
                        draft = tl.load(chains.drafts + request * chains.K + i)
                        drafted += (ids == draft).to(tl.int32)
                    times = (state >> 1) + drafted
                    y = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
                    y = y - frequency * times.to(tl.float32)
                    y = y - presence * (times > 0).to(tl.float32)
                    x = tl.where((state != 0) | (drafted != 0), y, x)
                tl.store(out + at, x, mask=there)


@triton.jit
def ban_ids(chains, wishes, tables, vocab):
    """One row: stop ids before the least length, and words whose beginning the output ends in."""
    request, local = tl.program_id(0), tl.program_id(1)
    flags = tl.load(tables.flags + request)
    if (flags & (WORDS | STOPS)) > 0:
        first, rows, slot = request_of(request, chains)
        if local < rows:
            out = tables.patches + (request.to(tl.int64) * (tables.K + 1) + local) * tables.N
            if (flags & STOPS) > 0:
                position = tl.load(chains.positions + first + local)
                early = position < tl.load(wishes.min_length + slot)
                for start in range(0, wishes.S, FEW):
                    column = start + tl.arange(0, FEW)
                    listed = early & (column < wishes.S)
                    x = tl.load(wishes.stop_ids + slot * wishes.S + column, mask=listed, other=-1)
                    known = (x >= 0) & (x < vocab)
                    tl.store(out + number_of(request, x, known, tables), EXCLUDED, mask=known)
            if (flags & WORDS) > 0:
                length = tl.load(chains.positions + first)
                prompt = tl.load(wishes.prompt_length + slot)
                history = wishes.history + slot * wishes.history_stride
                for start in range(0, wishes.W, FEW):
                    word = start + tl.arange(0, FEW)
                    listed = word < wishes.W
                    tokens = wishes.bad_words + (slot * wishes.W + word) * wishes.L
                    follows = listed
                    for i in range(0, wishes.L - 1):
                        place = length + local - (wishes.L - 1) + i
                        committed = (place >= prompt) & (place < length)
                        committed = committed & (place >= 0) & (place < wishes.T)
                        token = tl.load(history + place, mask=committed, other=-2)
                        drafted = (place >= prompt) & (place >= length)
                        draft = tl.load(
                            chains.drafts + request * chains.K + (place - length),
                            mask=drafted, other=-2,
                        )  # fmt: skip
                        draft = tl.where((draft >= 0) & (draft < vocab), draft, -2)
                        token = tl.where(drafted, draft, token)
                        wanted = tl.load(tokens + i, mask=listed, other=-1)
                        follows = follows & ((wanted < 0) | (wanted == token))
                    x = tl.load(tokens + (wishes.L - 1), mask=follows, other=-1)
                    known = (x >= 0) & (x < vocab)
                    tl.store(out + number_of(request, x, known, tables), EXCLUDED, mask=known)


@triton.jit
def write_edited(
    logits, row_stride, chains, tables, out, vocab,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one row, edited."""
    request, local = tl.program_id(0), tl.program_id(1)
    first, rows, _slot = request_of(request, chains)
    if local < rows:
        groups = tl.program_id(2) * (TILE // 32) + tl.arange(0, TILE // 32)
        ids = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside = ids < vocab
        row = first + local
        x = tl.load(logits + row * row_stride + ids, mask=inside, other=EXCLUDED).to(tl.float32)
        x = edited(x, groups, row_edits(tables, request, local))
        tl.store(out + row * vocab + ids, x, mask=inside)
