"""What requests want done to their logits, in arrays by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.sampling_params import SamplingParams
from specdec_kernels import Edits

# each with its dtype, its value where nothing is asked for, and how many dimensions of columns
_FIELDS: dict[str, tuple[type[np.generic], float, int]] = {
    "repetition_penalty": (np.float32, 1, 0),
    "presence_penalty": (np.float32, 0, 0),
    "frequency_penalty": (np.float32, 0, 0),
    "bias_ids": (np.int64, -1, 1),
    "bias": (np.float32, 0, 1),
    "allowed_ids": (np.int64, -1, 1),
    "stop_ids": (np.int64, -1, 1),
    "min_length": (np.int64, 0, 0),
    "bad_words": (np.int64, -1, 2),
}


class EditArrays:
    """The edits of every slot. The host owns them; `edits` is what the kernels read.

    num_slots: places, the one that belongs to nobody included. vocab_size: stop ids from there on
    are dropped: a model may name an end that its head does not have.

    On a CPU host and device share the memory. Arrays are as wide as the requests in them have
    needed since the last time that nobody asked for an edit, so look `edits` up in every step.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots = num_slots
        self._vocab = vocab_size
        self._device = device
        self._asks: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self._count = 0
        self._host: dict[str, NDArray[Any]] = {}
        self._edits: Edits | None = None
        self._stale = False
        self._empty()

    @property
    def active(self) -> bool:
        """Whether any slot asks for an edit, one by a logits processor included."""
        return self._count > 0

    @property
    def edits(self) -> Edits:
        """The arrays on the device; up to date after `upload`."""
        if self._edits is None:
            self._edits = Edits(**{n: self._on_device(a) for n, a in self._host.items()})
        return self._edits

    def asks(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these slots ask for an edit, one by a logits processor included; -1 does not."""
        return self._asks[slots]

    def place(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt_length: int,
        stop_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Give a slot to a request: nothing of the one before stays.

        prompt_length: of the prompt alone, also if output is processed again with it. stop_ids:
        every token that ends the request. bad_words: the tokens of each of `params.bad_words`.
        """
        self.clear(slot)
        if not params.edits:
            return
        self._asks[slot] = True
        self._count += 1
        self._stale = True
        host = self._host
        host["repetition_penalty"][slot] = params.repetition_penalty
        host["presence_penalty"][slot] = params.presence_penalty
        host["frequency_penalty"][slot] = params.frequency_penalty
        bias = params.logit_bias or {}
        self._fill("bias_ids", slot, list(bias))
        self._fill("bias", slot, list(bias.values()))
        self._fill("allowed_ids", slot, params.allowed_token_ids or ())
        if params.min_tokens:
            host["min_length"][slot] = prompt_length + params.min_tokens
            self._fill("stop_ids", slot, [i for i in stop_ids if i < self._vocab])
        longest = max(map(len, bad_words), default=0)
        self._widen("bad_words", len(bad_words), longest)
        words = self._host["bad_words"][slot]
        for word, tokens in zip(words, bad_words, strict=False):
            word[len(word) - len(tokens) :] = tokens

    def clear(self, slot: int) -> None:
        """Take a slot back."""
        if not self._asks[slot]:
            return
        self._asks[slot] = False
        self._count -= 1
        self._stale = True
        if not self._count:
            self._empty()  # one request with long words must not cost every later one
            return
        for name, (_, neutral, _) in _FIELDS.items():
            self._host[name][slot] = neutral

    def upload(self) -> None:
        """Bring the device's copy up to date; on a CPU there is nothing to do."""
        if self._stale and self._edits is not None and self._device.type != "cpu":
            for tensor, array in zip(self._edits, self._host.values(), strict=True):
                tensor.copy_(torch.from_numpy(array))
        self._stale = False

    def _empty(self) -> None:
        for name, (dtype, neutral, columns) in _FIELDS.items():
            self._host[name] = np.full((self._slots, *[0] * columns), neutral, dtype)
        self._edits = None

    def _fill(self, name: str, slot: int, values: Sequence[float]) -> None:
        self._widen(name, len(values))
        self._host[name][slot, : len(values)] = values

    def _widen(self, name: str, *columns: int) -> None:
        """Make room for so many columns."""
        old = self._host[name]
        shape = tuple(map(max, old.shape[1:], columns))
        if shape == old.shape[1:]:
            return
        dtype, neutral, _ = _FIELDS[name]
        new = np.full((self._slots, *shape), neutral, dtype)
        if len(columns) == 1:
            new[:, : old.shape[1]] = old
        else:  # words end in the last column
            new[:, : old.shape[1], shape[1] - old.shape[2] :] = old
        self._host[name] = new
        self._edits = None

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
