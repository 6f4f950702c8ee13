"""Which ids the edits of a request may touch: found, numbered in order, and what is known of each.

Four launches, because all of one must be done before the next: `survey`, `mark`, `number`, `fill`.
Programs of requests that ask for nothing leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LISTED = tl.constexpr(1)  # ids are marked and have values of their own
ALLOWED = tl.constexpr(2)
GRAMMAR = tl.constexpr(4)
BIASED = tl.constexpr(8)
PENALISED = tl.constexpr(16)
WORDS = tl.constexpr(32)  # bad words
STOPS = tl.constexpr(64)  # some row lies before the least length

CHUNK = tl.constexpr(1024)
FEW = tl.constexpr(128)


class Chains(NamedTuple):
    """The rows of a call. Without `logits_start` each request is a row."""

    logits_start: Tensor | None
    drafts: Tensor  # [B, K]
    positions: Tensor
    slots: Tensor
    K: int


class Wishes(NamedTuple):
    """`Edits` and what they look at, contiguous but for the rows of `history`."""

    history: Tensor
    history_stride: int
    T: int
    prompt_length: Tensor
    factor: Tensor
    presence: Tensor
    frequency: Tensor
    bias_ids: Tensor
    bias: Tensor
    E: int
    allowed_ids: Tensor
    A: int
    stop_ids: Tensor
    S: int
    min_length: Tensor
    bad_words: Tensor
    W: int
    L: int
    grammar_start: Tensor | None


class EditTables(NamedTuple):
    """What `edited` reads of a step's edits; to be handed to kernels whole.

    N is the most ids that a request can touch. Of requests that do not ask, all but `flags` is
    left as it was allocated.
    """

    flags: Tensor  # int32 [B]
    marked: Tensor  # int32 [B, V / 32], a bit for each touched id
    before: Tensor  # int32 [B, V / 32], the number of touched ids before those of the word
    patches: Tensor  # float32 [B * (K + 1), N], the edited values of each row, by number
    allowed: Tensor  # int32 [B, V / 32], a bit for each allowed id
    grammar: Tensor  # int32 [rows of masks, V / 32]
    grammar_stride: int
    grammar_start: Tensor  # int64 [B]
    words: int  # V / 32
    N: int
    K: int
    ids: Tensor  # int32 [B, N]
    states: Tensor  # int32 [B, N], twice the occurrences in the output, and 1 if in the prompt
    biases: Tensor  # float32 [B, N]
    totals: Tensor  # int32 [B], how many ids are touched


@triton.jit
def popcount(word):
    """The number of bits set: int32."""
    v = word.to(tl.uint32)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bit_of(ids):
    """The bit of an id within its word: int32."""
    return tl.full(ids.shape, 1, tl.int32) << (ids & 31).to(tl.int32)


@triton.jit
def request_of(request, chains):
    """First row, number of rows to edit (0 for padding), slot (0 for padding)."""
    slot = tl.load(chains.slots + request)
    if chains.logits_start is not None:
        first = tl.load(chains.logits_start + request)
        rows = tl.load(chains.logits_start + request + 1) - first
        rows = tl.minimum(rows, chains.K + 1).to(tl.int32)
    else:
        first = request.to(tl.int64)
        rows = request * 0 + 1
    return first, tl.where(slot >= 0, rows, 0), tl.maximum(slot, 0)


@triton.jit
def history_range(first, slot, factor, chains, wishes):
    """The places of history that the penalties look at: int32 begin, end."""
    prompt = tl.load(wishes.prompt_length + slot)
    # prompts matter to the repetition penalty alone
    begin = tl.where(factor == 1.0, prompt, 0)
    end = tl.minimum(tl.load(chains.positions + first), wishes.T)
    return begin.to(tl.int32), end.to(tl.int32), prompt.to(tl.int32)


@triton.jit
def _lists_some(ids, size, step):
    found = tl.full((), 0, tl.int32)
    for start in range(0, size, FEW):
        column = start + tl.arange(0, FEW)
        x = tl.load(ids + column * step, mask=column < size, other=-1)
        found = tl.maximum(found, tl.max((x >= 0).to(tl.int32)))
    return found


@triton.jit
def survey(chains, wishes, tables):
    """One request: what it asks for, into `flags`, and its bitmaps emptied."""
    request = tl.program_id(0)
    first, rows, slot = request_of(request, chains)
    flags = tl.full((), 0, tl.int32)
    if rows > 0:
        factor = tl.load(wishes.factor + slot)
        other = (tl.load(wishes.frequency + slot) != 0) | (tl.load(wishes.presence + slot) != 0)
        flags += tl.where((factor != 1.0) | other, LISTED | PENALISED, 0)
        if _lists_some(wishes.bias_ids + slot * wishes.E, wishes.E, 1) > 0:
            flags = flags | (LISTED | BIASED)
        last = wishes.bad_words + slot * (wishes.W * wishes.L) + (wishes.L - 1)
        if _lists_some(last, wishes.W, wishes.L) > 0:
            flags = flags | (LISTED | WORDS)
        least = tl.load(wishes.min_length + slot)
        early = tl.full((), 0, tl.int32)
        for start in range(0, chains.K + 1, FEW):
            local = start + tl.arange(0, FEW)
            position = tl.load(chains.positions + first + local, mask=local < rows, other=least)
            early = tl.maximum(early, tl.max((position < least).to(tl.int32)))
        stops = _lists_some(wishes.stop_ids + slot * wishes.S, wishes.S, 1)
        if (early > 0) & (stops > 0):
            flags = flags | (LISTED | STOPS)
        if _lists_some(wishes.allowed_ids + slot * wishes.A, wishes.A, 1) > 0:
            flags = flags | ALLOWED
        if wishes.grammar_start is not None:
            flags = flags | tl.where(tl.load(wishes.grammar_start + request) >= 0, GRAMMAR, 0)
        for start in range(0, tables.words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            there = word < tables.words
            out = request.to(tl.int64) * tables.words + word
            tl.store(tables.marked + out, 0, mask=there & ((flags & LISTED) > 0))
            tl.store(tables.allowed + out, 0, mask=there & ((flags & ALLOWED) > 0))
    tl.store(tables.flags + request, flags)


@triton.jit
def _set_bits(words, ids, known):
    ids = tl.where(known, ids, 0)
    tl.atomic_or(words + ids // 32, bit_of(ids), mask=known, sem="relaxed")


@triton.jit
def _set_all(words, ids, size, step, vocab):
    for start in range(0, size, FEW):
        column = start + tl.arange(0, FEW)
        x = tl.load(ids + column * step, mask=column < size, other=-1)
        _set_bits(words, x, (x >= 0) & (x < vocab))


@triton.jit
def mark(chains, wishes, tables, vocab, PARTS: tl.constexpr):
    """A part of one request's lists: the bits of their ids."""
    request, part = tl.program_id(0), tl.program_id(1)
    flags = tl.load(tables.flags + request)
    if flags != 0:
        first, _rows, slot = request_of(request, chains)
        words = tables.marked + request.to(tl.int64) * tables.words
        if part == 0:
            allowed = tables.allowed + request.to(tl.int64) * tables.words
            if (flags & ALLOWED) > 0:
                _set_all(allowed, wishes.allowed_ids + slot * wishes.A, wishes.A, 1, vocab)
            if (flags & BIASED) > 0:
                _set_all(words, wishes.bias_ids + slot * wishes.E, wishes.E, 1, vocab)
            if (flags & STOPS) > 0:
                _set_all(words, wishes.stop_ids + slot * wishes.S, wishes.S, 1, vocab)
            if (flags & WORDS) > 0:
                last = wishes.bad_words + slot * (wishes.W * wishes.L) + (wishes.L - 1)
                _set_all(words, last, wishes.W, wishes.L, vocab)
            if (flags & PENALISED) > 0:
                _set_all(words, chains.drafts + request * chains.K, chains.K, 1, vocab)
        if (flags & PENALISED) > 0:
            factor = tl.load(wishes.factor + slot)
            begin, end, _prompt = history_range(first, slot, factor, chains, wishes)
            history = wishes.history + slot * wishes.history_stride
            for start in range(begin + part * CHUNK, end, CHUNK * PARTS):
                place = start + tl.arange(0, CHUNK)
                x = tl.load(history + place, mask=place < end, other=-1)
                _set_bits(words, x, (x >= 0) & (x < vocab))


@triton.jit
def number(tables):
    """128 words of one request: their ids by number, about which nothing is known yet."""
    request, tile = tl.program_id(0), tl.program_id(1)
    flags = tl.load(tables.flags + request)
    if (flags & LISTED) > 0:
        words = tables.marked + request.to(tl.int64) * tables.words
        below = tl.full((), 0, tl.int32)
        for start in range(0, tile * FEW, CHUNK):
            word = start + tl.arange(0, CHUNK)
            bits = tl.load(words + word, mask=word < tile * FEW, other=0)
            below += tl.sum(popcount(bits))
        word = tile * FEW + tl.arange(0, FEW)
        there = word < tables.words
        bits = tl.load(words + word, mask=there, other=0)
        size = popcount(bits)
        before = below + tl.cumsum(size, axis=0) - size
        tl.store(tables.before + request.to(tl.int64) * tables.words + word, before, mask=there)
        lane = tl.arange(0, 32)[None, :]
        one = bit_of(lane)
        place = request.to(tl.int64) * tables.N + before[:, None]
        place += popcount(bits[:, None] & (one - 1))
        marked = (bits[:, None] & one) != 0
        tl.store(tables.ids + place, word[:, None] * 32 + lane, mask=marked)
        tl.store(tables.states + place, 0, mask=marked)
        # -0, by its bits: x + -0 is x, zeros of either sign included
        none = tl.full((), -(2**31), tl.int32).to(tl.float32, bitcast=True)
        tl.store(tables.biases + place, none, mask=marked & ((flags & BIASED) > 0))
        if tile == tl.num_programs(1) - 1:
            tl.store(tables.totals + request, below + tl.sum(size))


@triton.jit
def number_of(request, ids, known, tables):
    """The numbers of marked ids, as places in the lists of a request."""
    ids = tl.where(known, ids, 0)
    word = request.to(tl.int64) * tables.words + ids // 32
    bits = tl.load(tables.marked + word, mask=known, other=0)
    before = tl.load(tables.before + word, mask=known, other=0)
    return before + popcount(bits & (bit_of(ids) - 1))


@triton.jit
def fill(chains, wishes, tables, vocab, PARTS: tl.constexpr):
    """A part of one request's lists: biases and occurrences, by number."""
    request, part = tl.program_id(0), tl.program_id(1)
    flags = tl.load(tables.flags + request)
    if (flags & LISTED) > 0:
        first, _rows, slot = request_of(request, chains)
        mine = request.to(tl.int64) * tables.N
        if (part == 0) & ((flags & BIASED) > 0):
            for start in range(0, wishes.E, FEW):
                column = start + tl.arange(0, FEW)
                entry = slot * wishes.E + column
                x = tl.load(wishes.bias_ids + entry, mask=column < wishes.E, other=-1)
                known = (x >= 0) & (x < vocab)
                bias = tl.load(wishes.bias + entry, mask=known, other=0.0)
                at = number_of(request, x, known, tables)
                tl.store(tables.biases + mine + at, bias, mask=known)
        if (flags & PENALISED) > 0:
            factor = tl.load(wishes.factor + slot)
            begin, end, prompt = history_range(first, slot, factor, chains, wishes)
            history = wishes.history + slot * wishes.history_stride
            for start in range(begin + part * CHUNK, end, CHUNK * PARTS):
                place = start + tl.arange(0, CHUNK)
                x = tl.load(history + place, mask=place < end, other=-1)
                known = (x >= 0) & (x < vocab)
                state = tables.states + mine + number_of(request, x, known, tables)
                tl.atomic_add(state, 2, mask=known & (place >= prompt), sem="relaxed")
                tl.atomic_or(state, 1, mask=known & (place < prompt), sem="relaxed")
