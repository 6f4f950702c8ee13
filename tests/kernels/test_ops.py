"""The public functions within code that torch traces."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    draft_vocabulary,
    edit_logits,
    process_logits,
    sample,
    sample_draft,
    token_logprobs,
    verify,
)

# what torch imports to trace uses what it deprecates
pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")
VOCAB = 50
MakeSampling = Callable[..., Sampling]


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traced whole: a break in the graph is an error."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, backend="aot_eager", fullgraph=True)
    return compiled


def chains(make_sampling: MakeSampling) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(6, VOCAB, generator=generator),
        "logits_start": torch.tensor([0, 3, 6]),
        "draft_tokens": torch.randint(VOCAB, (2, 2), generator=generator),
        "positions": torch.arange(6),
        "slots": torch.tensor([0, 1]),
        "sampling": make_sampling(2),
    }


def laws() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(4)])
    return {
        "dense": DenseQ(torch.randn(2, 2, VOCAB, generator=generator)),
        "dense, summed": DenseQ(torch.zeros(2, 2, VOCAB), torch.full((2, 2), math.log(VOCAB))),
        "sparse": SparseQ(ids.view(2, 2, 4), torch.randn(2, 2, 4, generator=generator)),
        "none": None,
    }


@pytest.mark.parametrize(
    ("method", "law"),
    [
        ("coupled", "none"),
        ("standard", "dense"),
        ("block", "sparse"),
        ("standard", "none"),
        ("standard", "dense, summed"),
        ("synthetic", "dense"),
    ],
)
def test_verify_is_traced_whole_and_gives_the_same(
    make_sampling: MakeSampling, method: str, law: str
) -> None:
    given = chains(make_sampling)
    rates = torch.tensor([0.9, 0.5]) if method == "synthetic" else None
    q = laws()[law]

    def step(logits: Tensor) -> tuple[Tensor, ...]:
        found = verify(
            **{**given, "logits": logits * 2}, method=method, q=q, acceptance_rates=rates
        )
        return found.tokens + 1, found.count, found.rows

    expected = step(given["logits"])
    assert all(map(torch.equal, traced(step)(given["logits"]), expected))


def test_sample_is_traced_whole(make_sampling: MakeSampling) -> None:
    logits, sampling = torch.randn(3, VOCAB), make_sampling(3)

    def step(logits: Tensor) -> Tensor:
        return sample(logits / 2, torch.arange(3), torch.tensor([2, -1, 0]), sampling) + 1

    assert torch.equal(traced(step)(logits), step(logits))


def test_edits_are_traced_with_what_they_are_given_to(make_sampling: MakeSampling) -> None:
    given = chains(make_sampling)
    masks = torch.full((6, 2), -1, dtype=torch.int32)
    masks[0] = 0  # nothing is left of the first row
    past = torch.zeros(2, 9).long(), torch.ones(2).long()
    inputs = EditInputs(*past, asked_edits(), masks)

    def step(logits: Tensor) -> list[Any]:
        return [*verify(**{**given, "logits": logits}, method="coupled", edits=inputs)]

    found, expected = traced(step)(given["logits"]), step(given["logits"])
    assert all(map(torch.equal, found, expected))
    assert found[3][:, 0].tolist() == [True, False]


@pytest.mark.parametrize("mapped", ["no", "ids", "tables"])
def test_drafts_are_traced_whole_and_written(make_sampling: MakeSampling, mapped: str) -> None:
    logits, sampling = torch.randn(2, 20), make_sampling(2)
    targets = torch.arange(20) * 2 + 1
    made = draft_vocabulary(targets, VOCAB)
    maps = {"no": None, "ids": targets, "tables": made}

    def step(logits: Tensor, ids: Tensor, kept: Tensor, lse: Tensor) -> Tensor:
        return sample_draft(
            logits * 3,
            torch.arange(2),
            torch.arange(2),
            sampling,
            how="independent",
            column=1,
            vocab_map=maps[mapped],
            vocab_size=VOCAB,
            candidates=SparseQ(ids, kept),
            lse=lse,
        )

    def places() -> list[Tensor]:
        return [torch.zeros(2, 2, 4).long(), torch.zeros(2, 2, 4), torch.zeros(2, 2)]

    eager, compiled = places(), places()
    assert torch.equal(traced(step)(logits, *compiled), step(logits, *eager))
    assert all(map(torch.equal, compiled, eager))
    assert compiled[2][:, 1].all()


def test_the_law_of_rows_is_traced_whole(make_sampling: MakeSampling) -> None:
    logits, slots, sampling = torch.randn(3, VOCAB), torch.tensor([0, 1, -1]), make_sampling(2)
    sampling = sampling._replace(top_k=torch.tensor([3, 0]))

    def step(logits: Tensor) -> Tensor:
        return process_logits(logits + 1, slots, sampling)

    assert torch.equal(traced(step)(logits), step(logits))


def test_logprobs_are_traced_whole() -> None:
    logits, tokens = torch.randn(3, VOCAB), torch.tensor([0, 7, -1])

    def step(logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(token_logprobs(logits + 1, tokens, 2))

    assert all(map(torch.equal, traced(step)(logits), step(logits)))


def asked_edits() -> Edits:
    none = torch.empty(2, 0, dtype=torch.int64)
    return Edits(
        repetition_penalty=torch.full((2,), 1.5),
        presence_penalty=torch.zeros(2),
        frequency_penalty=torch.ones(2),
        bias_ids=torch.tensor([[3], [-1]]),
        bias=torch.tensor([[9.0], [0.0]]),
        allowed_ids=none,
        stop_ids=none,
        min_length=torch.zeros(2, dtype=torch.int64),
        bad_words=torch.empty(2, 0, 0, dtype=torch.int64),
    )


def test_edits_are_traced_whole_and_leave_their_argument(make_sampling: MakeSampling) -> None:
    given = chains(make_sampling)
    del given["sampling"]
    more = {"history": torch.zeros(2, 9).long(), "prompt_length": torch.ones(2).long()}

    def step(logits: Tensor) -> Tensor:
        return edit_logits(**{**given, "logits": logits}, **more, edits=asked_edits())

    before = given["logits"].clone()
    found = traced(step)(given["logits"])
    assert torch.equal(given["logits"], before)
    assert torch.equal(found, step(before))


def test_arguments_are_checked_when_the_traced_code_runs(make_sampling: MakeSampling) -> None:
    given = chains(make_sampling)

    def step(logits: Tensor) -> Tensor:
        return verify(**{**given, "logits": logits}, method="couple").tokens

    with pytest.raises(ValueError, match=r"method is 'couple'.*did you mean 'coupled'"):
        traced(step)(given["logits"])


def test_operators_keep_what_they_promise(make_sampling: MakeSampling) -> None:
    """Schemas, fakes, shapes that vary: torch's own checks."""
    given = chains(make_sampling)
    rows = tuple(given.values())
    flat = (*rows[:5], list(given["sampling"]))
    ops = torch.ops.specdec
    logits, slots = given["logits"][:2].clone(), torch.arange(2)
    two = (logits, slots, slots, list(given["sampling"]))
    written = [torch.zeros(2, 2, 4).long(), torch.zeros(2, 2, 4), torch.zeros(2, 2)]
    q, lse = laws()["dense, summed"]
    edits = [torch.zeros(2, 9).long(), torch.ones(2).long(), *asked_edits()]
    for op, args in (
        (ops.verify, (*flat, "coupled", None, None, None, None, True, [], None, None)),
        (
            ops.verify,
            (*flat, "standard", q, None, lse, None, False, edits, None, None),
        ),
        (ops.sample, (*two, True, [], None, None)),
        (ops.sample_draft, (*two, "coupled", 0, None, None, None, None, *written)),
        (ops.process_logits, (logits, slots, list(given["sampling"]))),
        (ops.token_logprobs, (logits, slots, 3)),
        (ops.edit_logits, (*rows[:5], edits, None, None)),
    ):
        torch.library.opcheck(op.default, args)
