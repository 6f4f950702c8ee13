"""Edits of logits as the kernels apply them: the few values they change, worked out beforehand.

The ids that a request's edits may touch (context, drafts, bias, stop ids, ends of bad words) are
marked in a bitmap of V / 32 words and numbered in order. For every row the edited values of those
ids lie in a list; a tile of a row then needs its words, and one load where a bit is set. Against a
table by id, a row's values take no V * 4 bytes and lie side by side; against sorted lists, there is
no search; against counts applied in every tile, the arithmetic is done once for an id and not for
all V, nor again in every pass. Allowed ids and grammars are bitmaps already.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec_kernels.gpu.edit_ids import (
    CHUNK,
    FEW,
    Chains,
    EditTables,
    Wishes,
    fill,
    mark,
    number,
    survey,
)
from specdec_kernels.gpu.edit_values import ban_ids, patch_rows, write_edited
from specdec_kernels.types import Edits

_TILE = 1024


def _chains(
    logits_start: Tensor | None, draft_tokens: Tensor | None, positions: Tensor, slots: Tensor
) -> Chains:
    drafts = 0 if draft_tokens is None else draft_tokens.shape[1]
    tokens = slots if draft_tokens is None else draft_tokens.contiguous()
    start = None if logits_start is None else logits_start.contiguous()
    return Chains(start, tokens, positions.contiguous(), slots.contiguous(), drafts)


def prepare_edits(
    logits: Tensor,
    logits_start: Tensor | None,
    draft_tokens: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    *,
    history: Tensor,
    prompt_length: Tensor,
    edits: Edits,
    grammar: Tensor | None = None,
    grammar_start: Tensor | None = None,
) -> EditTables:
    """What the kernels need to edit rows as they read them; `logits` stay as they are.

    Arguments as for `edit_logits`; without `logits_start` and `draft_tokens` each request is a row.
    bfloat16, float16 and float32 logits. Takes 4 bytes of scratch for each of B * (K + 1) rows and
    the most ids that one request may touch, T of them and some: hand over no more columns of
    `history` than the longest sequence has.

    grammar: int32 [masks, V / 32], applied before all else: id x is excluded from a row whose mask
        lacks bit x % 32 of word x // 32. grammar_start: int64 [B], the mask of a request's first
        row, or -1 if it has none; by default that of the same index as the row.
    """
    vocab, batch, device = logits.shape[1], len(slots), logits.device
    chains = _chains(logits_start, draft_tokens, positions, slots)
    history = history if history.stride(-1) == 1 else history.contiguous()
    if grammar is not None and grammar_start is None:
        grammar_start = (
            torch.arange(batch, device=device) if logits_start is None else logits_start[:-1]
        )
    if grammar is not None and grammar.stride(-1) != 1:
        grammar = grammar.contiguous()
    if grammar_start is not None:
        grammar_start = grammar_start.contiguous()
    words, length = edits.bad_words.shape[1:]
    of = Edits(*(x.contiguous() for x in edits))
    wishes = Wishes(
        history=history,
        history_stride=history.stride(0),
        T=history.shape[1],
        prompt_length=prompt_length.contiguous(),
        factor=of.repetition_penalty,
        presence=of.presence_penalty,
        frequency=of.frequency_penalty,
        bias_ids=of.bias_ids,
        bias=of.bias,
        E=of.bias_ids.shape[1],
        allowed_ids=of.allowed_ids,
        A=of.allowed_ids.shape[1],
        stop_ids=of.stop_ids,
        S=of.stop_ids.shape[1],
        min_length=of.min_length,
        bad_words=of.bad_words,
        W=words if length else 0,
        L=length,
        grammar_start=grammar_start,
    )
    most = min(vocab, wishes.T + chains.K + wishes.E + wishes.S + wishes.W)
    groups = triton.cdiv(vocab, 32)
    bits = torch.empty((3 if wishes.A else 2, batch, groups), dtype=torch.int32, device=device)
    lists = torch.empty((3 if wishes.E else 2, batch, most), dtype=torch.int32, device=device)
    sizes = torch.empty((2, batch), dtype=torch.int32, device=device)
    tables = EditTables(
        flags=sizes[0],
        marked=bits[0],
        before=bits[1],
        patches=torch.empty((batch * (chains.K + 1), most), dtype=torch.float32, device=device),
        allowed=bits[-1],
        grammar=bits[0] if grammar is None else grammar,
        grammar_stride=0 if grammar is None else grammar.stride(0),
        grammar_start=slots if grammar_start is None else grammar_start,
        words=groups,
        N=most,
        K=chains.K,
        ids=lists[0],
        states=lists[1],
        biases=lists[-1].view(torch.float32),
        totals=sizes[1],
    )
    if not batch:
        return tables
    parts = min(8, max(1, triton.cdiv(wishes.T, CHUNK.value)))
    # requests along the first axis of a grid: the others end at 65,535
    survey[(batch,)](chains, wishes, tables, num_warps=4)
    mark[(batch, parts)](chains, wishes, tables, vocab, PARTS=parts, num_warps=4)
    if not most:
        return tables
    number[(batch, triton.cdiv(groups, FEW.value))](tables, num_warps=4)
    fill[(batch, parts)](chains, wishes, tables, vocab, PARTS=parts, num_warps=4)
    parts = min(4, triton.cdiv(most, CHUNK.value))
    # no fused multiply-adds: each operation rounds, as in `edit_logits`
    patch_rows[(batch, chains.K + 1, parts)](
        logits, logits.stride(0), chains, wishes, tables,
        PARTS=parts, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if wishes.S or wishes.W:
        ban_ids[(batch, chains.K + 1)](chains, wishes, tables, vocab, num_warps=1)
    return tables


def apply_edits(
    logits: Tensor,
    tables: EditTables,
    logits_start: Tensor | None,
    draft_tokens: Tensor | None,
    positions: Tensor,
    slots: Tensor,
) -> Tensor:
    """New float32 [R, V]: the rows as the kernels see them. `tables` are of the same call."""
    chains = _chains(logits_start, draft_tokens, positions, slots)
    out = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    vocab = logits.shape[1]
    if len(slots):
        write_edited[(len(slots), chains.K + 1, triton.cdiv(vocab, _TILE))](
            logits, logits.stride(0), chains, tables, out, vocab, TILE=_TILE, num_warps=4
        )
    return out
