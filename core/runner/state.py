"""Request state in arrays by slot: what a step reads and what it commits to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.types import SlotState

MAX_STOP_IDS = 256  # per request, end-of-sequence tokens included
SKIPS = ("nothing_proposed", "budget", "context", "policy")


class Slots:
    """Arrays indexed by slot. The host owns them; `device` holds what a step reads.

    On a CPU both are the same memory. The last place belongs to nobody: -1 is an index to it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, k: int, device: torch.device
    ) -> None:
        self.max_num_seqs = max_num_seqs
        max_num_seqs += 1
        shape = (max_num_seqs,)
        int64 = np.int64
        self.history: NDArray[np.int64] = np.zeros((max_num_seqs, max_model_len), int64)
        self.length: NDArray[np.int64] = np.zeros(shape, int64)
        self.computed: NDArray[np.int64] = np.zeros(shape, int64)
        self.prompt_length: NDArray[np.int64] = np.zeros(shape, int64)
        self.max_length: NDArray[np.int64] = np.zeros(shape, int64)
        self.stream: NDArray[np.int64] = np.zeros(shape, int64)
        self.temperature: NDArray[np.float32] = np.zeros(shape, np.float32)
        self.top_k: NDArray[np.int64] = np.zeros(shape, int64)
        self.top_p: NDArray[np.float32] = np.ones(shape, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(shape, np.float32)
        self.stop_ids: NDArray[np.int64] = np.full((max_num_seqs, MAX_STOP_IDS), -1, int64)
        self.block_tables: NDArray[np.int64] = np.zeros((max_num_seqs, max_blocks), int64)
        self.stop_width = 0  # columns of stop_ids that any request has used
        # drafts under test in the next step
        self.drafts: NDArray[np.int64] = np.full((max_num_seqs, k), -1, int64)
        self.num_drafts: NDArray[np.int64] = np.zeros(shape, int64)
        self.skip: NDArray[np.int64] = np.zeros(shape, int64)  # why there are none: into SKIPS
        # counters of the request in the slot
        self.spec_steps: NDArray[np.int64] = np.zeros(shape, int64)
        self.plain_steps: NDArray[np.int64] = np.zeros((max_num_seqs, len(SKIPS)), int64)
        self.drafted: NDArray[np.int64] = np.zeros((max_num_seqs, k), int64)
        self.accepted: NDArray[np.int64] = np.zeros((max_num_seqs, k), int64)
        self.device = SlotState(
            **{
                name: torch.from_numpy(getattr(self, name)).to(device)
                for name in (
                    "history",
                    "length",
                    "computed",
                    "prompt_length",
                    "stream",
                    "temperature",
                    "top_k",
                    "top_p",
                    "min_p",
                    "block_tables",
                )
            }
        )
        self._mirrored = device.type != "cpu"
        # what speculators on the host read
        self.history_view = self.history.view()
        self.length_view = self.length.view()
        self.history_view.flags.writeable = self.length_view.flags.writeable = False

    def place(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        prompt_length: int,
        max_length: int,
        stream: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        stop_ids: Sequence[int],
        blocks: Sequence[int],
    ) -> None:
        """Give a slot to a request: nothing of the one before stays."""
        self.history[slot, : len(tokens)] = tokens
        self.length[slot] = len(tokens)
        self.computed[slot] = 0
        self.prompt_length[slot] = prompt_length
        self.max_length[slot] = max_length
        self.stream[slot] = stream
        self.temperature[slot] = temperature
        self.top_k[slot] = min(max(top_k, 0), 2**31 - 1)  # more than any vocabulary
        self.top_p[slot] = top_p
        self.min_p[slot] = min_p
        self.stop_width = max(self.stop_width, len(stop_ids))
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = list(stop_ids)
        self.block_tables[slot] = 0
        self.block_tables[slot, : len(blocks)] = list(blocks)
        self.drafts[slot] = -1
        self.num_drafts[slot] = 0
        self.skip[slot] = 0
        self.spec_steps[slot] = 0
        self.plain_steps[slot] = 0
        self.drafted[slot] = 0
        self.accepted[slot] = 0

    def upload(self) -> None:
        """Bring the device's copy up to date; on a CPU there is nothing to do."""
        if self._mirrored:
            for name in ("history", "length", "computed", "prompt_length", "stream", "temperature"):
                getattr(self.device, name).copy_(torch.from_numpy(getattr(self, name)))
            for name in ("top_k", "top_p", "min_p", "block_tables"):
                getattr(self.device, name).copy_(torch.from_numpy(getattr(self, name)))
