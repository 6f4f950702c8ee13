"""The rows of a call, and the launches that draw from them; the kernels are in `coupled`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec_kernels.gpu import attempts, retries, survey
from specdec_kernels.gpu.coupled import row_statistics
from specdec_kernels.gpu.edit_ids import EditTables
from specdec_kernels.gpu.rows import CAREFUL, EDITING, REGISTERS, WARPS, largest_of, tile_of
from specdec_kernels.noise import ATTEMPTS
from specdec_kernels.types import Sampling

# Low bits that no float32 converted from the dtype has set.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

# Programs of a launch for rows that are few in most steps, at most.
PROGRAMS = 1024
WIDE = 80  # registers of a thread that weighs what it reads in more than one way, at most
WIDEST = 128  # the same where it edits and draws too


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
    scores: Tensor  # [rows, tiles]
    choices: Tensor  # [rows, tiles]


def statistics(rows: Rows, *, last: bool = False) -> Partials:
    """Read every tile of every row; with `last`, of those that follow all drafts."""
    vocab = rows.logits.shape[1]
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    device = rows.logits.device
    tops, scores = torch.empty((2, rows.places, tiles), dtype=torch.float32, device=device)
    choices = torch.empty((rows.places, tiles), dtype=torch.int32, device=device)
    partials = Partials(tops, scores, choices)
    row_statistics[(tiles, rows.drafts + 1, len(rows.slots))](
        *rows.arguments, rows.positions, rows.slots, rows.sampling.stream,
        rows.sampling.temperature, *partials,
        vocab, rows.drafts, tiles, rows.tables,
        **rows.chains, LAST=last, TILE=tile, ATTEMPTS=1,
        LARGEST_RAW=largest_of(rows.dtype), num_warps=WARPS, maxnreg=rows.registers,
    )  # fmt: skip
    return partials


class Draws(NamedTuple):
    """The tokens of rows where a request may truncate, and the cuts of the others."""

    tokens: Tensor  # int64 [rows]
    tops: Tensor  # [rows, tiles]
    cuts: Tensor  # float32 [rows], the least log-weight that is kept; only if asked for


def draws(rows: Rows, *, last: bool = False) -> Draws:
    """Draw the token of every row where a request may truncate.

    last: only of the rows that follow all drafts; of those that test one, find the cuts.
    """
    sampling, device = rows.sampling, rows.logits.device
    vocab = rows.logits.shape[1]
    partials = statistics(rows, last=last)
    tile, tiles = tile_of(vocab), partials.tops.shape[1]
    places, width = rows.places, triton.next_power_of_2(tiles)
    share = min(survey.ROOM // width, tile)
    levels = survey.LEVELS.value
    drawn = torch.empty(places, dtype=torch.int64, device=device)
    first_levels, row_tops, cuts = torch.empty((3, places), dtype=torch.float32, device=device)
    states, opens = torch.empty((2, places), dtype=torch.int32, device=device)
    opened = torch.empty(1, dtype=torch.int32, device=device)
    above, kept, totals = torch.empty((3, places, tiles), dtype=torch.float32, device=device)
    counts = torch.empty((places, tiles), dtype=torch.int32, device=device)
    scores = torch.empty((places, tiles, ATTEMPTS), dtype=torch.float32, device=device)
    choices = torch.empty((places, tiles, ATTEMPTS), dtype=torch.int32, device=device)
    masses = torch.empty((places, tiles, levels), dtype=torch.float32, device=device)
    reached = torch.empty((places, tiles, levels), dtype=torch.int32, device=device)
    bounds = torch.empty((places, 2), dtype=torch.float32, device=device)
    sums = torch.empty((places, tiles, 2), dtype=torch.float32, device=device)
    numbers = torch.empty((places, tiles, 2), dtype=torch.int32, device=device)
    listed = torch.empty((places, tiles, share), dtype=rows.dtype, device=device)
    truncation = sampling.top_k, sampling.top_p, sampling.min_p
    chains, sizes = rows.arguments, (vocab, rows.drafts, tiles, rows.tables)
    # all rows that test a draft are gone through again, else few
    programs = places * tiles if last else min(places * tiles, PROGRAMS)
    wide = max(rows.registers, WIDE)
    registers = REGISTERS if rows.logits.itemsize < 4 else WIDE
    if rows.tables is not None:
        registers = WIDEST
    row_grid = (rows.drafts + 1, len(rows.slots))
    attempts.first_draws[row_grid](
        *chains, rows.positions, rows.slots, sampling.stream, sampling.temperature, *truncation,
        *partials, drawn, first_levels, row_tops, states, cuts, opened, *sizes,
        **rows.chains, LAST=last, TP=width, CUTS=last, num_warps=1,
    )  # fmt: skip
    attempts.mass_above[(tiles, *row_grid)](
        *chains, rows.slots, sampling.temperature, sampling.top_k, sampling.min_p,
        first_levels, row_tops, states, above, counts, kept, *sizes,
        **rows.chains, LAST=last, TILE=tile, num_warps=WARPS, maxnreg=wide,
    )  # fmt: skip
    attempts.open_rows[(len(rows.slots),)](
        *chains[2:], rows.slots, *truncation, drawn, first_levels, row_tops, states,
        above, counts, kept, opened, opens, vocab, rows.drafts, tiles,
        **rows.chains, LAST=last, TP=width, num_warps=4,
    )  # fmt: skip
    retries.retry_tiles[(programs,)](
        *chains, rows.positions, rows.slots, sampling.stream, sampling.temperature, sampling.top_k,
        states, opened, opens, partials.tops, scores, choices, totals, masses, reached, *sizes,
        **rows.chains, TILE=tile, ATTEMPTS=ATTEMPTS, num_warps=8, maxnreg=registers,
    )  # fmt: skip
    survey.collect_tiles[(programs,)](
        *chains, rows.slots, sampling.temperature, *truncation, opened, opens,
        partials.tops, totals, masses, reached, bounds, sums, numbers, listed, *sizes,
        **rows.chains, TP=width, TILE=tile, SHARE=share, num_warps=8, maxnreg=wide,
    )  # fmt: skip
    retries.settle_attempts[(places,)](
        *chains, rows.positions, rows.slots, sampling.stream, sampling.temperature, *truncation,
        drawn, first_levels, states, opened, opens, cuts, partials.tops, scores, choices,
        bounds, sums, numbers, listed, *sizes,
        **rows.chains, TP=width, TILE=CAREFUL, ATTEMPTS=ATTEMPTS, SHARE=share,
        SHIFT=UNUSED_BITS[rows.dtype], LARGEST_RAW=largest_of(rows.dtype), num_warps=16,
    )  # fmt: skip
    return Draws(drawn, partials.tops, cuts)
