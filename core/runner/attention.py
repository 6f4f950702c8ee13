"""The attention function that transformers models call, over the paged cache.

It is registered under an own name; the model's modules stay as they are. What it needs beyond the
call's arguments arrives through a context variable, because some families (StableLM, Nemotron)
do not pass extra keyword arguments on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from specdec.errors import TargetError
from specdec.runner.attention_plan import KEY_BLOCK
from specdec.runner.kv_cache import KVSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specdec.runner.attention_plan import AttentionPlan
    from specdec.runner.attention_tile import Tile
    from specdec.runner.kv_cache import PagedKVCache

NAME = "specdec_paged"


@attrs.define(eq=False)
class AttentionContext:
    """What one forward's attention calls need. With no cache they only record the shapes."""

    model: str  # for errors
    cache: PagedKVCache | None
    plan: AttentionPlan | None
    chunks: Sequence[int | None]  # by layer: chunked attention, known from the config alone
    deterministic: bool
    seen: list[tuple[nn.Module, KVSpec]] = attrs.field(factory=list)  # filled when recording
    calls: int = 0


_context: ContextVar[AttentionContext | None] = ContextVar("specdec_attention", default=None)


@contextmanager
def attending(context: AttentionContext) -> Iterator[None]:
    """Serve the attention calls of one forward from `context`."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store the rows' keys and values, then attend.

    query: [1, query heads, rows, k_dim]; key: [1, kv heads, rows, k_dim]; value: [.., v_dim].
    Return ([1, rows, query heads, v_dim], None). Rows of no request come back as zeros.
    """
    context = _context.get()
    if context is None:
        raise TargetError(
            f"attention {NAME!r} only works inside TargetModel.forward; call `close()` on the "
            "target to use the model by itself again"
        )
    if attention_mask is not None:
        raise TargetError(
            f"{context.model} cannot be served: it hands its attention a mask of its own, which a "
            "packed batch cannot honour"
        )
    context.calls += 1
    if context.cache is None or context.plan is None:
        return _record(context, module, query, key, value, sliding_window), None
    plan, layer = context.plan, int(module.layer_idx)  # type: ignore[arg-type]
    k_cache, v_cache = context.cache.by_head(layer)
    k_cache.index_copy_(2, plan.slots, key.transpose(0, 1))
    v_cache.index_copy_(2, plan.slots, value.transpose(0, 1))

    rule = _Rule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=context.chunks[layer],
        softcap=softcap,
        sinks=s_aux,
    )
    rows = query.transpose(1, 2)  # [1, rows, query heads, k_dim]
    if not plan.tiles:
        return value.new_zeros(*rows.shape[:3], value.shape[-1]), None
    parts = [
        (_attend_exactly if tile.exact else _attend)(rows, k_cache, v_cache, tile, rule)
        for tile in plan.tiles
    ]
    return plan.assemble(parts), None


AttentionInterface.register(NAME, paged_attention)


@attrs.define(eq=False)
class _Rule:
    """How one layer scores and hides keys."""

    scaling: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None  # [query heads]: a logit that takes part in the softmax and has no value

    @property
    def plain(self) -> bool:
        """Whether scaled dot product attention computes it."""
        return self.softcap is None and self.sinks is None

    def limits(self, keys: int) -> bool:
        """Whether positions below `keys` can hide from each other by more than causality."""
        return (self.window is not None and self.window < keys) or (
            self.chunk is not None and self.chunk < keys
        )


def _record(
    context: AttentionContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
) -> Tensor:
    spec = KVSpec(key.shape[1], key.shape[-1], value.shape[-1], window)
    context.seen.append((module, spec))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def _attend(rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: _Rule) -> Tensor:
    """Attention of one tile: [1, real rows of the tile, query heads, v_dim].

    rows: [1, rows, query heads, k_dim]. Caches are [kv heads, 1, slots, dim].
    """
    if tile.chunk:
        return _attend_chunk(rows, k_cache, v_cache, tile, rule)
    # Query heads of one key head become further query rows: keys are not repeated, and a product
    # of one row becomes one of `group` rows.
    q, heads, kv_heads = tile.q, rows.shape[2], k_cache.shape[0]
    queries = _folded(_pick(rows, tile), tile, kv_heads)
    group = heads // kv_heads
    sinks = _folded_sinks(rule, kv_heads, group, q)
    mask = None
    if tile.firsts is None:
        if q > 1 or tile.padded_keys or rule.limits(tile.keys):
            mask = tile.folded_mask(rule.window, rule.chunk, rows.dtype, group)
        k, v = tile.gathered(k_cache, "k"), tile.gathered(v_cache, "v")
        out = _softmax_attention(queries.squeeze(2), k, v, mask, rule, sinks)
    else:
        # Key heads become the batch: the answer then is contiguous.
        if sinks is not None:
            sinks = sinks[:, None]
        answers = []
        spans = tile.spans(rule.window, rule.chunk)
        for i, (own, (first, slot, keys)) in enumerate(zip(queries.unbind(0), spans, strict=True)):
            if q > 1:
                mask = tile.folded_mask(rule.window, rule.chunk, rows.dtype, group)[i]
                mask = mask[..., first : first + keys]
            k, v = k_cache.narrow(2, slot, keys), v_cache.narrow(2, slot, keys)
            answers.append(_softmax_attention(own, k, v, mask, rule, sinks))
        out = answers[0] if len(answers) == 1 else torch.stack(answers)
    return _unfolded(out, tile, kv_heads, heads)


def _attend_chunk(
    rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: _Rule
) -> Tensor:
    q, heads, kv_heads = tile.q, rows.shape[2], k_cache.shape[0]
    group = heads // kv_heads
    # Query heads of one key head stand side by side: the mask is shared by all of them.
    queries = _pick(rows, tile).view(q, kv_heads, group, -1).permute(1, 2, 0, 3)
    if tile.firsts is None:
        k = tile.gathered(k_cache, "k")[0][:, None]
        v = tile.gathered(v_cache, "v")[0][:, None]
    else:
        slot = int(tile.firsts[0])
        k, v = k_cache.narrow(2, slot, tile.keys), v_cache.narrow(2, slot, tile.keys)
    k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
    causal = tile.keys == q and not rule.limits(tile.keys)
    mask = None if causal and rule.plain else tile.mask(rule.window, rule.chunk, rows.dtype)
    sinks = _sinks(rule, kv_heads, group, q)
    out = _softmax_attention(queries, k, v, mask, rule, sinks, causal=mask is None)
    return out.permute(2, 0, 1, 3).reshape(1, q, heads, -1)


def _pick(rows: Tensor, tile: Tile) -> Tensor:
    """Rows of the tile, padded ones included: [1, n * q, query heads, k_dim]."""
    if tile.row_slice is None:
        return rows.index_select(1, tile.q_index)
    first, count = tile.row_slice
    return rows if count == rows.shape[1] else rows.narrow(1, first, count)


def _folded(picked: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    """Query heads of one key head as further rows: [n, kv heads, 1, group * q, k_dim]."""
    n, q, (_, _, heads, dim) = tile.entries, tile.q, picked.shape
    if q == 1:
        return picked.reshape(n, kv_heads, 1, heads // kv_heads, dim)
    queries = picked.reshape(n, q, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return queries.reshape(n, kv_heads, 1, -1, dim)


def _unfolded(out: Tensor, tile: Tile, kv_heads: int, heads: int) -> Tensor:
    """Answers of folded rows as rows of the tile, without padding: [1, .., query heads, v_dim]."""
    n, q, dim = tile.entries, tile.q, out.shape[-1]
    if q > 1:
        out = out.reshape(n, kv_heads, heads // kv_heads, q, dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(1, n * q, heads, dim)
    return out if tile.out_from is None else out.index_select(1, tile.out_from)


def _sinks(rule: _Rule, kv_heads: int, group: int, q: int) -> Tensor | None:
    """Sink logits as one more column of scores: [kv heads, group, q, 1]."""
    if rule.sinks is None:
        return None
    return rule.sinks.view(kv_heads, group, 1, 1).expand(-1, -1, q, -1)


def _folded_sinks(rule: _Rule, kv_heads: int, group: int, q: int) -> Tensor | None:
    """Sink logits as one more column of folded scores: [kv heads, group * q, 1]."""
    sinks = _sinks(rule, kv_heads, group, q)
    return None if sinks is None else sinks.reshape(kv_heads, group * q, 1)


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rule: _Rule,
    sinks: Tensor | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Attention over 4-D tensors. Without a mask every row sees every key, unless `causal`.

    causal: rows and keys are the same tokens. Folded rows are not, even when there are as many.
    """
    if rule.plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scaling
        )
    scores = (q @ k.transpose(-1, -2)) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : k.shape[-2]].to(v.dtype) @ v


def _attend_exactly(
    rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: _Rule
) -> Tensor:
    """As `_attend`, each row bit for bit the same whatever shares the forward with it.

    Every product has a fixed shape (QUERY_TILE rows of a head, KEY_BLOCK keys) and blocks of keys
    are added up in order, so further blocks, all hidden, add exact zeros.
    """
    n, q, heads, kv_heads = tile.entries, tile.q, rows.shape[2], k_cache.shape[0]
    group = heads // kv_heads
    queries = _folded(_pick(rows, tile), tile, kv_heads).flatten(0, 2)
    # Contiguous per head, also for one entry: a view's strides would choose another kernel.
    k, v = tile.gathered_by_head(k_cache, "k"), tile.gathered_by_head(v_cache, "v")
    mask = tile.folded_mask(rule.window, rule.chunk, rows.dtype, group)
    sinks = _folded_sinks(rule, kv_heads, group, q)

    scores = []
    for first in range(0, tile.keys, KEY_BLOCK):
        block = torch.bmm(queries, k[:, first : first + KEY_BLOCK].transpose(1, 2)) * rule.scaling
        if rule.softcap is not None:
            block = torch.tanh(block / rule.softcap) * rule.softcap
        block = block.view(n, kv_heads, group * q, -1) + mask[..., first : first + KEY_BLOCK]
        scores.append(block)
    top = torch.stack([block.amax(-1, keepdim=True) for block in scores]).amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(top.dtype))
    out = total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    for i, block in enumerate(scores):
        weights = (block - top).exp_()
        total = total + weights.sum(-1, keepdim=True)
        values = v[:, i * KEY_BLOCK : (i + 1) * KEY_BLOCK]
        out = out + torch.bmm(weights.flatten(0, 1), values).view(n, kv_heads, group * q, -1)
    if sinks is not None:
        total = total + (sinks.to(top.dtype) - top).exp_()
    return _unfolded(out / total, tile, kv_heads, heads)
