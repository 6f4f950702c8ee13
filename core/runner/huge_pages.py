"""Move packed weights into pages of 2 MB, where the kernel has them: they stream faster.

A decode step reads every weight once. Over pages of 4 KB the hardware stops reading ahead at each
boundary and walks the page tables; on Linux the allocator asks for larger ones only on request.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

HUGE = 1 << 21
SMALL = 1 << 12
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1


def whole_pages(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (start, end) of whole huge pages within (address, bytes) pieces of memory.

    Pieces in the same or in neighbouring small pages count as one: what lies between them there is
    the allocator's own note.
    """
    joined: list[list[int]] = []
    for address, size in sorted(memory):
        start, end = address // SMALL * SMALL, -(-(address + size) // SMALL) * SMALL
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    pages = [(-(-start // HUGE) * HUGE, end // HUGE * HUGE) for start, end in joined]
    return [(start, end) for start, end in pages if start < end]


def use_huge_pages(weights: Iterable[Tensor]) -> int:
    """Move oneDNN-packed weights; their values stay. Return how many bytes were tried, 0 if none.

    Where the kernel is too old or has no free memory in one piece, they stay where they are.
    """
    if not sys.platform.startswith("linux") or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    moved = 0
    for start, end in whole_pages(
        (torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)) for weight in weights
    ):
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE):
            logger.debug("no huge pages for weights: errno %d", ctypes.get_errno())
            return moved
        moved += end - start
    logger.debug("%d MB of weights in huge pages", moved >> 20)
    return moved
