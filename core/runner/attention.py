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
from transformers import AttentionInterface

from specdec.errors import TargetError
from specdec.runner.attend import Rule, attend
from specdec.runner.kv_cache import KVSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specdec.runner.attention_plan import AttentionPlan
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
    context.cache.store(layer, plan.slots, key, value)
    rule = Rule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=context.chunks[layer],
        softcap=softcap,
        sinks=s_aux,
    )
    rows = query.transpose(1, 2)  # [1, rows, query heads, k_dim]
    if not plan.tiles:
        return value.new_zeros(*rows.shape[:3], value.shape[-1]), None
    parts = [attend(rows, context.cache, layer, tile, rule) for tile in plan.tiles]
    return plan.assemble(parts), None


AttentionInterface.register(NAME, paged_attention)


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
