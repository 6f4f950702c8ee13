"""Attention of one tile, by what is known of it: a chunk, keys in place, gathered keys, exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch.nn import functional as F

from specdec.runner.attention_plan import KEY_BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.runner.attention_tile import Tile
    from specdec.runner.kv_cache import PagedKVCache


@attrs.define(eq=False)
class Rule:
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


def attend(rows: Tensor, cache: PagedKVCache, layer: int, tile: Tile, rule: Rule) -> Tensor:
    """Attend over what `cache` holds: [1, real rows of the tile, query heads, v_dim].

    rows: of the whole forward, [1, rows, query heads, k_dim].
    """
    if tile.exact:
        return _attend_exactly(rows, *cache.by_head(layer), tile, rule)
    if tile.chunk:
        return _attend_chunk(rows, *cache.by_head(layer), tile, rule)
    if tile.firsts is None:
        return _attend_gathered(rows, *cache.by_head(layer), tile, rule)
    return _attend_in_place(rows, cache, layer, tile, rule)


def _attend_gathered(
    rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: Rule
) -> Tensor:
    """Attention over keys that are gathered, padded to the longest request's."""
    # Query heads of one key head become further query rows: keys are not repeated, and a product
    # of one row becomes one of `group` rows.
    heads, kv_heads = rows.shape[2], k_cache.shape[0]
    group = heads // kv_heads
    queries = _folded(_pick(rows, tile), tile, kv_heads).squeeze(2)
    mask = None
    if tile.q > 1 or tile.padded_keys or rule.limits(tile.keys):
        mask = tile.folded_mask(rule.window, rule.chunk, rows.dtype, group)
    k, v = tile.gathered(k_cache, "k"), tile.gathered(v_cache, "v")
    sinks = _folded_sinks(rule, kv_heads, group, tile.q)
    out = _softmax_attention(queries, k, v, mask, rule, sinks)
    return _unfolded(out, tile, kv_heads, heads)


def _attend_in_place(
    rows: Tensor, cache: PagedKVCache, layer: int, tile: Tile, rule: Rule
) -> Tensor:
    """Attention over keys that lie in one run of slots for each request."""
    heads, kv_heads = rows.shape[2], cache.specs[layer].heads
    group = heads // kv_heads
    queries = _folded(_pick(rows, tile), tile, kv_heads).unbind(0)
    views = tile.views(cache, layer, rule.window, rule.chunk)
    masks = tile.piece_masks(rule.window, rule.chunk, rows.dtype, group)
    sinks = _folded_sinks(rule, kv_heads, group, tile.q)
    if sinks is not None:
        sinks = sinks[:, None]
    # Key heads are the batch here: then the answer is contiguous.
    answers = [
        _softmax_attention(own, k, v, mask, rule, sinks)
        for own, (k, v), mask in zip(queries, views, masks, strict=True)
    ]
    out = answers[0] if len(answers) == 1 else torch.stack(answers)
    return _unfolded(out, tile, kv_heads, heads)


def _attend_chunk(rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: Rule) -> Tensor:
    """Attention of a prefill chunk."""
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


def _sinks(rule: Rule, kv_heads: int, group: int, q: int) -> Tensor | None:
    """Sink logits as one more column of scores: [kv heads, group, q, 1]."""
    if rule.sinks is None:
        return None
    return rule.sinks.view(kv_heads, group, 1, 1).expand(-1, -1, q, -1)


def _folded_sinks(rule: Rule, kv_heads: int, group: int, q: int) -> Tensor | None:
    """Sink logits as one more column of folded scores: [kv heads, group * q, 1]."""
    sinks = _sinks(rule, kv_heads, group, q)
    return None if sinks is None else sinks.reshape(kv_heads, group * q, 1)


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rule: Rule,
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
    rows: Tensor, k_cache: Tensor, v_cache: Tensor, tile: Tile, rule: Rule
) -> Tensor:
    """Attention, each row bit for bit the same whatever shares the forward with it.

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
