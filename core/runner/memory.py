"""How much memory the pages get, and the tensors behind them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from specdec.errors import ConfigError, OutOfMemoryError
from specdec.runner.kv_cache import KVSpec, PagedKVCache
from specdec.runner.target import TargetModel
from specdec.types import KVLayer

BLOCK_SIZE = 16  # tokens per page
MEMORY_SHARE = 0.4  # of the free memory that the cache takes at most by itself
CPU_MEMORY = 4 << 30  # bytes, and no more than this on a CPU

KeysAndValues = tuple[Tensor, Tensor]


@attrs.frozen(eq=False)
class Pages:
    """Pages of the target's and the drafter's layers; both follow the same block tables."""

    num_blocks: int
    target: tuple[KeysAndValues, ...]
    drafter: tuple[KeysAndValues, ...]


def allocate(
    target: TargetModel,
    layers: Sequence[KVLayer],
    *,
    workspace: int,
    budget: int | None,
    utilization: float | None,
    sequences: int,
    max_blocks: int,
) -> Pages:
    """Allocate pages for so many sequences of `max_blocks` pages, or as many as fit the budget.

    layers: of the drafter. workspace: bytes that it takes besides, out of the same budget.
    budget: bytes; by default a share of the free memory. utilization: instead, on CUDA, the share
    of the device's memory that is in use afterwards.

    Raises:
        ConfigError: a utilization on another device, or beside a budget.
        OutOfMemoryError: the budget does not hold a page.
    """
    specs = [(KVSpec(i.heads, i.k_dim, i.v_dim, i.window), i.dtype or target.dtype) for i in layers]
    drafters = sum(PagedKVCache.bytes_per_block([spec], BLOCK_SIZE, dtype) for spec, dtype in specs)
    per_block = drafters + PagedKVCache.bytes_per_block(target.kv_specs, BLOCK_SIZE, target.dtype)
    most = 1 + sequences * max_blocks  # block 0 belongs to nobody
    if utilization is not None:
        budget = _share_of_device(utilization, budget, target.device)
    elif budget is None:
        budget = int(MEMORY_SHARE * _free_memory(target.device))
        if target.device.type == "cpu":
            budget = min(budget, CPU_MEMORY)
    num_blocks = min(most, (budget - workspace) // per_block)
    if num_blocks < 2:
        raise OutOfMemoryError(
            f"the key-value cache needs {2 * per_block + workspace} bytes at least "
            f"({2 * drafters + workspace} of them for the speculator), but {budget} are given to "
            f"it; raise {'kv_cache_memory' if utilization is None else 'gpu_memory_utilization'}"
        )
    target.allocate(num_blocks, BLOCK_SIZE)
    drafter = []
    for spec, dtype in specs:
        cache = PagedKVCache([spec], num_blocks, BLOCK_SIZE, dtype, target.device)
        drafter.append((cache.k(0), cache.v(0)))
    return Pages(
        num_blocks=num_blocks,
        target=tuple((target.cache.k(i), target.cache.v(i)) for i in range(target.num_layers)),
        drafter=tuple(drafter),
    )


def _share_of_device(utilization: float, budget: int | None, device: torch.device) -> int:
    """Bytes that are left of a share of a CUDA device's memory."""
    if budget is not None:
        raise ConfigError(
            "kv_cache_memory and gpu_memory_utilization both size the key-value cache; give one"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"gpu_memory_utilization={utilization} is for a CUDA device, and the model is on "
            f"{device}; kv_cache_memory says how many bytes the cache gets"
        )
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free)


def check_history(sequences: int, max_model_len: int) -> None:
    """Refuse a token history that the host's memory cannot hold.

    Raises:
        OutOfMemoryError: it would take more than half of what is free.
    """
    needed, free = (sequences + 1) * max_model_len * 8, _free_memory(torch.device("cpu"))
    if needed > free // 2:
        raise OutOfMemoryError(
            f"the tokens of max_num_seqs={sequences} sequences of max_model_len={max_model_len} "
            f"take {needed} bytes, but only {free} are free; lower one of the two"
        )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)
