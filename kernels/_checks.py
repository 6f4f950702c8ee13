"""Argument checks of the public functions: shapes, dtypes and devices, never values."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from specdec_kernels.types import DenseQ, EditInputs, Edits, Sampling, SparseQ, Verified

# shapes of `Edits`, where they are not [slots]
_EDITS = {
    "bias_ids": "slots E",
    "bias": "slots E",
    "allowed_ids": "slots A",
    "stop_ids": "slots S",
    "bad_words": "slots W L",
}


class Arguments:
    """The tensors of one call. The first tensor with a letter in its shape fixes what it means."""

    def __init__(self, op: str, device: torch.device) -> None:
        self._op = op
        self._device = device
        self._sizes: dict[str, int] = {}

    def tensor(self, name: str, value: object, shape: str, dtype: torch.dtype | None) -> None:
        """Check one argument; `shape` is like "B K", `dtype` None means any float."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self._op}: {name} must be a tensor, not {type(value).__name__} ({value!r})"
            )
        if not (value.is_floating_point() if dtype is None else value.dtype == dtype):
            wanted = dtype or "a floating-point dtype"
            raise TypeError(f"{self._op}: {name} has dtype {value.dtype}; expected {wanted}")
        if value.device != self._device:
            raise ValueError(
                f"{self._op}: {name} is on {value.device}; expected {self._device}, as the logits"
            )
        letters = shape.split()
        if len(letters) != value.ndim or not all(map(self._fits, letters, value.shape)):
            known = ", ".join(f"{x}={self._sizes[x]}" for x in letters if x in self._sizes)
            raise ValueError(
                f"{self._op}: {name} has shape {tuple(value.shape)}; "
                f"expected [{', '.join(letters)}]" + (f" with {known}" if known else "")
            )

    def _fits(self, letter: str, size: int) -> bool:
        return self._sizes.setdefault(letter, size) == size

    def logits(self, name: str, value: object, shape: str) -> None:
        """Check an argument whose rows are read as they lie: at least one column, contiguous."""
        self.tensor(name, value, shape, None)
        assert isinstance(value, Tensor)
        if not value.shape[-1]:
            raise ValueError(
                f"{self._op}: {name} has no columns; expected a vocabulary of 1 or more"
            )
        if value.shape[-1] > 1 and value.stride(-1) != 1:
            raise ValueError(
                f"{self._op}: {name} has strides {value.stride()}; expected a contiguous last "
                "dimension (the others are free)"
            )

    def starts(self, name: str, value: object) -> None:
        """Check an argument [B + 1] of offsets, and fix B by it."""
        self.tensor(name, value, "B+1", torch.int64)
        if not self._sizes["B+1"]:
            raise ValueError(f"{self._op}: {name} is empty; expected B + 1 offsets, at least [0]")
        self._sizes["B"] = self._sizes["B+1"] - 1

    def sampling(self, value: object) -> None:
        """Check the sampling parameters, and fix the number of slots by them."""
        if not isinstance(value, Sampling):
            raise TypeError(f"{self._op}: sampling must be a Sampling, not {type(value).__name__}")
        for field, tensor in zip(value._fields, value, strict=True):
            dtype = torch.int64 if field in ("stream", "top_k") else torch.float32
            self.tensor(f"sampling.{field}", tensor, "slots", dtype)

    def edits(self, value: object) -> None:
        """Check the edits of logits by slot; the number of slots may be fixed already."""
        if not isinstance(value, Edits):
            raise TypeError(f"{self._op}: edits must be an Edits, not {type(value).__name__}")
        for field, tensor in zip(value._fields, value, strict=True):
            real = field == "bias" or field.endswith("_penalty")
            dtype = torch.float32 if real else torch.int64
            self.tensor(f"edits.{field}", tensor, _EDITS.get(field, "slots"), dtype)

    def edit_inputs(self, value: object, requests: str) -> None:
        """Check what edits need, once V is known; `requests` is the letter of their number."""
        if not isinstance(value, EditInputs):
            raise TypeError(f"{self._op}: edits must be an EditInputs, not {type(value).__name__}")
        self.tensor("history", value.history, "slots T", torch.int64)
        self.tensor("prompt_length", value.prompt_length, "slots", torch.int64)
        self.edits(value.edits)
        if value.grammar is not None:
            self._sizes["words"] = -(-self._sizes["V"] // 32)
            self.tensor("grammar", value.grammar, "masks words", torch.int32)
        if value.grammar_start is not None:
            if value.grammar is None:
                raise ValueError(f"{self._op}: grammar_start needs grammar, the masks")
            self.tensor("grammar_start", value.grammar_start, requests, torch.int64)

    def q(self, value: object) -> None:
        """Check the drafts' law, if there is one. Its cache may have more columns than drafts."""
        if isinstance(value, DenseQ):
            self.logits("q.logits", value.logits, "slots columns Vd")
            if value.lse is not None:
                self.tensor("q.lse", value.lse, "slots lse_columns", torch.float32)
                self.at_least_drafts("q.lse", "lse_columns")
        elif isinstance(value, SparseQ):
            self.tensor("q.ids", value.ids, "slots columns C", torch.int64)
            self.logits("q.logits", value.logits, "slots columns C")
        elif value is not None:
            raise TypeError(
                f"{self._op}: q must be None, DenseQ or SparseQ, not {type(value).__name__}"
            )
        if value is not None:
            self.at_least_drafts("q.logits", "columns")

    def sparse(self, value: object) -> None:
        """Check candidates that are written."""
        if not isinstance(value, SparseQ):
            raise TypeError(f"{self._op}: candidates must be a SparseQ, not {type(value).__name__}")
        self.tensor("candidates.ids", value.ids, "slots columns C", torch.int64)
        self.logits("candidates.logits", value.logits, "slots columns C")

    def written(
        self, how: str, column: int, candidates: object, lse: object, dtype: torch.dtype
    ) -> None:
        """Check what a draw of drafts also writes, by slot and column."""
        if how == "greedy" and not (candidates is None and lse is None):
            raise ValueError(
                f"{self._op}: greedy drafts have no law; candidates and lse need another `how`"
            )
        columns: dict[str, int] = {}
        if candidates is not None:
            self.sparse(candidates)
            assert isinstance(candidates, SparseQ)
            columns["candidates"] = candidates.ids.shape[1]
            if candidates.logits.dtype != dtype:
                raise TypeError(
                    f"{self._op}: candidates.logits has dtype {candidates.logits.dtype}; "
                    f"expected {dtype}, as the logits"
                )
        if lse is not None:
            self.tensor("lse", lse, "slots lse_columns", torch.float32)
            assert isinstance(lse, Tensor)
            columns["lse"] = lse.shape[1]
        for name, size in columns.items():
            if not 0 <= column < size:
                raise ValueError(f"{self._op}: column is {column}; {name} has {size} columns")

    def rates(self, method: str, value: object) -> None:
        """Check the acceptance rates: for method "synthetic", and only for it."""
        if (method == "synthetic") != (value is not None):
            wanted = "needs" if value is None else "does not take"
            raise ValueError(f"{self._op}: method {method!r} {wanted} acceptance_rates")
        if value is not None:
            self.tensor("acceptance_rates", value, "rates", torch.float32)
            self.at_least_drafts("acceptance_rates", "rates")

    def at_least_drafts(self, name: str, letter: str) -> None:
        """Check that there is a column for each of the K drafts."""
        if self._sizes[letter] < self._sizes["K"]:
            raise ValueError(
                f"{self._op}: {name} has {self._sizes[letter]} columns; "
                f"expected at least K={self._sizes['K']}"
            )

    def one_of(self, name: str, value: object, allowed: Sequence[str]) -> None:
        """Check a name, and say which one may have been meant."""
        if value not in allowed:
            near = get_close_matches(str(value), allowed, n=1)
            raise ValueError(
                f"{self._op}: {name} is {value!r}; expected one of {', '.join(allowed)}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )


def device_of(op: str, name: str, value: object) -> torch.device:
    """The device of the call: that of its logits."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, not {type(value).__name__} ({value!r})")
    return value.device


def write(op: str, found: Tensor, out: Tensor) -> Tensor:
    """Write a result where the caller wants it: a place of its shape, dtype and device."""
    _same(op, "out", found, out)
    return out.copy_(found)


def write_verified(found: Verified, out: Verified) -> Verified:
    """Write the result of `verify`, all of it or nothing. `out` has `empty` where it has."""
    if not isinstance(out, Verified):
        raise TypeError(f"verify: out must be a Verified, not {type(out).__name__}")
    if (found.empty is None) != (out.empty is None):
        raise ValueError(
            f"verify: out.empty is {'given' if found.empty is None else 'None'}; "
            "calls with edits write it, and no others"
        )
    for field, value, place in zip(found._fields, found, out, strict=True):
        if value is not None:
            _same("verify", f"out.{field}", value, place)
    for value, place in zip(found, out, strict=True):
        if value is not None:
            assert place is not None
            place.copy_(value)
    return out


def _same(op: str, name: str, found: Tensor, out: object) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, not {type(out).__name__} ({out!r})")
    if out.dtype != found.dtype:
        raise TypeError(f"{op}: {name} has dtype {out.dtype}; expected {found.dtype}")
    if out.device != found.device:
        raise ValueError(f"{op}: {name} is on {out.device}; expected {found.device}")
    if out.shape != found.shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(out.shape)}; expected {tuple(found.shape)}"
        )
