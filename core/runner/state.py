"""Request state in arrays by slot: what a step reads and what it commits to."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.runner.sequence import Sequence
from specdec.types import SlotState

MAX_STOP_IDS = 256  # per request, end-of-sequence tokens included

_ON_DEVICE = (
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


class Slots:
    """Arrays indexed by slot. The host owns them; `device` holds what a step reads.

    On a CPU both are the same memory. The last place belongs to nobody: -1 is an index to it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, k: int, device: torch.device
    ) -> None:
        self.max_num_seqs = max_num_seqs
        places = max_num_seqs + 1
        shape = (places,)
        int64 = np.int64
        self.running: NDArray[np.bool_] = np.zeros(shape, bool)
        self.history: NDArray[np.int64] = np.zeros((places, max_model_len), int64)
        self.length: NDArray[np.int64] = np.zeros(shape, int64)
        self.computed: NDArray[np.int64] = np.zeros(shape, int64)
        self.prompt_length: NDArray[np.int64] = np.zeros(shape, int64)
        self.max_length: NDArray[np.int64] = np.zeros(shape, int64)
        self.stream: NDArray[np.int64] = np.zeros(shape, int64)
        self.temperature: NDArray[np.float32] = np.zeros(shape, np.float32)
        self.top_k: NDArray[np.int64] = np.zeros(shape, int64)
        self.top_p: NDArray[np.float32] = np.ones(shape, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(shape, np.float32)
        # on the host alone: whether any of the three above matters to the request
        self.truncates: NDArray[np.bool_] = np.zeros(shape, bool)
        self.stop_ids: NDArray[np.int64] = np.full((places, MAX_STOP_IDS), -1, int64)
        self.stop_width = 0  # columns of stop_ids that any request has used
        self.block_tables: NDArray[np.int64] = np.zeros((places, max_blocks), int64)
        self.num_blocks: NDArray[np.int64] = np.zeros(shape, int64)  # pages that the slot has
        # who goes first: the lower priority, then the earlier arrival
        self.priority: NDArray[np.int64] = np.zeros(shape, int64)
        self.arrival: NDArray[np.int64] = np.zeros(shape, int64)
        # drafts under test in the next step
        self.drafts: NDArray[np.int64] = np.full((places, k), -1, int64)
        self.num_drafts: NDArray[np.int64] = np.zeros(shape, int64)
        self.skip: NDArray[np.int64] = np.zeros(shape, int64)  # why there are none: SKIP_REASONS
        # what the host wants to know of a request after a step
        self.watched: NDArray[np.bool_] = np.zeros(shape, bool)  # every token, at once
        self.has_stop_strings: NDArray[np.bool_] = np.zeros(shape, bool)
        self.first_time: NDArray[np.float64] = np.zeros(shape)  # of its first token; 0: none yet
        self.logprobs: NDArray[np.int64] = np.full(shape, -1, int64)  # per token; -1: none
        self.prompt_logprobs: NDArray[np.int64] = np.full(shape, -1, int64)
        self.device = SlotState(
            **{name: torch.from_numpy(getattr(self, name)).to(device) for name in _ON_DEVICE}
        )
        self._mirrored = device.type != "cpu"
        # what speculators on the host read
        self.history_view = self.history.view()
        self.length_view = self.length.view()
        self.history_view.flags.writeable = self.length_view.flags.writeable = False

    def place(self, slot: int, sequence: Sequence) -> None:
        """Give a slot to a request: nothing of the one before stays."""
        params, known = sequence.params, sequence.known
        self.running[slot] = True
        self.history[slot, : len(known)] = known
        self.length[slot] = len(known)
        self.computed[slot] = 0
        self.prompt_length[slot] = len(sequence.prompt)
        self.max_length[slot] = sequence.max_length
        self.stream[slot] = sequence.stream
        self.temperature[slot] = params.effective_temperature
        self.top_k[slot] = min(max(params.top_k, 0), 2**31 - 1)  # more than any vocabulary
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.truncates[slot] = cuts and not params.greedy
        stops = sequence.stop_ids
        self.stop_width = max(self.stop_width, len(stops))
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        self.block_tables[slot] = 0
        self.num_blocks[slot] = 0
        self.give_blocks(slot, sequence.blocks)
        self.priority[slot] = sequence.priority
        self.arrival[slot] = sequence.arrival
        self.drafts[slot] = -1
        self.num_drafts[slot] = 0
        self.skip[slot] = 0
        self.watched[slot] = sequence.watched
        self.has_stop_strings[slot] = bool(params.stop)
        self.first_time[slot] = sequence.metrics.first_token_time or 0.0
        self.logprobs[slot] = -1 if sequence.logprobs is None else sequence.logprobs.n
        of_prompt = sequence.prompt_logprobs
        self.prompt_logprobs[slot] = -1 if of_prompt is None else of_prompt.n

    def give_blocks(self, slot: int, blocks: list[int]) -> None:
        """Append pages to those that a slot has."""
        held = int(self.num_blocks[slot])
        self.block_tables[slot, held : held + len(blocks)] = blocks
        self.num_blocks[slot] = held + len(blocks)

    def take_blocks(self, slot: int, count: int) -> None:
        """Take back the last pages of a slot."""
        held = int(self.num_blocks[slot])
        self.block_tables[slot, held - count : held] = 0
        self.num_blocks[slot] = held - count

    def free(self, slot: int) -> None:
        """Take a slot back; its other entries go stale."""
        self.running[slot] = False
        self.num_drafts[slot] = 0

    def upload(self) -> None:
        """Bring the device's copy up to date; on a CPU there is nothing to do."""
        if self._mirrored:
            for name in _ON_DEVICE:
                getattr(self.device, name).copy_(torch.from_numpy(getattr(self, name)))
