"""How long a GPU takes to draw by each scheme of noise."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch
import triton
from environment import environment
from kernels import CACHE, DEVICE, copy_bandwidth, replay  # noqa: TID251, the file beside this
from noise_kernels import flat_tiles, group_tiles, settle_flat, settle_groups
from noise_schemes import FLAT, SCHEMES, Scheme
from torch import Tensor

from specdec_kernels.gpu.rows import REGISTERS, TILE, WARPS

ROWS = 6  # a request's: five drafts and one more
BATCHES = (1, 16, 64, 256)
VOCAB = 128256
CHECKED = 96  # rows of each case that are compared with the reference


@attrs.frozen
class Rows:
    """What ids are drawn from."""

    logits: Tensor  # [n, V]
    streams: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]


def rows(count: int, vocab: int, device: torch.device, seed: int) -> Rows:
    """Normal logits (sigma 3) in bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.empty(count, vocab, dtype=torch.bfloat16, device=device)
    logits.normal_(0, 3, generator=generator)
    streams = torch.randint(1 << 62, (count,), device=device, generator=generator)
    return Rows(logits, streams, torch.arange(count, device=device))


def draw(scheme: Scheme, given: Rows, tile: int = TILE) -> Tensor:
    """An id per row: int64 [n]."""
    logits = given.logits
    count, vocab = logits.shape
    if scheme.stride not in (None, 1, tile // scheme.size):
        raise ValueError(f"{scheme.name}: blocks of ids that are no tiles of {tile}")
    groups = scheme.groups(vocab)
    tiles = triton.cdiv(groups, tile // scheme.size)
    width = triton.next_power_of_2(tiles)
    tops, scores = torch.empty((2, count, tiles), dtype=torch.float32, device=logits.device)
    choices = torch.empty((count, tiles), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    keys = given.positions, given.streams
    sizes = {"num_warps": WARPS, "maxnreg": REGISTERS}
    if scheme == FLAT:
        flat_tiles[(tiles, count)](
            logits, logits.stride(0), *keys, scores, choices, vocab, tiles, TILE=tile, **sizes
        )
        settle_flat[(count,)](scores, choices, tokens, tiles, TP=width, num_warps=1)
        return tokens
    within = scheme.stride is not None
    step = scheme.stride or groups
    how = {"SIZE": scheme.size, "PIECE": scheme.piece}
    group_tiles[(tiles, count)](
        logits, logits.stride(0), *keys, tops, scores, choices, vocab, groups, step, tiles,
        TILE=tile, **how, WITHIN=within, **sizes,
    )  # fmt: skip
    settle_groups[(count,)](
        logits, logits.stride(0), *keys, tops, scores, choices, tokens, vocab, step, tiles,
        TP=width, **how, num_warps=1,
    )  # fmt: skip
    return tokens


def differences(scheme: Scheme, given: Rows) -> int:
    """Rows, of the first ones, whose id is not the reference's."""
    part = Rows(given.logits[:CHECKED], given.streams[:CHECKED], given.positions[:CHECKED])
    want = scheme.draw(part.logits.float(), part.streams, part.positions)
    return int((draw(scheme, part) != want).sum())


def measure() -> dict[str, Any]:
    """Every scheme at every batch size."""
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    cases: list[dict[str, Any]] = []
    for batch in BATCHES:
        count = batch * ROWS
        size = count * VOCAB * 2
        sets = [rows(count, VOCAB, DEVICE, seed) for seed in range(max(1, CACHE // size))]
        for scheme in SCHEMES:
            wrong = differences(scheme, sets[0])
            case = {
                "scheme": scheme.name,
                "batch": batch,
                "microseconds": replay([partial(draw, scheme, given) for given in sets]),
                "floor": size / bandwidth * 1e6,
                "different_from_reference": wrong,
                "compared": min(count, CHECKED),
            }
            cases.append(case)
            print(case, flush=True)
        del sets
    return {
        "environment": environment(),
        "command": "python benchmarks/noise.py --time",
        "rows": ROWS,
        "vocabulary": VOCAB,
        "copy_bandwidth": bandwidth,
        "cases": cases,
    }
