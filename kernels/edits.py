"""Sampling parameters that edit logits, at every row with the context which that row has.

Plain torch for any device. Work is selected by what requests ask for, which on CUDA reads sizes
back to the host.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import ops
from specdec_kernels._checks import Arguments, device_of
from specdec_kernels.types import EditInputs, Edits


class _Batch(NamedTuple):
    """The requests of a call, B of them."""

    start: Tensor  # [B] their first row
    rows: Tensor  # [B] rows to edit: K + 1 at most, none of padding
    slot: Tensor  # [B] 0 for padding
    length: Tensor  # [B] tokens of history before the first row's own
    drafts: Tensor  # [B, K] -1 where it is no id


def edit_logits(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    history: Tensor,
    prompt_length: Tensor,
    edits: Edits,
    grammar: Tensor | None = None,
    grammar_start: Tensor | None = None,
) -> Tensor:
    """Apply every request's `Edits` to all of its rows. May overwrite `logits`; use the result.

    Shapes: B requests, R rows of logits, at most K drafts each, V ids, T places of history.

    logits: any float dtype [R, V]. float32 and float64 are edited in place, unless rows overlap in
        memory; other dtypes give a new float32 tensor.
    logits_start: int64 [B + 1]. Rows logits_start[b] to logits_start[b + 1] belong to request b.
        The K + 1 that `verify` uses are edited. Rows of nobody are left alone.
    draft_tokens: int64 [B, K]. Row i of a request has drafts 0 to i - 1 in its context. -1, and any
        id outside [0, V), takes its place there and matches nothing.
    positions: int64 [R], the absolute index in the sequence of the token that the row predicts.
    slots: int64 [B], where `history`, `prompt_length` and `edits` keep the request; -1 is padding.
    history: int64 [slots, T], the prompt and the output so far; entries from the position of a
        request's first row on are not read.
    prompt_length: int64 [slots]; history from there on is output.
    grammar: int32 [masks, V / 32 rounded up]. A row excludes the ids x whose bit, x % 32 of word
        x // 32 of its mask, is not set.
    grammar_start: int64 [B], the mask of a request's first row, which those of its other rows
        follow; -1 for none. By default the mask of a row has the row's own index.

    In this order: grammar, bias, allowed ids, stop ids before the least length, penalties for
    repetition, frequency and presence, bad words. Rows of requests that ask for nothing keep their
    bits. A row gets, bit for bit, what it would get alone with the drafts before it committed.

    Example: a penalty of 1 per occurrence in the output; row 1 counts the draft before it.

    >>> one, none = torch.ones(1), torch.empty(1, 0, dtype=torch.int64)
    >>> edits = Edits(
    ...     repetition_penalty=one,
    ...     presence_penalty=torch.zeros(1),
    ...     frequency_penalty=one,
    ...     bias_ids=none,
    ...     bias=torch.empty(1, 0),
    ...     allowed_ids=none,
    ...     stop_ids=none,
    ...     min_length=torch.tensor([0]),
    ...     bad_words=torch.empty(1, 0, 0, dtype=torch.int64),
    ... )
    >>> edit_logits(
    ...     torch.zeros(2, 4),
    ...     logits_start=torch.tensor([0, 2]),
    ...     draft_tokens=torch.tensor([[2]]),
    ...     positions=torch.tensor([3, 4]),
    ...     slots=torch.tensor([0]),
    ...     history=torch.tensor([[0, 1, 2, 0]]),
    ...     prompt_length=torch.tensor([1]),
    ...     edits=edits,
    ... )
    tensor([[ 0., -1., -1.,  0.],
            [ 0., -1., -2.,  0.]])
    """
    if torch.compiler.is_compiling():
        return ops.edit_logits(
            logits,
            logits_start,
            draft_tokens,
            positions,
            slots,
            history=history,
            prompt_length=prompt_length,
            edits=edits,
            grammar=grammar,
            grammar_start=grammar_start,
        )
    check = Arguments("edit_logits", device_of("edit_logits", "logits", logits))
    check.logits("logits", logits, "R V")
    check.starts("logits_start", logits_start)
    check.tensor("draft_tokens", draft_tokens, "B K", torch.int64)
    check.tensor("positions", positions, "R", torch.int64)
    check.tensor("slots", slots, "B", torch.int64)
    inputs = EditInputs(history, prompt_length, edits, grammar, grammar_start)
    check.edit_inputs(inputs, "B")

    logits = _editable(logits)
    if not len(logits):
        return logits
    real = (draft_tokens >= 0) & (draft_tokens < logits.shape[1])
    start = logits_start[:-1]
    used = logits_start.diff().clamp(max=draft_tokens.shape[1] + 1)
    batch = _Batch(
        start=start,
        rows=used.where(slots >= 0, 0),
        slot=slots.clamp(min=0),
        length=positions[start.clamp(max=len(positions) - 1)],
        drafts=draft_tokens.where(real, -1),
    )
    if grammar is not None:
        first = start if grammar_start is None else grammar_start
        _keep_grammatical(logits, batch, grammar, first)
    _add_bias(logits, batch, edits)
    _keep_allowed(logits, batch, edits)
    _mask_stops(logits, batch, positions, edits)
    _penalise(logits, batch, history, prompt_length, edits)
    _mask_bad_words(logits, batch, history, prompt_length, edits)
    return logits


def edited_copy(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    inputs: EditInputs,
) -> Tensor:
    """The same in a new tensor."""
    if logits.dtype in (torch.float32, torch.float64):
        logits = logits.clone(memory_format=torch.contiguous_format)
    return edit_logits(
        logits, logits_start, draft_tokens, positions, slots,
        history=inputs.history, prompt_length=inputs.prompt_length, edits=inputs.edits,
        grammar=inputs.grammar, grammar_start=inputs.grammar_start,
    )  # fmt: skip


def empty_rows(logits: Tensor) -> Tensor:
    """Which rows exclude every id (-inf or NaN), so that nothing can be drawn: bool [R].

    logits: any float dtype [R, V].

    >>> empty_rows(torch.tensor([[0.0, float("-inf")], [float("nan"), float("-inf")]]))
    tensor([False,  True])
    """
    check = Arguments("empty_rows", device_of("empty_rows", "logits", logits))
    check.logits("logits", logits, "R V")
    return ~(logits > -inf).any(-1)


def _editable(logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.float32, torch.float64):
        return logits.to(torch.float32)
    overlap = len(logits) > 1 and logits.stride(0) < logits.shape[1]
    return logits.clone(memory_format=torch.contiguous_format) if overlap else logits


def _rows_of(batch: _Batch, asks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the requests that ask (bool [B]): request, drafts before, row; each int64 [n]."""
    request, local = _ranges(torch.zeros_like(batch.rows), batch.rows.where(asks, 0))
    return request, local, batch.start[request] + local


def _ranges(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of n ranges in a row: whose they are, and which."""
    size = (end - begin).clamp(min=0)
    owner = torch.repeat_interleave(size)
    before = size.cumsum(0) - size - begin
    return owner, torch.arange(len(owner), device=owner.device) - before[owner]


def _listed(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Where a table [n, columns] holds ids."""
    row, column = ((ids >= 0) & (ids < vocab)).nonzero(as_tuple=True)
    return row, column


def _keep_grammatical(logits: Tensor, batch: _Batch, grammar: Tensor, first: Tensor) -> None:
    request, local, row = _rows_of(batch, first >= 0)
    if not len(row):
        return
    words = grammar[first[request] + local]
    bits = (words[:, :, None] >> torch.arange(32, device=words.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] > 0
    logits[row] = logits[row].where(allowed, -inf)


def _add_bias(logits: Tensor, batch: _Batch, edits: Edits) -> None:
    request, _, row = _rows_of(batch, (edits.bias_ids >= 0).any(1)[batch.slot])
    if not len(row):
        return
    slot = batch.slot[request]
    ids = edits.bias_ids[slot]
    which, column = _listed(ids, logits.shape[1])
    where = row[which], ids[which, column]
    logits[where] = logits[where] + edits.bias[slot[which], column]


def _keep_allowed(logits: Tensor, batch: _Batch, edits: Edits) -> None:
    request, _, row = _rows_of(batch, (edits.allowed_ids >= 0).any(1)[batch.slot])
    if not len(row):
        return
    ids = edits.allowed_ids[batch.slot[request]]
    which, column = _listed(ids, logits.shape[1])
    where = row[which], ids[which, column]
    kept = logits[where]
    logits[row] = -inf
    logits[where] = kept


def _mask_stops(logits: Tensor, batch: _Batch, positions: Tensor, edits: Edits) -> None:
    request, _, row = _rows_of(batch, (edits.stop_ids >= 0).any(1)[batch.slot])
    # the least length may be reached between two drafts
    early = positions[row] < edits.min_length[batch.slot[request]]
    request, row = request[early], row[early]
    if not len(row):
        return
    ids = edits.stop_ids[batch.slot[request]]
    which, column = _listed(ids, logits.shape[1])
    logits[row[which], ids[which, column]] = -inf


def _penalise(
    logits: Tensor, batch: _Batch, history: Tensor, prompt_length: Tensor, edits: Edits
) -> None:
    of_slot = (edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty)
    factor, frequency, presence = (x[batch.slot].to(logits.dtype) for x in of_slot)
    asks = (factor != 1) | (frequency != 0) | (presence != 0)
    some = (asks & (batch.rows > 0)).nonzero().squeeze(-1)
    if not len(some):
        return
    batch = _Batch(*(x[some] for x in batch))
    factor, frequency, presence = factor[some], frequency[some], presence[some]
    vocab = logits.shape[1]

    # The distinct ids that the last row of each request can have in its context. Prompts matter to
    # the repetition penalty alone.
    prompt = prompt_length[batch.slot]
    owner, index = _ranges(prompt.where(factor == 1, 0), batch.length)
    ids = history[batch.slot[owner], index]
    known = (ids >= 0) & (ids < vocab)
    owner, index, ids = owner[known], index[known], ids[known]
    drafter, column = (batch.drafts >= 0).nonzero(as_tuple=True)
    drafted = drafter * vocab + batch.drafts[drafter, column]
    keys, where = torch.unique(torch.cat([owner * vocab + ids, drafted]), return_inverse=True)
    where = where[: len(ids)]
    count = torch.zeros_like(keys).index_add_(0, where, (index >= prompt[owner]).long())
    used = torch.zeros_like(keys, dtype=torch.bool).index_fill_(0, where, True)
    owner, ids = keys // vocab, keys % vocab

    for i in range(batch.drafts.shape[1] + 1):  # row i of every request that has one
        if i:
            again = batch.drafts[owner, i - 1] == ids
            count, used = count + again, used | again
        part = (used & (batch.rows[owner] > i)).nonzero().squeeze(-1)
        mine, times = owner[part], count[part]
        at = batch.start[mine] + i, ids[part]
        value = logits[at]
        value = torch.where(value > 0, value / factor[mine], value * factor[mine])
        value -= frequency[mine] * times
        value -= presence[mine] * (times > 0)
        logits[at] = value


def _mask_bad_words(
    logits: Tensor, batch: _Batch, history: Tensor, prompt_length: Tensor, edits: Edits
) -> None:
    if not edits.bad_words.shape[2]:
        return
    last = edits.bad_words[..., -1]
    request, local, row = _rows_of(batch, (last >= 0).any(1)[batch.slot])
    if not len(row):
        return
    slot = batch.slot[request]
    before = edits.bad_words[slot, :, :-1]  # [n, W, L - 1]
    # The last L - 1 tokens of each row's context: committed, then drafts; -2 matches no word.
    back = torch.arange(-before.shape[2], 0, device=row.device)
    length = batch.length[request][:, None]
    index = length + local[:, None] + back
    context = history[slot[:, None], torch.minimum(index, length - 1).clamp(min=0)]
    if batch.drafts.shape[1]:
        drafts = batch.drafts[request].gather(1, (index - length).clamp(min=0))
        drafts = drafts.where(drafts >= 0, -2)
        context = torch.where(index < length, context, drafts)
    context = context.where(index >= prompt_length[slot][:, None], -2)
    follows = ((before < 0) | (before == context[:, None])).all(-1)
    ids = last[slot].where(follows, -1)
    which, column = _listed(ids, logits.shape[1])
    logits[row[which], ids[which, column]] = -inf
