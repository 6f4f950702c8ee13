"""Whatever stands in for a sampling parameter is refused as a `PromptError`, or served.

Slow because some of what is accepted is run; few examples, but each has several parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import LLM, PromptError, RequestOutput, SamplingParams
from specdec.testing import BigramSpeculator

NAMES = [f.name for f in attrs.fields(SamplingParams)]
OTHERS = [
    "best_of",
    "guided_json",
    "use_beam_search",
    "extra_args",
    "stop_str",
    "",
    "__init__",
    "é",
]
VOCAB = 32

# -- junk --------------------------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 40),
    st.sampled_from([10**30, -(10**30), 2**63, -(2**63), 2**31]),
    st.floats(),
    st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, 1e-320, 5e-324, 1e308]),
    st.text(max_size=5),
    st.sampled_from(
        ["the", " cat", "\ud800", "\x00", "the\ud800", "é́", "sat on", "<eos>", "x" * 2000]
    ),
    st.binary(max_size=3),
    st.complex_numbers(),
)
arrays = st.sampled_from(
    [
        np.int64(3),
        np.float32(0.5),
        np.bool_(True),
        np.array(2),
        np.array([1.5, 2]),
        np.array([[1], [2]]),
        np.array([]),
        np.array(["the", "cat"]),
        np.array([None, 3], dtype=object),
        np.float64("nan"),
        torch.tensor(3),
        torch.tensor([4, 5]),
        torch.tensor(0.5, requires_grad=True),
        torch.tensor(2.0, dtype=torch.bfloat16),
    ]
)


class Odd:
    """Compares with nothing, and has no text."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")


def circle() -> list[Any]:
    """A list that holds itself."""
    values: list[Any] = []
    values.append(values)
    return values


def deep() -> list[Any]:
    """Lists in lists, as JSON may hold them."""
    values: list[Any] = []
    for _ in range(5000):
        values = [values]
    return values


objects = st.sampled_from([object(), print, int, len, NAMES, lambda rows, logits: logits])
junk = st.recursive(
    st.one_of(scalars, arrays, objects),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(-1, 40), st.text(max_size=3)), inner, max_size=3),
        st.frozensets(st.integers(0, 9), max_size=3),
    ),
    max_leaves=5,
)

# what is nearly right is more likely to be taken
ids = st.lists(st.integers(0, VOCAB + 1), max_size=4)
texts = st.lists(
    st.sampled_from(["the", "cat", "a", "t", " ", "on a", "mat.", "zebra", "é"]), max_size=3
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(0, 3),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 40),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(),
    "repetition_penalty": st.floats(0, 1e6),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB), st.floats(-100, 100), max_size=3),
    "bad_words": texts,
    "allowed_token_ids": ids,
    "logits_processors": st.just([lambda rows, logits: logits * 2]),
    "min_tokens": st.one_of(st.integers(0, 4), st.integers(0, 2**70)),
    "max_tokens": st.one_of(st.none(), st.integers(0, 4), st.integers(0, 2**70)),
    "ignore_eos": st.booleans(),
    "stop_token_ids": ids,
    "stop": st.one_of(st.text(max_size=3), texts),
    "include_stop_str_in_output": st.booleans(),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.integers(-1, 40),
    "prompt_logprobs": st.integers(-1, 40),
    "output_kind": st.sampled_from(["cumulative", "delta", "final_only", "DELTA"]),
}


def keywords(*, wild: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Some parameters; all of them junk, or one at most."""

    def values(name: str) -> st.SearchStrategy[Any]:
        fitting = likely.get(name, junk)
        return junk if wild else fitting

    names = st.lists(st.sampled_from([*NAMES, *OTHERS] if wild else NAMES), max_size=6, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({n: values(n) for n in some}))


# -- refused or made ---------------------------------------------------------


def test_there_is_a_likely_value_for_every_parameter() -> None:
    assert sorted(likely) == sorted(NAMES)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(keywords(wild=True))
def test_junk_is_refused_as_a_prompt_error_or_taken(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except PromptError as error:
        assert 0 < len(str(error)) < 2000  # noqa: PT017
    else:
        assert params == params
        hash(params)
        assert len(repr(params)) > 0
        assert attrs.evolve(params) == params


WORST: dict[str, Callable[[], Any]] = {
    "circle": circle,
    "circle inside": lambda: {1: circle()},
    "deep": deep,
    "odd": Odd,
    "odd inside": lambda: {1: Odd()},
    "no data": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.ones(2).to_sparse(),
}


@pytest.mark.parametrize("which", WORST)
def test_the_worst_values_are_refused_as_a_prompt_error(which: str) -> None:
    for name in [*NAMES, "guided_json"]:
        with pytest.raises(PromptError) as caught:
            SamplingParams(**{name: WORST[which]()})
        assert name in str(caught.value)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_python_does_not_write_are_refused_or_served(
    sign: int, small_model: Any, tokenizer: Any
) -> None:
    huge = sign * 10**5000
    with LLM(small_model, tokenizer=tokenizer) as llm:
        for name in NAMES:
            for value in (huge, [huge], {huge: 1.0}, {1: huge}):
                try:
                    params = SamplingParams(**{"max_tokens": 2, name: value})
                    llm.add_request([4], params)
                except PromptError as error:
                    assert name in str(error)  # noqa: PT017
                while llm.has_unfinished_requests():
                    llm.step()


def test_refused_values_name_the_parameter() -> None:
    for name in NAMES:
        with pytest.raises(PromptError, match=name):
            SamplingParams(**{name: object()})


# -- run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def llms(small_model: Any, tokenizer: Any) -> Iterator[Mapping[str, LLM]]:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    config = {"method": BigramSpeculator, "table": table, "num_speculative_tokens": 3}
    with (
        LLM(small_model, tokenizer=tokenizer) as plain,
        LLM(small_model, tokenizer=tokenizer, speculative_config=config) as drafts,
    ):
        yield {"plain": plain, "drafts": drafts}


def shortened(params: SamplingParams) -> SamplingParams:
    """Three completions of three tokens at most, unless more is the least that it can be."""
    changes: dict[str, Any] = {"n": min(params.n, 3)}
    if params.min_tokens <= 3:
        changes["max_tokens"] = min(params.max_tokens or 3, 3)
    return attrs.evolve(params, **changes)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.one_of(keywords(wild=False), keywords(wild=False), keywords(wild=True)))
def test_what_is_taken_can_be_run(values: dict[str, Any], llms: Mapping[str, LLM]) -> None:
    try:
        params = SamplingParams(**values)
    except PromptError:
        return
    params = shortened(params)
    for llm in llms.values():
        bystander = llm.add_request([5, 6], SamplingParams(temperature=0, max_tokens=3))
        try:
            name = llm.add_request([4, 9, 30], params)
        except PromptError as error:
            assert 0 < len(str(error)) < 2000  # noqa: PT017
            name = None
        ended: dict[str, RequestOutput] = {}
        for _ in range(8):
            ended |= {o.request_id: o for o in llm.step() if o.finished}
        if name is not None and name not in ended:
            llm.abort_request(name)
            ended |= {o.request_id: o for o in llm.step()}
        assert ended[bystander].error is None
        assert not llm.has_unfinished_requests()
        if name is not None:
            reasons = {c.finish_reason for c in ended[name].outputs}
            assert reasons <= {"stop", "length", "abort"} or "exclude every" in str(
                ended[name].error
            )
