"""Results written where the caller wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import EditInputs, Edits, Sampling, Verified, sample, verify

MakeSampling = Callable[..., Sampling]
B, K, VOCAB = 2, 2, 7


@pytest.fixture
def given(make_sampling: MakeSampling) -> dict[str, Any]:
    """Arguments of `verify`: a request with all of its rows, and padding."""
    return {
        "logits": torch.randn(6, VOCAB),
        "logits_start": torch.tensor([0, 3, 6]),
        "draft_tokens": torch.randint(0, VOCAB, (B, K)),
        "positions": torch.arange(6),
        "slots": torch.tensor([1, -1]),
        "sampling": make_sampling(2),
        "method": "coupled",
    }


def edits() -> EditInputs:
    none, off = torch.empty(2, 0, dtype=torch.int64), torch.zeros(2)
    asked = Edits(
        repetition_penalty=off + 2,
        presence_penalty=off,
        frequency_penalty=off,
        bias_ids=none,
        bias=torch.empty(2, 0),
        allowed_ids=none,
        stop_ids=none,
        min_length=torch.zeros(2, dtype=torch.int64),
        bad_words=torch.empty(2, 0, 0, dtype=torch.int64),
    )
    return EditInputs(torch.zeros(2, 9, dtype=torch.int64), torch.ones(2).long(), asked)


def place() -> Verified:
    """Nothing that a call gives; the rows not even contiguous."""
    tokens = torch.full((B, K + 1), 99)
    return Verified(tokens, torch.full((B,), 99), torch.full((K + 1, B), 99).T)


def test_a_verdict_is_written_where_asked(given: dict[str, Any]) -> None:
    out = place()
    assert verify(**given, out=out) is out
    assert all(map(torch.equal, out[:3], verify(**given)[:3]))


def test_a_verdict_of_edited_rows_is_written_where_asked(given: dict[str, Any]) -> None:
    given["edits"] = edits()
    out = place()._replace(empty=torch.ones(B, K + 1, dtype=torch.bool))
    assert verify(**given, out=out) is out
    assert out.empty is not None
    pairs: Any = zip(out, verify(**given), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_samples_are_written_where_asked(make_sampling: MakeSampling) -> None:
    rows = torch.randn(3, VOCAB), torch.arange(3), torch.tensor([0, -1, 1]), make_sampling(2)
    out = torch.full((6,), 99)[::2]
    assert sample(*rows, out=out) is out
    assert torch.equal(out, sample(*rows))


def test_a_verdict_may_overwrite_the_drafts_it_judges(given: dict[str, Any]) -> None:
    want, out = verify(**given), place()
    out.tokens[:, :K] = given["draft_tokens"]
    verify(**{**given, "draft_tokens": out.tokens[:, :K]}, out=out)
    assert torch.equal(out.tokens, want.tokens)


# what torch imports to trace uses what it deprecates
@pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")
def test_traced_code_writes_results_where_asked(given: dict[str, Any]) -> None:
    sampling = given["sampling"]
    slots = torch.zeros(6, dtype=torch.int64)

    def step(logits: torch.Tensor, out: Verified, drawn: torch.Tensor) -> None:
        verify(**{**given, "logits": logits}, out=out)
        sample(logits, given["positions"], slots, sampling, out=drawn)

    out, drawn = place(), torch.full((6,), 99)
    torch._dynamo.reset()
    torch.compile(step, backend="aot_eager", fullgraph=True)(given["logits"], out, drawn)
    assert all(map(torch.equal, out[:3], verify(**given)[:3]))
    assert torch.equal(drawn, sample(given["logits"], given["positions"], slots, sampling))


@pytest.mark.parametrize(
    ("field", "value", "error", "said"),
    [
        ("tokens", torch.zeros(B, K).long(), ValueError, r"shape \(2, 2\); expected \(2, 3\)"),
        ("count", torch.zeros(B).int(), TypeError, "dtype torch.int32; expected torch.int64"),
        ("rows", torch.zeros(B, K + 1), TypeError, "dtype torch.float32; expected torch.int64"),
        ("rows", torch.zeros(B, K + 1).long().to("meta"), ValueError, "on meta; expected cpu"),
        ("rows", None, TypeError, "must be a tensor, not NoneType"),
        ("empty", torch.zeros(B, K + 1).bool(), ValueError, "given; calls with edits write it"),
    ],
)
def test_a_wrong_place_is_named_and_nothing_is_written(
    given: dict[str, Any], field: str, value: Any, error: type[Exception], said: str
) -> None:
    out = place()._replace(**{field: value})
    with pytest.raises(error, match=f"verify: out.{field} .*{said}"):
        verify(**given, out=out)
    kept = out.count if field != "count" else out.tokens
    assert bool((kept == 99).all())


def test_other_wrong_places_are_named(given: dict[str, Any], make_sampling: MakeSampling) -> None:
    wrong: Any = (0, 0, 0)
    with pytest.raises(TypeError, match="verify: out must be a Verified, not tuple"):
        verify(**given, out=wrong)
    with pytest.raises(ValueError, match=r"verify: out.empty is None; calls with edits write it"):
        verify(**given, edits=edits(), out=place())
    rows = torch.zeros(3, VOCAB), torch.arange(3), torch.zeros(3).long(), make_sampling(1)
    with pytest.raises(ValueError, match=r"sample: out has shape \(2,\); expected \(3,\)"):
        sample(*rows, out=torch.zeros(2).long())
    with pytest.raises(TypeError, match=r"sample: out has dtype torch.float32; .*int64"):
        sample(*rows, out=torch.zeros(3))
    with pytest.raises(TypeError, match="sample: out must be a tensor, not tuple"):
        sample(*rows, out=wrong)
