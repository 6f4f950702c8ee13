"""`verify` and `sample` of edited logits: the reference's tokens, and no trace on the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    DenseQ,
    EditInputs,
    Edits,
    Sampling,
    SparseQ,
    Verified,
    empty_rows,
    reference,
)
from specdec_kernels.edits import edited_copy

Make = Callable[..., Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB, K = 110, 2
TEMPERATURES = [0.0, 0.8, 0.0, 1.3, 0.8]  # by slot; the last is never edited and holds padding
ASKING = [True, True, False, False, False]
LOOSE = {"top_k": [0, 40, 0, 0, 3], "top_p": [1.0, 0.9, 1.0, 0.7, 1.0]}


def wishes(asking: Sequence[bool], device: torch.device) -> Edits:
    """Of slots that ask: everything there is to ask for."""
    ask = torch.tensor(asking, device=device)

    def number(value: float, off: float) -> Tensor:
        return torch.where(ask, value, off).float()

    def ids(*listed: int) -> Tensor:
        table = torch.tensor(listed, device=device).expand(len(asking), len(listed))
        return table.where(ask[:, None], -1)

    words = torch.tensor([[-1, 70], [5, 9], [9, 5]], device=device)
    return Edits(
        repetition_penalty=number(1.6, 1.0),
        presence_penalty=number(0.5, 0.0),
        frequency_penalty=number(0.4, 0.0),
        bias_ids=ids(0, 70, 72, VOCAB - 1),
        bias=torch.tensor([2.0, 9.0, 3.0, 2.0], device=device).expand(len(asking), 4),
        allowed_ids=ids(*range(0, VOCAB, 2), 5, 9, VOCAB - 1),
        stop_ids=ids(72, 8),
        min_length=torch.where(ask, 9, 0),
        bad_words=words.where(ask[:, None, None], -1),
    )


class Step:
    """One step: a request in each of the slots 0 to 3, in another order, and padding."""

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        grammar: bool = False,
        k: int = K,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        rows = torch.tensor([k + 1, k + 1, 2, k + 1, k + 1])
        start = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
        total = int(start[-1])
        owner = torch.arange(5).repeat_interleave(rows)
        length = torch.tensor([6, 8, 7, 8, 5])[owner]
        self.logits = (torch.randn(total, VOCAB) * 2).to(device, dtype)
        self.start, self.slots = start.to(device), torch.tensor([1, 3, 0, 2, -1]).to(device)
        self.drafts = torch.randint(0, VOCAB, (5, k)).to(device)
        self.positions = (length + torch.arange(total) - start[owner]).to(device)
        self.sampling = sampling
        history = torch.randint(0, 12, (5, 9)).to(device)
        self.edits = EditInputs(
            history, torch.tensor([2, 3, 0, 1, 2], device=device), wishes(ASKING, device)
        )
        if grammar:
            # that of the second request, and of the first; the others have none
            masks = torch.randint(-(2**31), 2**31, (2 * k + 2, -(-VOCAB // 32)))
            begin = torch.tensor([k + 1, 0, -1, -1, 2], device=device)
            self.edits = self.edits._replace(
                grammar=masks.to(torch.int32).to(device), grammar_start=begin
            )

    def draft(self, *, truncate: bool, right: float = 0.8) -> None:
        """Make most drafts those that the target would draw itself."""
        tokens = self.drafts
        for _ in range(tokens.shape[1]):
            own = self.verify(reference, "coupled", truncate=truncate).tokens[:, :-1]
            self.drafts = own.where(own >= 0, self.drafts)
        keep = torch.rand(tokens.shape) < right
        self.drafts = self.drafts.where(keep.to(tokens.device), tokens)

    def verify(self, op: Any, method: str, *, truncate: bool, **named: Any) -> Verified:
        out: Verified = op.verify(
            self.logits, self.start, self.drafts, self.positions, self.slots, self.sampling,
            method=method, truncate=truncate, **{"edits": self.edits, **named},
        )  # fmt: skip
        return out

    def sample(self, op: Any, *, truncate: bool) -> Tensor:
        """Of the first rows, each as a request that has no others."""
        first = self.start[:-1]
        tokens: Tensor = op.sample(
            self.logits[first], self.positions[first], self.slots, self.sampling,
            truncate=truncate, edits=self.edits,
        )  # fmt: skip
        return tokens


@pytest.fixture
def make_step(make_sampling: Make, device: torch.device) -> Make:
    def make(*, loose: bool = False, **named: Any) -> Step:
        sampling = make_sampling(5, temperature=TEMPERATURES, **(LOOSE if loose else {}))
        return Step(sampling, device, **named)

    return make


def law(step: Step, kind: str) -> DenseQ | SparseQ | None:
    """A q of every slot that is near p for none of them."""
    device = step.slots.device
    if kind == "dense":
        return DenseQ(torch.randn(5, K, VOCAB, device=device))
    if kind == "sparse":
        ids = torch.rand(5, K, VOCAB, device=device).argsort(-1)[..., :4]
        for b, slot in enumerate(step.slots.tolist()):
            if slot >= 0:
                ids[slot, :, 0] = step.drafts[b]
                ids[slot, :, 1:] = ids[slot, :, 1:].where(
                    ids[slot, :, 1:] != step.drafts[b, :, None], -1
                )
        return SparseQ(ids, torch.randn(5, K, 4, device=device))
    return None


@pytest.mark.parametrize(
    ("dtype", "truncate"), [*((x, False) for x in DTYPES), (torch.bfloat16, True)], ids=str
)
@pytest.mark.usefixtures("small_tiles")
def test_coupled_verification_of_edited_rows_is_that_of_the_reference(
    kernels: Any, make_step: Make, dtype: torch.dtype, truncate: bool
) -> None:
    step = make_step(loose=truncate, dtype=dtype, grammar=dtype == torch.bfloat16)
    step.draft(truncate=truncate)
    before = step.logits.clone()
    out = step.verify(kernels, "coupled", truncate=truncate)
    assert all(map(torch.equal, out, step.verify(reference, "coupled", truncate=truncate)))
    assert torch.equal(step.logits, before)
    assert out.count[4] == 0
    assert out.count.max() > 2


@pytest.mark.parametrize(
    ("method", "kind", "truncate"),
    [
        ("standard", "one-hot", True),
        ("standard", "dense", False),
        ("standard", "sparse", False),
        ("block", "one-hot", False),
        ("block", "dense", True),
        ("block", "sparse", False),
        ("synthetic", "dense", False),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_other_methods_judge_edited_rows_as_the_reference_does(
    kernels: Any, make_step: Make, method: str, kind: str, truncate: bool
) -> None:
    step = make_step(loose=truncate, grammar=kind == "sparse")
    step.draft(truncate=truncate)
    named: dict[str, Any] = {"q": law(step, kind)}
    if method == "synthetic":
        named["acceptance_rates"] = torch.full((K,), 0.6, device=step.slots.device)
    out = step.verify(kernels, method, truncate=truncate, **named)
    want = step.verify(reference, method, truncate=truncate, **named)
    assert all(map(torch.equal, out, want))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_samples_of_edited_rows_are_those_of_the_reference(
    kernels: Any, make_step: Make, truncate: bool
) -> None:
    for dtype in DTYPES[1:2] if truncate else DTYPES:
        step = make_step(loose=truncate, dtype=dtype, grammar=True)
        own = step.sample(kernels, truncate=truncate)
        assert torch.equal(own, step.sample(reference, truncate=truncate))
        assert own[4] == -1


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_rows_with_nan_and_infinity_are_edited_too(
    kernels: Any, make_step: Make, truncate: bool
) -> None:
    step = make_step(loose=truncate, k=1)
    first = step.start[:-1]
    step.logits[first, 4] = nan
    step.logits[first[0], 100] = inf
    step.logits[first[1], 3] = -inf
    step.draft(truncate=truncate, right=1.0)
    for method in ("coupled", "standard"):
        out = step.verify(kernels, method, truncate=truncate)
        assert all(map(torch.equal, out, step.verify(reference, method, truncate=truncate)))


@pytest.mark.usefixtures("small_tiles")
def test_requests_that_ask_for_nothing_keep_their_tokens_and_others_do_not(
    kernels: Any, make_step: Make
) -> None:
    step = make_step()
    edited = step.verify(kernels, "coupled", truncate=False)
    plain = step.verify(kernels, "coupled", truncate=False, edits=None)
    assert torch.equal(edited.tokens[[1, 3]], plain.tokens[[1, 3]])
    assert not torch.equal(edited.tokens[[0, 2]], plain.tokens[[0, 2]])


def test_a_row_that_edits_leave_nothing_of_gives_id_0(kernels: Any, make_step: Make) -> None:
    step = make_step(k=0)
    nothing = torch.zeros(5, -(-VOCAB // 32), dtype=torch.int32, device=step.slots.device)
    step.edits = step.edits._replace(grammar=nothing)
    assert step.sample(kernels, truncate=False).tolist() == [0, 0, 0, 0, -1]


@pytest.mark.parametrize(
    ("method", "k", "truncate"),
    [
        ("coupled", K, False),
        ("coupled", K, True),
        ("standard", K, False),
        ("standard", 0, False),
        ("standard", 0, True),
        ("synthetic", K, False),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_tokens_of_rows_that_edits_leave_nothing_of_are_marked(
    kernels: Any, make_step: Make, method: str, k: int, truncate: bool
) -> None:
    step = make_step(loose=truncate, grammar=True, k=k, seed=1)
    # of the second request its second row; of the first one its first and its last
    step.edits.grammar[[1, k + 1, 2 * k + 1]] = 0
    step.logits[step.start[2]] = nan
    step.logits[step.start[3], 1:] = -inf
    step.draft(truncate=truncate, right=1.0)
    named: dict[str, Any] = {}
    if method == "synthetic":
        named["acceptance_rates"] = torch.ones(K, device=step.slots.device)
    out = step.verify(kernels, method, truncate=truncate, **named)
    chains = step.logits, step.start, step.drafts, step.positions, step.slots
    empty = empty_rows(edited_copy(*chains, step.edits))
    assert out.empty is not None
    assert torch.equal(out.empty, empty[out.rows] & (out.rows >= 0))
    drafts_stay = k > 0 and method != "standard"
    assert out.empty.any(1).tolist() == [True, drafts_stay, True, False, False]
    assert out.empty[0, k] == (k == 0 or drafts_stay)
    plain = step.verify(kernels, method, truncate=truncate, edits=None, **named)
    assert plain.empty is None


@pytest.mark.usefixtures("small_tiles")
def test_more_requests_than_a_launch_takes_keep_their_own_edits(
    kernels: Any, make_step: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST", 2)
    step = make_step(k=1, grammar=True)
    total = len(step.logits)
    masks = torch.randint(-(2**31), 2**31, (total, -(-VOCAB // 32))).to(torch.int32)
    given, masks = step.edits.grammar_start, masks.to(step.slots.device)
    for start in (given, None):  # each row's own mask, if nothing else is said
        step.edits = step.edits._replace(grammar=masks, grammar_start=start)
        out = step.verify(kernels, "coupled", truncate=False)
        want = step.verify(reference, "coupled", truncate=False)
        assert all(map(torch.equal, out, want))
        own = step.sample(kernels, truncate=False)
        assert torch.equal(own, step.sample(reference, truncate=False))


def test_float64_is_edited_by_the_reference(kernels: Any, make_step: Make) -> None:
    step = make_step(dtype=torch.float64, grammar=True)
    out = step.verify(kernels, "coupled", truncate=True)
    assert all(map(torch.equal, out, step.verify(reference, "coupled", truncate=True)))
    assert torch.equal(step.sample(kernels, truncate=True), step.sample(reference, truncate=True))
