"""What a speculator may answer to a hook: every answer is checked before core uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from specdec.errors import SpeculatorError
from specdec.types import Draft, Verdict
from specdec_kernels import DenseQ, SparseQ

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.types import QForm, Step

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
        given: object = draft.tokens
        if k == 0 and isinstance(given, torch.Tensor) and not given.numel():
            # nothing was asked for; a tensor made of an empty list is of a float dtype
            none = torch.empty((batch, 0), dtype=torch.int64, device=self.device)
            return attrs.evolve(draft, tokens=none)
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

    def verdict(self, verdict: object, rule: str, step: Step, drafts: Tensor) -> Verdict:
        """An answer to `verify` under a rule of the speculator's own.

        drafts: the tokens under test, [batch, K].
        """
        hook = f"verify under its own rule {rule!r}"
        batch, k = drafts.shape
        if not isinstance(verdict, Verdict):
            raise self._wrong(hook, f"{_kind(verdict)}; a specdec.Verdict")
        tokens, count, rows = verdict.tokens, verdict.count, verdict.rows
        self._check(hook, "emitted tokens", tokens, torch.int64, (batch, k + 1))
        self._check(hook, "counts", count, torch.int64, (batch,))
        self._check(hook, "rows", rows, torch.int64, (batch, k + 1))
        self._check_values(hook, "emitted tokens", tokens, -1, self.vocab_size - 1)
        if self._reads_values:
            self._check_chain(hook, verdict, step, drafts)
        return verdict

    def _check_chain(self, hook: str, verdict: Verdict, step: Step, drafts: Tensor) -> None:
        """Whether a verdict emits what the step tests: a prefix of the drafts and one token."""
        tokens, count, rows = (x.numpy() for x in (verdict.tokens, verdict.count, verdict.rows))
        start, drafted = step.logits_start.numpy(), drafts.numpy()
        column = np.arange(tokens.shape[1])
        # who draws a token has a row of logits more than drafts, who does not has none
        owned = start[1:] - start[:-1]
        bad = (count > owned) | (count < np.minimum(owned, 1))
        if bad.any():
            b = bad.argmax()
            allowed = f"1 to {owned[b]}" if owned[b] else "0"
            raise self._wrong(
                hook,
                f"a count of {count[b]} for request {b}, which has {int(step.num_drafts[b])} "
                f"drafts and {owned[b]} rows of logits; {allowed}",
            )
        emitted = column < count[:, None]
        bad = (tokens >= 0) != emitted
        if bad.any():
            b = bad.any(1).argmax()
            raise self._wrong(
                hook,
                f"tokens {tokens[b].tolist()} and a count of {count[b]} for request {b}; that "
                "many tokens, then -1,",
            )
        # whatever has a token after it was accepted, so it is the draft of its column
        bad = (tokens[:, :-1] != drafted) & emitted[:, 1:]
        if bad.any():
            b = bad.any(1).argmax()
            raise self._wrong(
                hook,
                f"tokens {tokens[b, : count[b]].tolist()} for request {b}, whose drafts are "
                f"{drafted[b].tolist()}; its first drafts, then one token",
            )
        expected = np.where(emitted, start[:-1, None] + column, -1)
        bad = rows != expected
        if bad.any():
            b = bad.any(1).argmax()
            raise self._wrong(
                hook, f"rows {rows[b].tolist()} for request {b}; {expected[b].tolist()}"
            )

    def _wrong(self, hook: str, what: str) -> SpeculatorError:
        return SpeculatorError(f"{self.label} answered the hook {hook} with {what} is expected")

    def _check(
        self, hook: str, what: str, value: object, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(hook, f"{what} of type {type(value).__name__}; a tensor")
        if value.layout is not torch.strided or value.is_nested:
            raise self._wrong(hook, f"{what} that are sparse or nested; a dense tensor")
        if value.dtype is not dtype:
            raise self._wrong(hook, f"{what} of dtype {value.dtype}; {dtype}")
        if value.shape != shape:
            raise self._wrong(hook, f"{what} of shape {list(value.shape)}; {list(shape)}")
        self._check_device(hook, what, value)

    def _check_device(self, hook: str, what: str, value: Tensor) -> None:
        if value.device != self.device and not same_device(value.device, self.device):
            raise self._wrong(hook, f"{what} on {value.device}; {self.device}")

    def _check_values(self, hook: str, what: str, value: Tensor, low: int, high: int) -> None:
        if not self._reads_values or not value.numel():
            return
        # numpy on a view is the cheaper call; unsigned, one comparison sees both bounds
        values = value.detach().resolve_neg().numpy()
        if np.maximum.reduce((values - low).view(np.uint64), axis=None) > high - low:
            bad = values[(values < low) | (values > high)].flat[0]
            raise self._wrong(hook, f"{what} that hold {bad}; {low} to {high}")

    def _check_q(self, q: DenseQ | SparseQ, slots: int, k: int) -> None:
        if self._q is None or not isinstance(q, self._q):
            form = f"a {self._q.__name__}" if self._q else "None, for it declares no form of q,"
            raise self._wrong("propose", f"q of type {type(q).__name__}; {form}")
        for name, value in q._asdict().items():
            if name == "lse" and value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise self._wrong("propose", f"q.{name} of type {type(value).__name__}; a tensor")
            sizes = [f"{slots} slots", f"{k} or more", *([] if name == "lse" else ["..."])]
            if value.ndim != len(sizes) or value.shape[0] != slots or value.shape[1] < k:
                raise self._wrong(
                    "propose",
                    f"q.{name} of shape {list(value.shape)}; [{', '.join(sizes)}]",
                )
            kind = {"ids": torch.int64, "lse": torch.float32}.get(name)
            if not (value.dtype is kind if kind else value.is_floating_point()):
                raise self._wrong(
                    "propose", f"q.{name} of dtype {value.dtype}; {kind or 'a float dtype'}"
                )
            self._check_device("propose", f"q.{name}", value)
        ids = getattr(q, "ids", None)
        if ids is not None and ids.shape != q.logits.shape:
            raise self._wrong(
                "propose",
                f"q.ids of shape {list(ids.shape)} and q.logits of shape "
                f"{list(q.logits.shape)}; one shape for both",
            )
        if not q.logits.shape[-1]:
            raise self._wrong("propose", "q.logits without columns; 1 or more")
        # the kernels read a row as it lies; the stride of a single column means nothing
        if q.logits.shape[-1] > 1 and q.logits.stride(-1) != 1:
            raise self._wrong(
                "propose",
                f"q.logits of strides {list(q.logits.stride())}; a contiguous last dimension",
            )


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one, `cuda` without a number being any of them."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
