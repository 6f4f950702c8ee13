"""Load-time probes: does the packed model compute what the model computes by itself?

Two short requests, packed and in two chunks, against the model's own eager forward of each. This
catches every silent failure seen, except those that only show at lengths the probe does not reach.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from specdec.runner.kv_cache import PagedKVCache
from specdec.runner.model_support import refuse
from specdec.runner.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.runner.target import TargetModel

logger = logging.getLogger(__name__)

_SHORT = 19  # tokens of the longer request where no window asks for more
_LONG = 64  # and at most
# Largest accepted logit difference over the logit scale. Dropping a window, sink, softcap or scale
# gives 1e-1 and above, right answers 1e-5 and below in float32.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@attrs.frozen
class ProbeReport:
    """What the probe found."""

    difference: float  # largest absolute logit difference
    scale: float  # largest absolute logit of the model's own forward
    reached: bool  # whether it was longer than every window and chunk


def probe_packed(target: TargetModel) -> ProbeReport:
    """Compare packed, chunked logits with the model's own. Raise TargetError if they differ."""
    longest = max(target.reaches, default=0)
    length = max(_SHORT, min(longest + 7, _LONG))
    if target.max_position_embeddings is not None:
        length = min(length, target.max_position_embeddings)
    pack = _Packer(target, [length, max(length // 2, 1)])
    # The second call mixes a chunk and a single row, as serving does.
    cuts = [length * 3 // 5, len(pack.tokens[1]) - 1]
    first = pack.forward(cuts)
    if target.attention_calls != target.num_layers:
        raise refuse(
            target.name,
            f"its attention was called {target.attention_calls} times for {target.num_layers} "
            "layers",
        )
    second = pack.forward([len(t) - cut for t, cut in zip(pack.tokens, cuts, strict=True)])
    expected = [target.own_forward(tokens) for tokens in pack.tokens]
    got = [torch.cat(parts) for parts in zip(first, second, strict=True)]
    report = _compare(target, got, expected, reached=length > longest)
    logger.debug("probe of %s: %s", target.name, report)
    if not report.reached:
        logger.debug(
            "%s: the probe's %d tokens do not reach its window of %d",
            target.name, length, longest,
        )  # fmt: skip
    return report


def probe_exact(target: TargetModel) -> None:
    """Check that six rows have the bits of one, two and three at a time, beside a neighbour.

    Raise TargetError if not: weights outside linear layers (stacked experts) cannot be fixed.
    """
    lengths = [26, 23]
    together = _Packer(target, lengths)
    together.forward([20, 17])
    expected = together.forward([6, 6])[0]
    apart = _Packer(target, lengths)
    apart.forward([20, 0])
    got = torch.cat([apart.forward([count, 0])[0] for count in (1, 2, 3)])
    if not torch.equal(got, expected):
        raise refuse(
            target.name,
            "deterministic=True is not possible, its logits depend on the number of rows (max "
            f"difference {(got - expected).abs().max().item():.2g})",
        )


def _compare(
    target: TargetModel, got: Sequence[Tensor], expected: Sequence[Tensor], *, reached: bool
) -> ProbeReport:
    scale = max(logits.abs().max().item() for logits in expected)
    pairs = zip(got, expected, strict=True)
    rows = torch.cat([(a.double() - b.double()).abs().amax(-1) for a, b in pairs])
    # NaN passes comparisons; here it means that an unwritten slot was read.
    rows = torch.nan_to_num(rows, nan=float("inf"))
    report = ProbeReport(rows.max().item(), scale, reached)
    # In half precision a router may flip on a near-tie: a single row proves nothing there.
    judged = rows.mean() if target.dtype.itemsize == 2 else rows.max()
    if not judged.item() <= _TOLERANCE[target.dtype] * scale:
        raise refuse(
            target.name,
            "packed and in chunks, its logits are not those of its own forward (max logit "
            f"difference {report.difference:.2g} at scale {scale:.2g})",
        )
    return report


class _Packer:
    """Random requests on a throwaway cache full of NaN, in shuffled pages."""

    def __init__(self, target: TargetModel, lengths: Sequence[int]) -> None:
        block_size = 4
        generator = torch.Generator().manual_seed(0)
        per_request = -(-max(lengths) // block_size)
        blocks = per_request * len(lengths)
        device = target.device
        self._target = target
        self._cache = PagedKVCache(target.kv_specs, blocks + 1, block_size, target.dtype, device)
        self._cache.fill(float("nan"))
        tables = torch.randperm(blocks, generator=generator) + 1
        self._tables = tables.view(len(lengths), per_request).to(device)
        self._done = [0] * len(lengths)
        self.tokens = [
            torch.randint(target.vocab_size, (n,), generator=generator).to(device) for n in lengths
        ]

    def forward(self, counts: Sequence[int]) -> list[Tensor]:
        """Feed the next rows of every request; their logits, [count, vocab] each."""
        spans = [(done, done + n) for done, n in zip(self._done, counts, strict=True)]
        self._done = [end for _, end in spans]
        start = [sum(counts[:i]) for i in range(len(counts) + 1)]
        device = self._target.device
        rows = Rows(
            tokens=torch.cat([t[a:b] for t, (a, b) in zip(self.tokens, spans, strict=True)]),
            positions=torch.cat([torch.arange(a, b, device=device) for a, b in spans]),
            query_start=start,
            context=self._done,
            block_tables=self._tables,
            logits_rows=torch.arange(start[-1], device=device),
        )
        logits = self._target.forward_on(rows, self._cache).logits
        return list(torch.split(logits, list(counts)))
