"""The cut of every row that tests a draft: what it keeps is what the reference keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import Sampling, reference

Make = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAWS: dict[str, dict[str, float]] = {
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.9},
    "top-k, top-p": {"top_k": 12, "top_p": 0.8},
    "min-p, top-p": {"min_p": 0.02, "top_p": 0.8},
    "all": {"min_p": 0.01, "top_k": 20, "top_p": 0.9},
    "little top-p": {"top_p": 1e-6},
    "no top-p": {"top_p": 0.0},
    "nearly all by top-p": {"top_p": 0.9999},
}


@pytest.fixture
def cuts(kernels: Any, device: torch.device) -> Callable[[Tensor, Sampling], Tensor]:
    """The cuts that the kernels find of rows [R, V], each a draft of one request: float32 [R]."""

    def find(logits: Tensor, sampling: Sampling) -> Tensor:
        from specdec_kernels.gpu.chains import Rows, draws

        count = len(logits)
        start = torch.arange(0, 2 * count + 1, 2, device=device)
        rows = Rows(
            logits.to(device).repeat_interleave(2, 0), start,
            torch.zeros((count, 1), dtype=torch.int64, device=device),
            torch.arange(2 * count, device=device), torch.arange(count, device=device),
            sampling, 1, None,
        )  # fmt: skip
        return draws(rows, last=True).cuts.view(count, 2)[:, 0]

    return find


@pytest.fixture
def keeps_the_same(
    cuts: Callable[[Tensor, Sampling], Tensor], device: torch.device
) -> Callable[[Tensor, Sampling], Tensor]:
    """Compare what rows keep, and return the cuts.

    Where sums in another order put the cut elsewhere, what is between the two is next to nothing.
    """

    def check(logits: Tensor, sampling: Sampling) -> Tensor:
        logits, at = logits.to(device), torch.arange(len(logits), device=device)
        whole = sampling._replace(
            top_k=sampling.top_k * 0, top_p=sampling.top_p * 0 + 1, min_p=sampling.min_p * 0
        )
        want = reference.process_logits(logits, at, sampling)
        every = reference.process_logits(logits, at, whole)
        found = cuts(logits, sampling)
        # under the interpreter, whose fma rounds twice, a division may be off in its last bit
        least = found - found.abs().nan_to_num(posinf=0.0) * 3e-7
        kept = (every >= least[:, None]) & (every > -inf)
        different = kept != (want > -inf)
        for row in different.any(1).nonzero().flatten().tolist():
            law = every[row].double().softmax(-1)
            between, values = law[different[row]].sum(), torch.unique(every[row][different[row]])
            above = law[every[row] > values.max()].sum()
            mass = law[want[row] > -inf].sum()
            edge = abs(above - mass) < 1e-5 or abs(above - sampling.top_p[row]) < 1e-5
            assert between < 1e-5 or (len(values) == 1 and edge), row
        return found.cpu()

    return check


@pytest.fixture
def every_law(make_sampling: Make) -> Sampling:
    """A slot of each of LAWS."""
    count, given = len(LAWS), list(LAWS.values())
    sampling: Sampling = make_sampling(
        count,
        temperature=[1.0, 0.7, 1.6] * (count // 3),
        top_k=[int(x.get("top_k", 0)) for x in given],
        top_p=[x.get("top_p", 1.0) for x in given],
        min_p=[x.get("min_p", 0.0) for x in given],
    )
    return sampling


@pytest.mark.parametrize(("vocab", "dtype"), list(zip([1, 33, 150], DTYPES, strict=True)), ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_each_cut_in_rows_of_any_length(
    every_law: Sampling, keeps_the_same: Make, vocab: int, dtype: torch.dtype
) -> None:
    keeps_the_same((torch.randn(len(LAWS), vocab) * 4).to(dtype), every_law)


def test_rows_of_several_whole_tiles(make_sampling: Make, keeps_the_same: Make) -> None:
    keeps_the_same((torch.randn(1, 9001) * 3).bfloat16(), make_sampling(1, **LAWS["all"]))


@pytest.mark.parametrize(
    ("law", "dtype"), [("top-k", torch.bfloat16), ("min-p, top-p", torch.float32)], ids=str
)
@pytest.mark.usefixtures("small_tiles")
def test_a_list_that_overflows_falls_back_to_a_search(
    monkeypatch: pytest.MonkeyPatch,
    make_sampling: Make,
    keeps_the_same: Make,
    law: str,
    dtype: torch.dtype,
) -> None:
    from specdec_kernels.gpu import survey

    tiles = 2
    monkeypatch.setattr(survey, "ROOM", tiles)  # one id of each
    logits = (torch.randn(1, 64 * tiles) * 0.7).to(dtype)
    found = keeps_the_same(logits, make_sampling(1, temperature=1.3, **LAWS[law]))
    scaled = logits.float() / 1.3
    rung = (found / 1.5).floor()
    floor = scaled.amax(1) + math.log(LAWS[law].get("min_p", 1e-9))
    listed = ((scaled / 1.5).floor() == rung[:, None]) & (scaled >= floor[:, None])
    assert (listed.sum(1) > tiles).all(), "the case is to overflow"


@pytest.mark.usefixtures("small_tiles")
def test_ties_at_the_cut_and_at_the_levels(make_sampling: Make, keeps_the_same: Make) -> None:
    logits = torch.stack([
        torch.randn(150).round() * 1.5,  # on the levels themselves
        torch.randn(150).round(),
        torch.zeros(150),
        torch.randn(150).round() * 1e-3 - 60,
    ])  # fmt: skip
    law = {"top_k": [20, 20, 7, 0], "top_p": [0.9, 1.0, 0.5, 0.9]}
    keeps_the_same(logits, make_sampling(4, **law))


@pytest.mark.usefixtures("small_tiles")
def test_rows_with_excluded_nan_and_infinite_logits(
    make_sampling: Make, keeps_the_same: Make
) -> None:
    logits = torch.randn(5, 150) * 2
    logits[0, 3:] = -inf  # fewer than top-k are left, in one tile of three
    logits[1, ::7] = nan
    logits[2, 100] = inf
    logits[3, 1::2] = -inf
    logits[4, :64] = -inf
    law = {"top_k": [20, 20, 0, 0, 7], "top_p": [1.0, 0.9, 0.9, 0.8, 1.0]}
    keeps_the_same(logits.bfloat16(), make_sampling(5, temperature=0.7, min_p=0.001, **law))


@pytest.mark.usefixtures("small_tiles")
def test_cuts_far_below_the_top_are_found_too(make_sampling: Make, keeps_the_same: Make) -> None:
    logits = torch.linspace(-60, 60, 150).expand(2, 150).contiguous()
    found = keeps_the_same(logits, make_sampling(2, top_k=[149, 2]))
    assert found[0] < 60 - 15 * 1.5


@pytest.mark.usefixtures("small_tiles")
def test_rows_that_ask_for_no_cut_have_none(make_sampling: Make, cuts: Make) -> None:
    sampling = make_sampling(3, temperature=[1.0, 0.0, 1.0], top_p=[1.0, 0.5, 0.5])
    found = cuts(torch.randn(3, 90), sampling).tolist()
    assert found[:2] == [-inf, -inf]
    assert math.isfinite(found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("vocab", [32000, 128256, 262144])
def test_cuts_at_the_size_of_models(
    make_sampling: Make, keeps_the_same: Make, law: str, vocab: int
) -> None:
    logits = torch.randn(12, vocab) * torch.tensor([0.5, 1.0, 2.0, 3.0] * 3)[:, None]
    sampling = make_sampling(12, temperature=[0.7, 1.0, 1.0] * 4, **LAWS[law])
    for dtype in DTYPES:
        keeps_the_same(logits.to(dtype), sampling)
