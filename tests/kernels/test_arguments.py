from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels
from specdec_kernels import (
    DenseQ,
    EditInputs,
    Edits,
    Sampling,
    SparseQ,
    process_logits,
    sample,
    sample_draft,
    verify,
)

MakeSampling = Callable[..., Sampling]


def arguments(make_sampling: MakeSampling) -> dict[str, Any]:
    """Two requests with two drafts over five ids."""
    return {
        "logits": torch.zeros(6, 5),
        "logits_start": torch.tensor([0, 3, 6]),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.int64),
        "positions": torch.arange(6),
        "slots": torch.tensor([0, 1]),
        "sampling": make_sampling(2),
        "method": "coupled",
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("logits", [[0.0]], TypeError, "logits must be a tensor, not list"),
        (
            "logits",
            torch.zeros(6, 5).int(),
            TypeError,
            "logits has dtype torch.int32; expected a fl",
        ),
        ("logits", torch.zeros(6), ValueError, r"logits has shape \(6,\); expected \[R, V\]"),
        ("logits", torch.zeros(6, 0), ValueError, "logits has no columns"),
        (
            "logits",
            torch.zeros(5, 6).T,
            ValueError,
            r"logits has strides \(1, 6\); expected a cont",
        ),
        ("logits_start", torch.empty(0).long(), ValueError, "logits_start is empty"),
        (
            "logits_start",
            torch.zeros(3),
            TypeError,
            "logits_start has dtype torch.float32; .*int64",
        ),
        ("draft_tokens", torch.zeros(3, 2).long(), ValueError, r"\(3, 2\); .*\[B, K\] with B=2"),
        ("positions", torch.arange(5), ValueError, r"positions has shape \(5,\); .* with R=6"),
        ("positions", torch.arange(6).int(), TypeError, "positions has dtype torch.int32"),
        ("slots", torch.arange(2, device="meta"), ValueError, "slots is on meta; expected cpu"),
        ("slots", None, TypeError, r"slots must be a tensor, not NoneType \(None\)"),
        ("sampling", (1, 2), TypeError, "sampling must be a Sampling, not tuple"),
        (
            "method",
            "blok",
            ValueError,
            r"method is 'blok'; .* synthetic \(did you mean 'block'\?\)",
        ),
        ("method", "zzz", ValueError, "expected one of coupled, standard, block, synthetic$"),
        ("method", "synthetic", ValueError, "method 'synthetic' needs acceptance_rates"),
        ("acceptance_rates", torch.ones(2), ValueError, "'coupled' does not take acceptance_rates"),
        ("q", torch.zeros(2, 2, 5), TypeError, "q must be None, DenseQ or SparseQ, not Tensor"),
        ("q", DenseQ(torch.zeros(2, 1, 5)), ValueError, "q.logits has 1 columns; .* least K=2"),
        (
            "q",
            DenseQ(torch.zeros(3, 2, 5)),
            ValueError,
            r"q.logits .*\[slots, columns, Vd\] with sl",
        ),
        ("q", DenseQ(torch.zeros(2, 2, 5), torch.zeros(2, 1)), ValueError, "q.lse has 1 columns"),
        ("q", DenseQ(torch.zeros(2, 2, 5), torch.zeros(2, 2).double()), TypeError, "q.lse has dty"),
        ("q", DenseQ(torch.zeros(2, 2, 5).int()), TypeError, "q.logits has dtype torch.int32"),
        (
            "q",
            SparseQ(torch.zeros(2, 2, 3).long(), torch.zeros(2, 2, 4)),
            ValueError,
            r"q.logits has shape \(2, 2, 4\); .* with slots=2, columns=2, C=3",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    make_sampling: MakeSampling, name: str, value: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"verify: .*{said}"):
        verify(**{**arguments(make_sampling), name: value})


def test_a_wrong_sampling_parameter_is_named(make_sampling: MakeSampling) -> None:
    sampling = make_sampling(2)._replace(top_k=torch.zeros(2))
    with pytest.raises(TypeError, match=r"sampling.top_k has dtype torch.float32; .*int64"):
        verify(**{**arguments(make_sampling), "sampling": sampling})
    sampling = make_sampling(2)._replace(min_p=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sampling.min_p has shape \(3,\); .*slots=2"):
        verify(**{**arguments(make_sampling), "sampling": sampling})


@pytest.mark.parametrize(
    ("field", "value", "error", "said"),
    [
        ("history", torch.zeros(2, 3), TypeError, "history has dtype torch.float32"),
        ("prompt_length", torch.zeros(3).long(), ValueError, r"prompt_length .*slots=2"),
        ("edits", None, TypeError, "edits must be an Edits, not NoneType"),
        ("grammar", torch.zeros(6, 1), TypeError, "grammar has dtype torch.float32; .*int32"),
        ("grammar", torch.zeros(6, 2).int(), ValueError, r"grammar has shape \(6, 2\); .*words=1"),
        ("grammar_start", torch.zeros(6).long(), ValueError, "grammar_start needs grammar"),
    ],
)
def test_a_wrong_input_of_edits_is_named(
    make_sampling: MakeSampling, field: str, value: Any, error: type[Exception], said: str
) -> None:
    one, none, ids = torch.ones(2), torch.zeros(2), torch.zeros(2, 0).long()
    edits = Edits(one, none, none, ids, torch.zeros(2, 0), ids, ids, ids.sum(1), ids[:, None])
    inputs = EditInputs(torch.zeros(2, 3).long(), torch.zeros(2).long(), edits)
    verify(**arguments(make_sampling), edits=inputs)
    wrong: Any = inputs._replace(**{field: value})
    with pytest.raises(error, match=f"^verify: {said}"):
        verify(**arguments(make_sampling), edits=wrong)
    six = torch.zeros(6).long()
    with pytest.raises(error, match=f"^sample: {said}"):
        sample(torch.zeros(6, 5), torch.arange(6), six, make_sampling(2), edits=wrong)


def test_edits_alone_are_not_what_edits_need(make_sampling: MakeSampling) -> None:
    given = {**arguments(make_sampling), "edits": (1, 2)}
    with pytest.raises(TypeError, match="verify: edits must be an EditInputs, not tuple"):
        verify(**given)


def test_too_few_rates_are_refused(make_sampling: MakeSampling) -> None:
    given = {**arguments(make_sampling), "method": "synthetic", "acceptance_rates": torch.ones(1)}
    with pytest.raises(ValueError, match="acceptance_rates has 1 columns; expected at least K=2"):
        verify(**given)


def test_the_other_functions_name_themselves(make_sampling: MakeSampling) -> None:
    sampling, two = make_sampling(2), torch.arange(2)
    with pytest.raises(ValueError, match=r"^sample: slots has shape"):
        sample(torch.zeros(3, 5), torch.arange(3), two, sampling)
    with pytest.raises(ValueError, match=r"^process_logits: slots has shape"):
        process_logits(torch.zeros(3, 5), two, sampling)
    with pytest.raises(ValueError, match=r"^sample_draft: how is 'couple'; .*mean 'coupled'"):
        sample_draft(torch.zeros(2, 5), two, two, sampling, how="couple", column=0)
    with pytest.raises(ValueError, match=r"^sample_draft: vocab_map needs vocab_size"):
        sample_draft(torch.zeros(2, 2), two, two, sampling, how="greedy", column=0, vocab_map=two)
    with pytest.raises(ValueError, match=r"^sample_draft: vocab_map has shape \(2,\); .*Vd=5"):
        sample_draft(
            torch.zeros(2, 5),
            two,
            two,
            sampling,
            how="greedy",
            column=0,
            vocab_map=two,
            vocab_size=9,
        )
    with pytest.raises(ValueError, match="vocab_size is 0; expected 1 or more"):
        sample_draft(torch.zeros(2, 5), two, two, sampling, how="greedy", column=0, vocab_size=0)


def test_public_means_exported_and_documented() -> None:
    for name in specdec_kernels.__all__:
        assert getattr(specdec_kernels, name).__doc__


def test_the_examples_in_docstrings_and_readme_run() -> None:
    assert doctest.testmod(specdec_kernels).failed == 0
    readme = Path(str(specdec_kernels.__file__)).resolve().parent / "README.md"
    found = doctest.testfile(str(readme), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0
