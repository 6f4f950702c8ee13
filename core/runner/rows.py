"""What goes into one forward of the target, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]


@attrs.frozen(eq=False)
class Rows:
    """What one forward computes: new rows of all requests, packed one after the other."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, consecutive within a request
    query_start: Sequence[int] | Ints  # [batch + 1]; rows from query_start[-1] on are padding
    context: Sequence[int] | Ints  # [batch] keys its last row may see: computed + its rows
    block_tables: Tensor  # [batch, max_blocks] int64, a request's blocks in order
    logits_rows: Tensor  # [n] int64, the rows whose logits are wanted; n may be 0
    # [batch] whether the rows are a chunk of a prompt; None: they are if there are many. Many rows
    # of a decoding request are computed as few would be.
    is_prefill: Sequence[bool] | NDArray[np.bool_] | None = None


@attrs.frozen(eq=False)
class TargetOutputs:
    """What one forward gives. Entries of padding rows are finite and mean nothing."""

    logits: Tensor  # [n, vocab] in the head's dtype
    captured: dict[int, Tensor]  # capture id -> [rows, hidden], see `TargetModel.capture`
    post_norm: Tensor | None  # [rows, hidden] after the final norm, if it was asked for
    pre_head: Tensor | None = None  # [rows, width] what the target exposes before its head
