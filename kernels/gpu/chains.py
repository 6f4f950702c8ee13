"""The rows of a call, and the launches that draw from them; the kernels are in `coupled`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec_kernels.gpu.coupled import row_statistics
from specdec_kernels.gpu.edit_ids import EditTables
from specdec_kernels.gpu.rows import CAREFUL, EDITING, REGISTERS, WARPS, largest_of, tile_of
from specdec_kernels.gpu.truncation import first_draws, mass_above, settle_attempts
from specdec_kernels.noise import ATTEMPTS
from specdec_kernels.types import Sampling

# Low bits that no float32 converted from the dtype has set.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Rows(NamedTuple):
    """The rows of a call: of B requests, K + 1 each at most."""

    logits: Tensor
    logits_start: Tensor | None
    draft_tokens: Tensor | None
    positions: Tensor
    slots: Tensor
    sampling: Sampling
    drafts: int  # K
    tables: EditTables | None  # what the kernels edit logits by

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that logits compare in: edited ones are float32."""
        return self.logits.dtype if self.tables is None else torch.float32

    @property
    def registers(self) -> int:
        """How many registers a thread that reads a tile has, at most."""
        return REGISTERS if self.tables is None else EDITING

    @property
    def places(self) -> int:
        """Places of partial results: K + 1 a request."""
        return len(self.slots) * (self.drafts + 1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Logits and chains, as the kernels take them."""
        if self.logits_start is None:
            return self.logits, self.logits.stride(0), self.slots, self.slots, 0
        assert self.draft_tokens is not None
        stride = self.draft_tokens.stride(0)
        return self.logits, self.logits.stride(0), self.logits_start, self.draft_tokens, stride

    @property
    def chains(self) -> dict[str, Any]:
        """How the kernels read them."""
        return {
            "CHAINS": self.logits_start is not None,
            "KP": triton.next_power_of_2(self.drafts + 1),
        }


class Partials(NamedTuple):
    """What the tiles of the rows leave."""

    tops: Tensor  # [rows, tiles]
    scores: Tensor  # [rows, tiles, attempts]
    choices: Tensor  # [rows, tiles, attempts]


def statistics(rows: Rows, attempts: int = 1, *, last: bool = False) -> Partials:
    """Read every tile of every row; with `last`, of those that follow all drafts."""
    vocab = rows.logits.shape[1]
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    device = rows.logits.device
    floats = torch.empty((1 + attempts, rows.places, tiles), dtype=torch.float32, device=device)
    choices = torch.empty((rows.places, tiles, attempts), dtype=torch.int32, device=device)
    partials = Partials(floats[0], floats[1:], choices)
    row_statistics[(tiles, rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, rows.sampling.stream,
        rows.sampling.temperature, partials.tops, partials.scores, choices,
        vocab, rows.drafts, tiles, rows.tables,
        **rows.chains, LAST=last, TILE=tile, ATTEMPTS=attempts,
        LARGEST_RAW=largest_of(rows.dtype), num_warps=WARPS, maxnreg=rows.registers,
    )  # fmt: skip
    return partials


class Draws(NamedTuple):
    """What is drawn where a request may truncate."""

    tokens: Tensor  # int64 [rows]
    tops: Tensor  # [rows, tiles]


def draws(rows: Rows, *, last: bool = False) -> Draws:
    """The token of every row where a request may truncate.

    last: only of the rows that follow all drafts.
    """
    sampling, device = rows.sampling, rows.logits.device
    vocab = rows.logits.shape[1]
    partials = statistics(rows, ATTEMPTS, last=last)
    tile, tiles = tile_of(vocab), partials.tops.shape[1]
    places, width = rows.places, triton.next_power_of_2(tiles)
    drawn = torch.empty(places, dtype=torch.int64, device=device)
    attempts = torch.empty((places, ATTEMPTS), dtype=torch.int64, device=device)
    levels = torch.empty((places, ATTEMPTS), dtype=torch.float32, device=device)
    row_tops = torch.empty(places, dtype=torch.float32, device=device)
    states = torch.empty(places, dtype=torch.int32, device=device)
    kept = torch.empty((places, tiles), dtype=torch.float32, device=device)
    above = torch.empty((places, tiles, ATTEMPTS), dtype=torch.float32, device=device)
    counts = torch.empty((places, tiles, ATTEMPTS), dtype=torch.int32, device=device)
    truncation = sampling.top_k, sampling.top_p, sampling.min_p
    first_draws[(rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, sampling.stream, sampling.temperature,
        *truncation, partials.tops, partials.scores, partials.choices,
        drawn, attempts, levels, row_tops, states, vocab, rows.drafts, tiles, rows.tables,
        **rows.chains, LAST=last, TP=width, ATTEMPTS=ATTEMPTS, num_warps=1,
    )  # fmt: skip
    mass_above[(tiles, rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.slots, sampling.temperature, sampling.top_k, sampling.min_p, levels,
        row_tops, states, above, counts, kept, vocab, rows.drafts, tiles, rows.tables,
        **rows.chains, LAST=last, TILE=tile, ATTEMPTS=ATTEMPTS, num_warps=WARPS,
    )  # fmt: skip
    settle_attempts[(rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, sampling.stream, sampling.temperature,
        *truncation, drawn, attempts, levels, row_tops, states, above, counts, kept,
        vocab, rows.drafts, tiles, rows.tables,
        **rows.chains, LAST=last, TP=width, TILE=CAREFUL, ATTEMPTS=ATTEMPTS,
        SHIFT=UNUSED_BITS[rows.dtype], LARGEST_RAW=largest_of(rows.dtype),
        num_warps=8,
    )  # fmt: skip
    return Draws(drawn, partials.tops)
