"""What a speculator may answer to a hook: every answer is checked before core uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.errors import SpeculatorError
from specdec.types import Draft, Verdict
from specdec_kernels import DenseQ, SparseQ

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.types import QForm

_Q = {"dense": DenseQ, "sparse": SparseQ}


class Answers:
    """Checks of one speculator's answers; each raises a `SpeculatorError` that names it.

    label: names the speculator. vocab_size, device: what ids and tensors are checked against.
    q: the form of q that its capabilities declare. confidence: whether they declare any.

    Shapes, dtypes and devices are read everywhere. Values are read on the CPU alone: elsewhere
    that would stall the device, and the kernels treat ids outside the vocabulary as no draft.
    """

    def __init__(
        self,
        label: str,
        vocab_size: int,
        device: torch.device,
        q: QForm | None,
        *,
        confidence: bool = False,
    ) -> None:
        self.label = label
        self.vocab_size = vocab_size
        self.device = device
        self._q = _Q[q] if q else None
        self._confidence = confidence
        self._reads_values = device.type == "cpu"

    def features(self, hidden: object, rows: int) -> Tensor:
        """An answer to `extract_hidden_states` that is not None."""
        hook = "extract_hidden_states"
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or hidden.shape[0] != rows:
            raise self._wrong(hook, f"{_kind(hidden)}; features [{rows} rows, width]")
        if not hidden.is_floating_point():
            raise self._wrong(hook, f"features of dtype {hidden.dtype}; a float dtype")
        self._check_device(hook, "features", hidden)
        return hidden

    def draft(self, draft: object, batch: int, k: int, slots: int) -> Draft:
        """An answer to `propose` that is not None."""
        if not isinstance(draft, Draft):
            raise self._wrong("propose", f"{_kind(draft)}; a specdec.Draft")
        self._check("propose", "draft tokens", draft.tokens, torch.int64, (batch, k))
        self._check_values("propose", "draft tokens", draft.tokens, -1, self.vocab_size - 1)
        if draft.confidence is not None:
            if not self._confidence:
                raise self._wrong(
                    "propose",
                    "confidence, which its capabilities do not declare; None, or "
                    "writes_confidence=True",
                )
            self._check("propose", "confidence", draft.confidence, torch.float32, (batch, k))
        if draft.q is not None:
            self._check_q(draft.q, slots, k)
        if draft.parents is not None:
            raise self._wrong("propose", "parents, which are reserved for trees; None")
        return draft

    def verdict(self, verdict: object, rule: str, batch: int, k: int, logit_rows: int) -> Verdict:
        """An answer to `verify` under a rule of the speculator's own."""
        if not isinstance(verdict, Verdict):
            raise self._wrong(
                "verify", f"{_kind(verdict)} under its own rule {rule!r}; a specdec.Verdict"
            )
        tokens, count, rows = verdict.tokens, verdict.count, verdict.rows
        self._check("verify", "emitted tokens", tokens, torch.int64, (batch, k + 1))
        self._check("verify", "counts", count, torch.int64, (batch,))
        self._check("verify", "rows", rows, torch.int64, (batch, k + 1))
        self._check_values("verify", "emitted tokens", tokens, -1, self.vocab_size - 1)
        self._check_values("verify", "counts", count, 0, k + 1)
        self._check_values("verify", "rows", rows, -1, logit_rows - 1)
        if self._reads_values:
            emitted = np.arange(k + 1) < count.numpy()[:, None]
            for what, value in (("tokens", tokens), ("rows", rows)):
                if ((value.numpy() >= 0) != emitted).any():
                    raise self._wrong("verify", f"{what} unlike their counts; that many, then -1,")
        return verdict

    def _wrong(self, hook: str, what: str) -> SpeculatorError:
        return SpeculatorError(f"{self.label} answered the hook {hook} with {what} is expected")

    def _check(
        self, hook: str, what: str, value: object, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(hook, f"{what} of type {type(value).__name__}; a tensor")
        if value.dtype is not dtype:
            raise self._wrong(hook, f"{what} of dtype {value.dtype}; {dtype}")
        if value.shape != shape:
            raise self._wrong(hook, f"{what} of shape {list(value.shape)}; {list(shape)}")
        self._check_device(hook, what, value)

    def _check_device(self, hook: str, what: str, value: Tensor) -> None:
        if value.device != self.device and not _same(value.device, self.device):
            raise self._wrong(hook, f"{what} on {value.device}; {self.device}")

    def _check_values(self, hook: str, what: str, value: Tensor, low: int, high: int) -> None:
        if not self._reads_values or not value.numel():
            return
        # numpy on a view is the cheaper call; unsigned, one comparison sees both bounds
        values = value.detach().numpy()
        if np.maximum.reduce((values - low).view(np.uint64), axis=None) > high - low:
            bad = values[(values < low) | (values > high)].flat[0]
            raise self._wrong(hook, f"{what} that hold {bad}; {low} to {high}")

    def _check_q(self, q: DenseQ | SparseQ, slots: int, k: int) -> None:
        if self._q is None or not isinstance(q, self._q):
            form = f"a {self._q.__name__}" if self._q else "None, for it declares no form of q,"
            raise self._wrong("propose", f"q of type {type(q).__name__}; {form}")
        for name, value in q._asdict().items():
            if not isinstance(value, torch.Tensor):
                raise self._wrong("propose", f"q.{name} of type {type(value).__name__}; a tensor")
            if value.ndim != 3 or value.shape[0] != slots or value.shape[1] < k:
                raise self._wrong(
                    "propose",
                    f"q.{name} of shape {list(value.shape)}; [{slots} slots, {k} or more, ...]",
                )
            self._check_device("propose", f"q.{name}", value)


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one, `cuda` without a number being any of them."""
    return one.type == other.type and not (":" in str(one) and ":" in str(other))


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
