"""Launches of the rules that compare laws; the kernels are in `rejection` and `residual`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec_kernels.gpu import laws, rejection, residual
from specdec_kernels.gpu.chains import Rows, draws
from specdec_kernels.gpu.rows import CAREFUL, WARPS, largest_of, tile_of
from specdec_kernels.types import DenseQ, SparseQ, Verified

COMPARING = 80  # registers of a thread that reads tiles of p and q at once, at most

_RULES = {
    "standard": rejection.STANDARD.value,
    "block": rejection.BLOCK.value,
    "synthetic": rejection.SYNTHETIC.value,
}


class _Law(NamedTuple):
    """q as the kernels take it."""

    arguments: tuple[Any, ...]  # logits, strides, ids, strides, candidates
    lse: tuple[Any, ...]  # the tensor, strides
    sums: int  # how they are known
    kind: int
    vocab: int
    candidates: int  # a power of two


def _law(q: DenseQ | SparseQ | None, rows: Rows) -> _Law:
    vocab = rows.logits.shape[1]
    none: tuple[Any, ...] = (rows.slots, 0, 0)
    unknown = laws.NO_SUMS.value
    if q is None:
        arguments = (rows.logits, 0, 0, *none, 0)
        return _Law(arguments, none, unknown, laws.NO_Q.value, vocab, 1)
    logits = (q.logits, q.logits.stride(0), q.logits.stride(1))
    if isinstance(q, DenseQ):
        shared = min(vocab, q.logits.shape[2])
        lse, sums = none, laws.ROWS.value
        if q.lse is not None:
            lse, sums = (q.lse, *q.lse.stride()), laws.GIVEN.value
        return _Law((*logits, *none, 0), lse, sums, laws.DENSE.value, shared, 1)
    ids = q.ids if q.ids.stride(2) == 1 else q.ids.contiguous()
    count = ids.shape[2]
    arguments = (*logits, ids, ids.stride(0), ids.stride(1), count)
    width = triton.next_power_of_2(count)
    return _Law(arguments, none, unknown, laws.SPARSE.value, vocab, width)


def compare(
    rows: Rows,
    q: DenseQ | SparseQ | None,
    out: Verified,
    *,
    method: str,
    acceptance_rates: Tensor | None,
    truncate: bool,
) -> None:
    """Verify by a rule that compares p with q; `out` is what is written."""
    assert rows.draft_tokens is not None
    batch, drafts = rows.draft_tokens.shape
    device, vocab = rows.logits.device, rows.logits.shape[1]
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    law, sampling = _law(q, rows), rows.sampling
    dense = law.kind == laws.DENSE.value

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    tops, totals, scores = floats(3, rows.places, tiles)
    choices = torch.empty((rows.places, tiles), dtype=torch.int32, device=device)
    q_tops, q_totals = floats(2, rows.places, tiles) if dense else (tops, totals)
    sizes = {"KP": triton.next_power_of_2(drafts + 1), "TP": triton.next_power_of_2(tiles)}
    common = {**sizes, "CUT": truncate, "Q": law.kind, "TILE": CAREFUL, "CP": law.candidates}
    chains, slots, temperature = rows.arguments, rows.slots, sampling.temperature

    drawn, last_tops, cuts = choices, tops, tops
    if truncate:
        drawn, last_tops, cuts = draws(rows, last=True)
    rejection.test_statistics[(tiles, drafts + 1, batch)](
        *chains, rows.positions, slots, sampling.stream, temperature, cuts, *law.arguments[:3],
        *law.lse, tops, scores, choices, totals, q_tops, q_totals, vocab, law.vocab, drafts, tiles,
        rows.tables, CUT=truncate, Q_SUMS=law.sums, DRAW=not truncate, KP=sizes["KP"], TILE=tile,
        LARGEST_RAW=largest_of(rows.dtype), num_warps=WARPS, maxnreg=rows.registers,
    )  # fmt: skip
    masses, masses_each = tops, tiles
    if method == "block" and drafts > 1 and law.kind != laws.NO_Q.value:
        masses_each = tiles if dense else 1
        masses, joints = floats(rows.places, masses_each), floats(batch, 5, drafts + 1)
        rejection.block_laws[(batch,)](
            *chains, slots, temperature, cuts, *law.arguments, tops, totals, q_tops, q_totals,
            joints, vocab, law.vocab, drafts, tiles, rows.tables, **common, num_warps=4,
        )  # fmt: skip
        if dense:
            residual.residual_masses[(tiles, drafts - 1, batch)](
                *chains, slots, temperature, cuts, *law.arguments[:3], joints, masses,
                vocab, law.vocab, drafts, tiles, rows.tables,
                CUT=truncate, KP=sizes["KP"], TILE=tile, PART=min(tile, CAREFUL), num_warps=WARPS,
                maxnreg=max(rows.registers, COMPARING),
            )  # fmt: skip
        else:
            residual.candidate_masses[(drafts - 1, batch)](
                *chains, slots, temperature, cuts, *law.arguments, joints, masses,
                vocab, drafts, rows.tables, CUT=truncate, KP=sizes["KP"], CP=law.candidates,
                num_warps=1,
            )  # fmt: skip

    refused = torch.empty(batch, dtype=torch.int32, device=device)
    judged = floats(batch, 6)
    rejection.settle_tests[(batch,)](
        *chains, rows.positions, slots, sampling.stream, temperature, cuts,
        temperature if acceptance_rates is None else acceptance_rates, *law.arguments,
        tops, totals, scores, choices, q_tops, q_totals, masses, drawn, last_tops,
        *out, refused, judged, vocab, law.vocab, drafts, tiles, masses_each,
        rows.tables, RULE=_RULES[method], DRAWN=truncate, **common, num_warps=4,
    )  # fmt: skip
    if drafts:
        scores, choices = scores[:batch], choices[:batch]
        residual.residual_tiles[(tiles, batch)](
            *chains, rows.positions, slots, sampling.stream, temperature, *law.arguments,
            refused, judged, scores, choices, vocab, law.vocab, drafts, tiles, rows.tables,
            Q=law.kind, TILE=tile, num_warps=WARPS,
        )  # fmt: skip
        residual.settle_residual[(batch,)](
            *chains, rows.positions, slots, sampling.stream, temperature, *law.arguments,
            refused, judged, scores, choices, out.tokens, vocab, law.vocab, drafts, tiles,
            rows.tables, Q=law.kind, TP=sizes["TP"], TILE=CAREFUL, num_warps=1,
        )  # fmt: skip
